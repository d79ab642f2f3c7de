"""An engine for the fork server whose requests say how to behave: each test gets the failure it is about."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from torchrelay.compiler import decoding
from torchrelay.compiler.api.tuning.jobs import SearchJobSpec
from torchrelay.compiler.errors import Unavailable, VerifyFailed
from torchrelay.compiler.process.forked_process import ForkedProcess
from torchrelay.compiler.request import cpu_isa, schema
from torchrelay.compiler.tuning import queries as tuning_queries
from torchrelay.compiler.tuning import records
from torchrelay.workers.fork_server import queries as fork_server_queries
from torchrelay.workers.messages import JobQuery

TOOLCHAIN = schema.Toolchain(python="cp311", torch="0.0.0", triton="", cuda="", platform="linux-x86_64")
PLACE = records.DeviceEnvironment("a CPU", "avx2", "", "0.0.0", "", "", threads=1)
TARGET = schema.Target(kind="cpu", name="", capability="", units=0, cpu=["avx2"])


def preload():
    pass


def warm_up(folder):
    pass


def describe(kind):
    assert kind in ("cpu", "cuda")
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
    order = decoding.from_json(request) if request[:1] == b"{" else decoding.from_msgpack(request)
    if order["do"] in ("build", "fetch"):
        order["kernels"] = kernels
    if order["do"] == "inquire":
        order["ask"] = ask
    if order["do"] == "name_shared_folder":
        order["shared"] = shared
    return globals()[order.pop("do")](workdir=workdir, progress=progress, **order)


def search(request, *, worker, workdir, limits, progress, kernels, shared, ask):
    """Search what `ask` hands out. What happens to a task its problem's settings say, by SEARCHES."""
    order = decoding.from_msgpack(request, type=SearchJobSpec)
    place = msgspec.structs.replace(
        PLACE, threads=order.threads or 1, capability=cpu_isa.capability(order.target.cpu)
    )
    held = []
    while True:
        work = ask(tuning_queries.TaskRequest(place, len(held)))
        held += work.tasks
        if work.over and not held:
            return b""
        if held and (not work.tasks or len(held) == 3):
            task = held.pop(0)
            told = dict(task.problem.settings)
            SEARCHES[told.get("do", "find")](ask, place, task, **told)


def _find(ask, place, task, do="", sleep="0", crash="", leave="exit"):
    """Try the candidates a, b and c, but for those to be avoided, unless none is left then, as a searcher does; the
    first wins. `crash`: those that end the process."""
    timings = []
    for name in sorted(set("abc") - set(task.avoid)) or "abc":
        ask(tuning_queries.CandidateAttempt(task.id, name))
        if name in crash:
            if leave == "wait":
                signal.pause()
            os._exit(9)
        timings.append(records.Timing(name, 1.0 + len(timings), 1.0, 4.0, 10))
    time.sleep(float(sleep))
    entry = records.TuningEntry(
        problem=task.problem, place=place, winner=timings[0], candidates=3, seconds=float(sleep)
    )
    failures = [records.CandidateFailure(name, "it ends the process") for name in task.avoid]
    ask(tuning_queries.SearchResult(entry, task.id, timings, failures))


def _unfit(ask, place, task, do):
    ask(tuning_queries.UnsupportedTask(task.id, "this engine does not know it"))


def _raise(ask, place, task, do):
    raise ZeroDivisionError("a searcher's own mistake")


def _die(ask, place, task, do):
    """While it builds: nothing was tried."""
    os._exit(9)


def _hang(ask, place, task, do):
    signal.pause()


SEARCHES = {"find": _find, "unfit": _unfit, "raise": _raise, "die": _die, "hang": _hang}


def answer(workdir, progress, text="artifact", sleep=0.0):
    progress("aot", "first")
    time.sleep(sleep)
    progress("inductor", "second")
    return text.encode()


def surroundings(workdir, progress):
    """What a job can see: environment, directories, limits, pid, Python."""
    return msgspec.json.encode(
        {
            "pid": os.getpid(),
            "session": os.getsid(0),
            "environment": dict(os.environ),
            "cwd": str(Path.cwd()),
            "temporary": tempfile.gettempdir(),
            "workdir": str(workdir),
            "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
            "prefix": sys.prefix,
            "code": str(Path(fork_server_queries.__file__).resolve()),
            "descriptors": [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in _descriptors()],
        }
    )


def name_shared_folder(workdir, progress, shared):
    return str(shared).encode()


def build(workdir, progress, kernels, name, text, sleep):
    """Lay a library out for other jobs, then go on for a while."""
    library = workdir / name
    library.write_text(text)
    kernels.offer(library)
    progress("inductor", "built")
    time.sleep(sleep)
    return b"built"


