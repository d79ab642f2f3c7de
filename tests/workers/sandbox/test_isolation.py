"""A compile is shut in: what an intruder in a job tries is refused, in each form that this machine offers.

Tests of a form that the machine does not offer are skipped, or fail with RELAY_TEST_FORMS=all (parts/forms.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import re
import socket
import subprocess
import sys
import sysconfig
import threading
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import intruder
import msgspec
import psutil
import pytest
import witness
from forms import CONFINING, require, settings, warm_slot
from torchrelay.compiler import decoding
from torchrelay.compiler.errors import CompileFailed, IsolationUnavailable
from torchrelay.workers.messages import JobDone, JobFailed, WorkerJob, decode_answer
from torchrelay.workers.process import private_folders
from torchrelay.workers.sandbox import isolation, landlock, visible_paths
from torchrelay.workers.settings import JobLimits, SlotSettings
from waiting import wait_until

NO_SOCKETS = {
    "connect_to_a_port",
    "connect_to_redis",
    "connect_to_an_abstract_socket",
    "send_a_datagram",
    "send_a_datagram_from_a_pair",
    "open_the_server",
    "attach_shared_memory_of_others",
    "change_how_programs_start",
    "list_mounts",
    "trace_the_server",
    "make_a_user_namespace",
    "mount_a_file_system",
    "make_a_ring",
    "limit_the_server",
}
"""What the filter on system calls refuses by itself."""


async def run(slot, do, namespace="default", seconds=60.0, **order):
    request = msgspec.json.encode({"do": do, **order})
    job = WorkerJob("key", request, seconds, intruder.TARGET, namespace, holds_source=False)
    async for body in slot.compile("j", job):
        message = decode_answer(body)
        if isinstance(message, JobFailed):
            raise message.error()
        if isinstance(message, JobDone):
            return message.artifact
    raise AssertionError("no answer")


class World:
    """What lies around a worker: secrets, sockets that listen, another job, another team's kernels."""

    def __init__(self, folder, stack):
        self.folder = folder
        self.secret = f"secret-{uuid.uuid4().hex}"
        for name in ("state", "home", "kernels/other", "kernels/default", "shared", "jobs"):
            (folder / name).mkdir(parents=True)
        for path in ("state/signing.pem", "home/secret", "kernels/other/secret"):
            (folder / path).write_text(self.secret)
        self.other_job, lock = private_folders.make(str(folder / "jobs"))
        stack.callback(os.close, lock)
        (self.other_job / "secret").write_text(self.secret)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("HOME", str(folder / "home"))
        patch.setenv("TORCHRELAY_SERVICE_TOKEN", self.secret)
        self.port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        for family_address in (str(folder / "redis.sock"), "\0" + self.secret):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(family_address)
            listener.listen()
        stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(str(folder / "datagrams"))
        self.segment = intruder.libc().shmget(0, 4096, 0o1600)
        stack.callback(intruder.libc().shmctl, self.segment, 0, None)

    def facts(self, ready):
        return {
            "port": self.port,
            "redis": str(self.folder / "redis.sock"),
            "abstract": self.secret,
            "datagrams": str(self.folder / "datagrams"),
            "segment": self.segment,
            "secret": self.secret,
            "other_job": str(self.other_job),
            "signing_key": str(self.folder / "state" / "signing.pem"),
            "home": str(self.folder / "home"),
            "kernels": str(self.folder / "kernels" / "default"),
            "other_kernels": str(self.folder / "kernels" / "other"),
            "shared": str(self.folder / "shared"),
            "python": sysconfig.get_path("purelib"),
            "pids": [ready.pid, os.getpid()],
        }


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        made = World(tmp_path_factory.mktemp("w"), stack)
        yield made


@pytest.fixture(scope="module")
def outcomes(world):
    """Each form's: what came of every attempt, in the job and in a program below it."""

    @functools.cache
    def of(form):
        async def ask():
            async with warm_slot(settings(world.folder, (form, "none"))) as (slot, ready):
                answer = await run(slot, "try_everything", facts=world.facts(ready))
                assert psutil.pid_exists(ready.pid)
                assert form in ready.isolation
                return decoding.from_json(answer)

        return asyncio.run(ask())

    return of


@pytest.mark.parametrize("form", CONFINING)
@pytest.mark.parametrize("who", ["job", "program"])
@pytest.mark.parametrize("attempt", [attempt.__name__ for attempt in intruder.ATTEMPTS])
def test_an_attempt_is_refused(outcomes, form, who, attempt):
    require(form)
    found = outcomes(form)
    if attempt == "signal_the_server" and form == "landlock" and landlock.version() < 6:
        pytest.skip(f"Landlock {landlock.version()} does not hide processes (docs/isolation.md)")
    assert found[who][attempt].startswith("refused: "), found[who][attempt]


