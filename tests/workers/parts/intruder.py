"""An engine for the fork server that tries to get out: from the job itself, and from a program that the job starts.

A request holds facts of the world outside. The answer says for each attempt whether it was refused (OSError) or what it
reached. Run as a program, with the facts as argument, it prints the same.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from torchrelay.compiler import decoding
from torchrelay.compiler.request import schema

TOOLCHAIN = schema.Toolchain(python="cp311", torch="0.0.0", triton="", cuda="", platform="linux-x86_64")
TARGET = schema.Target(kind="cpu", name="", capability="", units=0, cpu=["avx2"])
_PTRACE_ATTACH, _PTRACE_DETACH = 16, 17
_CLONE_NEWUSER = 0x10000000
_SHM_RDONLY = 0o10000
_ADDR_NO_RANDOMIZE = 0x40000


def preload():
    pass


def warm_up(folder):
    pass


def describe(kind):
    return TOOLCHAIN, TARGET


def others(kind):
    return []


def missing(kind):
    return ""


def preparation(target):
    return ""


def compile_graph(
    request, *, key, worker, workdir, limits, progress, kernels, shared, ask, equal_layers, memory
):
    order = decoding.from_json(request)
    return globals()[order.pop("do")](workdir, kernels, **order)


def try_everything(workdir, kernels, facts):
    """Both sets of outcomes."""
    program = [sys.executable, __file__, json.dumps(facts)]
    below = subprocess.run(program, capture_output=True, text=True, check=True)
    return msgspec.json.encode({"job": _outcomes(facts), "program": json.loads(below.stdout)})


def leave_traces(workdir, kernels, name):
    """A daemon, files wherever they can be made, shared memory, and a folder that nobody may enter."""
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    for folder in ("/tmp", "/var/tmp", "/dev/shm", os.environ["TMPDIR"], os.environ["HOME"]):
        try:
            Path(folder, name).write_text("a trace")
        except OSError:
            continue
    libc().shmget(int(name, 16), 4096, 0o1666)
    closed = workdir / "closed"
    closed.mkdir()
    (closed / name).write_text("a trace")
    closed.chmod(0)
    time.sleep(0.6)
    return b"artifact"


def find_traces(workdir, kernels, name):
    """What of an earlier job this one finds."""
    folders = ("/tmp", "/var/tmp", "/dev/shm", os.environ["TMPDIR"], os.environ["HOME"])
    found = [folder for folder in folders if Path(folder, name).exists()]
    if libc().shmget(int(name, 16), 0, 0) != -1:
        found.append("System V shared memory")
    return msgspec.json.encode(found)


def mislead(workdir, kernels, victim):
    """Put a link, a pipe and a folder where the server looks for libraries and for what was printed."""
    offers = kernels.offers
    os.mkfifo(offers / f"c{'p' * 51}.so")
    (offers / f"c{'d' * 51}.so").mkdir()
    (offers / f"c{'l' * 51}.so").symlink_to(victim)
    time.sleep(0.6)
    offers.rename(workdir / "moved")
    offers.symlink_to(Path(victim).parent)
    log = workdir.parent / "log"
    log.unlink()
    os.mkfifo(log)
    time.sleep(0.6)
    raise ZeroDivisionError("so that the log is read")


def use_up_files(workdir, kernels):
    """How many files this process may have open."""
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return str(len(held)).encode()
    finally:
        for descriptor in held:
            os.close(descriptor)


# --- attempts: facts in; raises OSError, or returns what was reached --------------------------------------


def connect_to_a_port(facts):
    with socket.create_connection(("127.0.0.1", facts["port"]), timeout=5):
        return "a connection"


def connect_to_redis(facts):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(facts["redis"])
        return "a connection"


def connect_to_an_abstract_socket(facts):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + facts["abstract"])
        return "a connection"


def send_a_datagram(facts):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        return sender.sendto(b"x", ("127.0.0.1", facts["port"]))


def send_a_datagram_from_a_pair(facts):
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other:
        return one.sendto(b"x", facts["datagrams"])


def read_another_jobs_folder(facts):
    return Path(facts["other_job"], "secret").read_text()


def list_other_jobs(facts):
    return [str(path) for path in Path(facts["other_job"]).iterdir()]


def read_the_signing_key(facts):
    return Path(facts["signing_key"]).read_text()


def read_the_home(facts):
    return Path(facts["home"], "secret").read_text()


def read_the_shadow_file(facts):
    with Path("/etc/shadow").open("rb") as stream:
        return len(stream.read(1))


def read_other_processes_environment(facts):
    refusal: OSError = FileNotFoundError("no such text")
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if facts["secret"].encode() in path.read_bytes():
                return str(path)
        except OSError as error:
            refusal = error
    raise refusal


def read_another_namespaces_kernels(facts):
    return Path(facts["other_kernels"], "secret").read_text()


def write_into_another_namespaces_kernels(facts):
    return _write(facts["other_kernels"], facts)


def write_into_its_own_namespaces_kernels(facts):
    return _write(facts["kernels"], facts)


def write_what_all_jobs_share(facts):
    return _write(facts["shared"], facts)


def write_into_another_job(facts):
    return _write(facts["other_job"], facts)


def write_into_python(facts):
    return _write(facts["python"], facts)


def _write(folder, facts):
    path = Path(folder, facts["secret"])
    path.write_text("x")
    path.unlink()
    return path


def open_a_setting_of_the_kernel(facts):
    with Path("/proc/sys/kernel/core_pattern").open("r+") as stream:
        return stream.name


def limit_the_server(facts):
    limits = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in facts["pids"]]
    return [
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
        for pid, limit in zip(facts["pids"], limits, strict=True)
    ]


def signal_the_server(facts):
    """SIGCONT does nothing to it, but is allowed to whoever may kill."""
    refusal = None
    for pid in facts["pids"]:
        try:
            os.kill(pid, signal.SIGCONT)
        except OSError as error:
            refusal = error
        else:
            return pid
    raise refusal


def trace_the_server(facts):
    (server, *_) = facts["pids"]
    _called("ptrace", _PTRACE_ATTACH, server, 0, 0)
    os.waitpid(server, 0)
    return _called("ptrace", _PTRACE_DETACH, server, 0, 0)


def make_a_user_namespace(facts):
    return _called("unshare", _CLONE_NEWUSER)


def mount_a_file_system(facts):
    place = os.fsencode(facts["home"])
    _called("mount", b"tmpfs", place, b"tmpfs", 0, b"")
    return _called("umount2", place, 0)


def make_a_ring(facts):
    return _called("syscall", 425, 8, ctypes.create_string_buffer(120))


def open_the_server(facts):
    os.close(os.pidfd_open(facts["pids"][0]))
    return "a process"


def attach_shared_memory_of_others(facts):
    shmat = libc().shmat
    shmat.restype = ctypes.c_void_p
    if shmat(facts["segment"], None, _SHM_RDONLY) == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return "a segment"


def change_how_programs_start(facts):
    return _called("personality", _ADDR_NO_RANDOMIZE)


def list_mounts(facts):
    """Linux 6.8."""
    request = ctypes.create_string_buffer(struct.pack("=IIQQ", 24, 0, (1 << 64) - 1, 0), 24)
    return _called("syscall", 458, request, ctypes.create_string_buffer(8 * 64), 64, 0)


ATTEMPTS = (
    *(connect_to_a_port, connect_to_redis, connect_to_an_abstract_socket, send_a_datagram),
    *(send_a_datagram_from_a_pair, open_the_server, attach_shared_memory_of_others),
    *(change_how_programs_start, list_mounts),
    *(read_another_jobs_folder, list_other_jobs, read_the_signing_key, read_the_home, read_the_shadow_file),
    *(read_other_processes_environment, read_another_namespaces_kernels),
    *(
        write_into_another_namespaces_kernels,
        write_into_its_own_namespaces_kernels,
        write_what_all_jobs_share,
    ),
    *(write_into_another_job, write_into_python),
    *(open_a_setting_of_the_kernel, limit_the_server),
    *(signal_the_server, trace_the_server, make_a_user_namespace, mount_a_file_system, make_a_ring),
)


def _outcomes(facts):
    outcomes = {}
    for attempt in ATTEMPTS:
        try:
            outcomes[attempt.__name__] = f"reached {attempt(facts)}"
        except OSError as error:
            outcomes[attempt.__name__] = f"refused: {error}"
    return outcomes


def _called(name, *arguments):
    result = getattr(libc(), name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def libc():
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    print(json.dumps(_outcomes(json.loads(sys.argv[1]))))