def fetch(workdir, progress, kernels, name):
    """The library that another job built."""
    found = kernels.copy_to(name, workdir / name)
    return (workdir / name).read_bytes() if found else b""


def inquire(workdir, progress, ask, how, **order):
    """Ask the service, in a way that QUESTIONS names."""
    return msgspec.json.encode(QUESTIONS[how](ask, **order))


def _asked(ask, size):
    """What the service says of a problem of `size`, or that it says nothing."""
    try:
        answer = ask(tuning_queries.EntryLookup(PLACE, [problem(size)]))
        return [entry.winner.candidate for entry in tuning_queries.entries_of(answer)]
    except Unavailable as error:
        return error.message


def _in_turn(ask, sizes, wait=fork_server_queries.WAIT_SECONDS, rest=fork_server_queries.REST_SECONDS):
    fork_server_queries.WAIT_SECONDS, fork_server_queries.REST_SECONDS = wait, rest
    return [_asked(ask, size) for size in sizes]


def _in_threads(ask, sizes):
    with ThreadPoolExecutor(len(sizes)) as threads:
        return list(threads.map(lambda size: _asked(ask, size), sizes))


def _in_a_copy(ask, size):
    copy = ForkedProcess.running(lambda fork: fork.send(_asked(ask, size).encode()))
    return [copy.receive(60).decode(), _asked(ask, size)]


def _raw(ask, queries, then="ignore"):
    """Send `queries` (id, bytes of the question), and do not read what comes of them, or close the pipe."""
    if then == "close":
        os.close(ask._pipe)
    for number, length in queries:
        ask._send(JobQuery(number, bytes(length)))
    time.sleep(1)
    return "done"


QUESTIONS: dict[str, Callable[..., Any]] = {
    "in turn": _in_turn,
    "in threads": _in_threads,
    "in a copy": _in_a_copy,
    "raw": _raw,
}


def problem(size, **settings):
    side = records.Operand("float32", (size, size), (size, 1))
    return records.Problem("mm", (side, side), side, tuple(sorted(settings.items())))


def _descriptors():
    return [int(p.name) for p in Path("/proc/self/fd").iterdir() if p.is_symlink()]


def hang(workdir, progress):
    """Sleep for ever beside a grandchild in a session of its own and one that was orphaned: both `sleep 1000`."""
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    subprocess.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &"], check=True)
    progress("inductor", "hanging")
    signal.pause()


def leave_behind(workdir, progress):
    """Answer a second later, and leave a `sleep 1000` running."""
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(1)
    return b"artifact"


def crash(workdir, progress, signal):
    os.kill(os.getpid(), signal)
    time.sleep(10)


def leave(workdir, progress, status):
    os._exit(status)


def hog(workdir, progress):
    """Take memory in a grandchild, 16 MiB at a time, and hold it."""
    code = "import time; held = []\nwhile True: held.append(bytearray(b'x' * (16 << 20))); time.sleep(0.01)"
    subprocess.run([sys.executable, "-c", code], check=True)


def fill_disk(workdir, progress):
    """Write files of 1 MiB."""
    for number in itertools.count():
        Path(tempfile.gettempdir(), str(number)).write_bytes(b"x" * (1 << 20))
        time.sleep(0.001)


def swarm(workdir, progress):
    for _ in range(1000):
        subprocess.Popen(["sleep", "1000"])
    signal.pause()


def chatter(workdir, progress, times):
    for each in range(times):
        progress("autotune", f"{each}: " + "x" * 10_000)
    return b"artifact"


def complain(workdir, progress, length):
    raise VerifyFailed("outputs differ " * length, hint="do this " * length)


def garbage(workdir, progress, body="ffffffff", announced=None):
    """Write a frame to every descriptor above standard error: one of them is the pipe to the server. `announced`: the
    length that it says it has."""
    data = bytes.fromhex(body)
    for fd in _descriptors():
        if fd > 2:
            try:
                os.write(fd, (announced or len(data)).to_bytes(4, "little") + data + b"nonsense" * 10)
            except OSError:
                continue
    signal.pause()


def refuse(workdir, progress):
    raise VerifyFailed("outputs differ by 3.0", hint="do this")


def forge(workdir, progress, lines):
    print(lines, flush=True)
    raise VerifyFailed("outputs\nof another job", hint="do this")


def blunder(workdir, progress):
    raise ZeroDivisionError("one line\nand another")


def fill(workdir, progress):
    (Path(tempfile.gettempdir()) / "left").write_text("x")
    (workdir / "left").write_text("x")
    return b"artifact"