@pytest.mark.parametrize("attempt", [attempt.__name__ for attempt in intruder.ATTEMPTS])
def test_without_isolation_the_same_attempts_reach_something_or_nothing_is_shown(outcomes, attempt):
    """The attempts are real: what they reach where nothing is in the way."""
    found = outcomes("none")
    may_be_refused_anyway = {
        "trace_the_server",
        "make_a_user_namespace",
        "mount_a_file_system",
        "make_a_ring",
        "list_mounts",
    }
    may_be_refused_anyway |= {
        "open_a_setting_of_the_kernel",
        "read_the_shadow_file",
        "write_into_python",
        "read_other_processes_environment",
    }
    if attempt not in may_be_refused_anyway:
        assert found["job"][attempt].startswith("reached "), found["job"][attempt]


def test_the_filter_alone_refuses_sockets_and_tracing(outcomes):
    require("seccomp")
    found = outcomes("seccomp")
    for who in ("job", "program"):
        assert [a for a in NO_SOCKETS if not found[who][a].startswith("refused: ")] == []


@pytest.mark.parametrize("form", CONFINING)
def test_a_job_leaves_no_trace_for_the_next_nor_on_the_machine(world, form):
    require(form)
    name = f"{uuid.uuid4().int % (1 << 30):x}"

    async def scenario():
        async with warm_slot(settings(world.folder, (form, "none"))) as (slot, ready):
            await run(slot, "leave_traces", name=name)
            assert list(Path(ready.jobs_dir).iterdir()) == []
            assert "sleep" not in [p.name() for p in psutil.Process(ready.pid).children(recursive=True)]
            return decoding.from_json(await run(slot, "find_traces", name=name))

    found = asyncio.run(scenario())
    left = [folder for folder in ("/tmp", "/var/tmp", "/dev/shm") if (Path(folder) / name).exists()]
    for folder in left:
        (Path(folder) / name).unlink()
    segments = Path("/proc/sysvipc/shm").read_text().split("\n")[1:]
    ours = [line.split()[1] for line in segments if line and int(line.split()[0]) == int(name, 16)]
    for segment in ours:
        intruder.libc().shmctl(int(segment), 0, None)
    assert (found, left, ours) == ([], [], [])


def test_a_job_cannot_mislead_the_server_that_takes_in_its_kernels_and_reads_its_log(world, tmp_path):
    victim = tmp_path / "kernels" / "other" / f"c{'v' * 51}.so"
    victim.parent.mkdir(parents=True)
    victim.write_text("binary")

    async def scenario():
        async with warm_slot(settings(tmp_path, ("none",))) as (slot, _):
            with pytest.raises(CompileFailed, match="so that the log is read"):
                await run(slot, "mislead", victim=str(victim))
            assert victim.read_text() == "binary"
            assert list((tmp_path / "kernels" / "default").iterdir()) == []

    asyncio.run(scenario())


def test_the_number_of_open_files_is_limited(tmp_path):
    async def scenario():
        async with warm_slot(settings(tmp_path, limits=JobLimits(open_files=100))) as (slot, _):
            return int(await run(slot, "use_up_files"))

    assert 50 < asyncio.run(scenario()) < 100


def test_a_worker_that_must_isolate_and_cannot_does_not_start(tmp_path):
    async def scenario():
        async with warm_slot(settings(tmp_path, ("seccomp", "none"), isolation="required")):
            raise AssertionError("it started")

    with pytest.raises(IsolationUnavailable, match="cannot be isolated"):
        asyncio.run(scenario())
    assert list((tmp_path / "jobs").iterdir()) == []


def test_a_form_that_hides_what_compiles_need_is_passed_over_for_a_weaker_one_and_that_is_said(
    tmp_path, capfd
):
    require("namespaces")

    async def scenario():
        async with warm_slot(settings(tmp_path, engine="needy")) as (slot, ready):
            assert set(ready.isolation) <= {"seccomp", "none"}
            assert ready.missing == ""
            assert await run(slot, "anything") == Path("/etc/hosts").read_bytes()

    asyncio.run(scenario())
    said = capfd.readouterr().err
    assert "under isolation by 'namespaces': [Errno 2] No such file" in said
    assert re.search(r"isolates its jobs by: (seccomp|none) \(they reach the files", said)


def test_a_form_that_does_not_exist_is_refused(tmp_path):
    known = msgspec.json.encode(settings(tmp_path, ("none",))).replace(b'"none"', b'"bubblewrap"')
    with pytest.raises(msgspec.ValidationError):
        decoding.from_json(known, type=SlotSettings)


def test_isolation_can_be_turned_off_and_that_is_said(tmp_path):
    async def scenario():
        async with warm_slot(settings(tmp_path, isolation="off")) as (_, ready):
            return ready.isolation

    assert asyncio.run(scenario()) == ["off"]


def test_what_a_crash_left_is_removed_by_the_next_slot_and_what_is_in_use_stays(tmp_path):
    abandoned, lock = private_folders.make(str(tmp_path))
    (abandoned / "job-x").mkdir()
    os.close(lock)
    used, lock = private_folders.make(str(tmp_path))
    assert not abandoned.exists()
    other, other_lock = private_folders.make(str(tmp_path))
    assert used.exists()
    assert other.exists()
    os.close(lock)
    os.close(other_lock)


# --- what CUDA needs, and no more --------------------------------------------------------------------------


def _in_a_gpu_sandbox(form: Any, folder: Path, attempts: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What came of each attempt in a job of a slot with a GPU ('' if nothing was refused)."""
    view = msgspec.structs.replace(visible_paths.visible_paths_of("cpu", os.environ), gpu=True)
    (folder / "tmp").mkdir()
    sandbox = isolation.Sandbox(form, view, folder, [])
    reading, writing = os.pipe()

    def job() -> None:
        found = {}
        for name, attempt in attempts.items():
            try:
                attempt()
                found[name] = ""
            except OSError as error:
                found[name] = os.strerror(error.errno or 0)
        os.write(writing, msgspec.json.encode(found))

    child = os.fork()
    if child == 0:
        try:
            # an exporter of spans, of another test, starts a thread at each fork; namespaces need a process without
            wait_until(lambda: len([*Path("/proc/self/task").iterdir()]) == 1, 10)
            sandbox.run(job, inherited=[writing], pid_pipe=os.open(os.devnull, os.O_WRONLY))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
        assert data, f"the job told nothing; the wait status of its process is {status}"
        return decoding.from_json(data, type=dict[str, str])


def _in_a_thread_of_a_fork() -> None:
    """As CUDA names the threads of a process that was forked in the job."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("cuda")
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        raise PermissionError(errno.EACCES, "the fork may not name its threads")


def _stream() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as made:
        made.bind("\0" + uuid.uuid4().hex)
        made.listen()


def _connected(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.connect(address)


def _written(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY))


@pytest.mark.parametrize("form", ["namespaces", "seccomp"])
def test_a_gpus_job_may_do_what_cuda_does_as_it_starts_and_no_more(form: str, tmp_path: Path) -> None:
    require(form)
    with socket.socket(socket.AF_UNIX) as listener:
        name = "\0" + uuid.uuid4().hex
        listener.bind(name)
        listener.listen()
        found = _in_a_gpu_sandbox(
            form,
            tmp_path,
            {
                "names a thread": _in_a_thread_of_a_fork,
                "makes a Unix socket": _stream,
                "connects to an abstract socket": lambda: _connected(name),
                "makes a TCP socket": lambda: socket.socket().close(),
                "makes a Unix datagram socket": lambda: socket.socket(
                    socket.AF_UNIX, socket.SOCK_DGRAM
                ).close(),
                "opens the kernel's settings": lambda: _written("/proc/sys/kernel/core_pattern"),
                "opens the kernel's trigger": lambda: _written("/proc/sysrq-trigger"),
                "opens a setting of all processors": lambda: _written("/proc/irq/default_smp_affinity"),
            },
        )
    allowed = {name for name, why in found.items() if not why}
    wanted = {"names a thread", "makes a Unix socket"}
    if form == "namespaces":  # a datagram reaches no process outside
        wanted.add("makes a Unix datagram socket")
    else:  # the filter alone: files are not its business
        allowed = {name for name in allowed if not name.startswith("opens")}
    assert allowed == wanted, found


_IMPORTS_IN_A_JOB = """
import os, pathlib, sys
from torchrelay.workers.sandbox import isolation, visible_paths
folder = pathlib.Path(sys.argv[1])
(folder / "tmp").mkdir()
sandbox = isolation.Sandbox("namespaces", visible_paths.visible_paths_of("cpu", os.environ), folder, [])
def job():
    from torchrelay.compiler.request import size_expr
    os.write(1, size_expr.__file__.encode())
sandbox.run(job, inherited=[], pid_pipe=os.open(os.devnull, os.O_WRONLY))
"""


def test_a_job_imports_from_a_package_that_is_reached_by_a_link(tmp_path: Path) -> None:
    require("namespaces")
    (tmp_path / "torchrelay").symlink_to(Path(visible_paths.__file__).resolve().parents[2])
    (tmp_path / "own").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS_IN_A_JOB, str(tmp_path / "own")],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)},  # a home is not shown
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == str(tmp_path / "torchrelay/compiler/request/size_expr.py"), done.stderr


def test_no_byte_of_a_request_is_decoded_outside_the_sandbox(tmp_path):
    """What is shared by jobs is prepared outside, from the target alone."""
    require("landlock")
    text = witness.MARK.decode()

    async def scenario():
        told = settings(tmp_path, ("landlock", "none"), engine="witness")
        async with warm_slot(told) as (slot, _):
            assert await run(slot, "answer", text=text) == witness.MARK

    asyncio.run(scenario())
    assert (tmp_path / "shared" / "prepared").read_text() == "avx2"
    assert not (tmp_path / "decoded").exists()
