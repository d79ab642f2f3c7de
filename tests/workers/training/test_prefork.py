"""Ranks forked from a warm process: everything that a script can see of its start is as if Python had started it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torchrelay.compiler.api.training.events import LogLines, TrainEvent
from torchrelay.compiler.api.training.jobs import TrainSpec
from torchrelay.compiler.api.training.node_messages import TrainOrder
from torchrelay.compiler.api.training.rank_environment import ANSWER_ENVIRONMENT
from torchrelay.workers.training.prefork import server
from torchrelay.workers.training.ranks import process as processes
from torchrelay.workers.training.ranks.environment import (
    RankAssignment,
    job_environment,
    rank_command,
    rank_environment,
)
from torchrelay.workers.training.ranks.process import RankProcess
from torchrelay.workers.training.ranks.reaper import RankLaunch

WAIT = 120.0

FACTS = """
import atexit, json, multiprocessing, os, random, resource, signal, subprocess, sys, threading
import numpy, torch

def square(x):
    return x * x

if __name__ == "__main__":
    atexit.register(lambda: print("left", flush=True))
    handlers = {n: repr(signal.getsignal(n)) for n in 
        (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP, signal.SIGQUIT)}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, [2, 3])
    facts = {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(), "flags": list(sys.flags),
        "name": __name__, "file": __file__, "main": sys.modules["__main__"].__dict__ is globals(),
        "environment": dict(os.environ), "handlers": {str(n): h for n, h in handlers.items()},
        "masked": [str(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "stdin": os.read(0, 1).decode(),
        "streams": [sys.stdout.write_through, sys.stdout.encoding, sys.stdout.isatty()],
        "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)],
        "group": os.getpgid(0) == os.getpid(), "threads": threading.current_thread() is threading.main_thread(),
        "torch_threads": torch.get_num_threads(), "torch_drawn": torch.rand(1).item(),
        "squares": squares, "gc": __import__("gc").isenabled(), "method": multiprocessing.get_start_method(),
        "python_drawn": random.random(), "numpy_drawn": numpy.random.rand(),
        "of_children": subprocess.check_output("echo $RANK $MASTER_PORT", shell=True, text=True),
        "title": open("/proc/self/cmdline").read().replace(chr(0), " ").strip(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    open(sys.argv[1], "w").write(json.dumps(facts))
    print("said", flush=True)
    print("complained", file=sys.stderr)
    sys.exit(int(sys.argv[2]))
"""
"""RESULT CODE"""


def order(**spec: Any) -> TrainOrder:
    fields: dict[str, Any] = {"name": "job", "script": "script.py", "compile": "off", "cpus": 2.0, **spec}
    return TrainOrder(
        job="0123456789abcdef",
        namespace="default",
        spec=TrainSpec(**fields),
        package=b"",
        environment={},
        folder="/j",
    )


def launch(folder: Path, script: str, *arguments: str, rank: int = 0, **spec: Any) -> RankLaunch:
    (folder / "script.py").write_text(script)
    given = order(arguments=list(arguments), **spec)
    place = RankAssignment(
        rank=rank, world_size=2, local_rank=rank, local_world_size=2, node_rank=0, address="127.0.0.1", port=1
    )
    environment = rank_environment(given, place, Path("/j"), NODE)
    return RankLaunch(rank_command(given.spec), str(folder), environment, channel=ANSWER_ENVIRONMENT)


NODE = {**os.environ, "LC_ALL": "C.UTF-8"}


@pytest.fixture(scope="module", autouse=True)
def as_ray_starts_programs() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def owned(as_ray_starts_programs: None) -> Iterator[server.PreforkProcess]:
    started = server.start(job_environment(order(), Path("/j"), NODE))
    yield started
    started.alive.close()
    assert started.process.wait(WAIT) == 0
    assert not Path(started.path).parent.exists()


def run(
    process: RankProcess, until: Callable[[list[TrainEvent]], bool] = lambda events: False
) -> list[TrainEvent]:
    """What it told, to its end or until that holds."""
    events: list[TrainEvent] = []
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        more = process.poll(0.2)
        events += process.taken()
        if until(events) or not more:
            return events
    raise AssertionError(f"it goes on: {events}")


def lines(events: list[TrainEvent], stream: str = "stdout") -> list[str]:
    return [
        line for each in events if isinstance(each, LogLines) and each.stream == stream for line in each.lines
    ]


def says(text: str) -> Callable[[list[TrainEvent]], bool]:
    return lambda events: text in lines(events)


def test_a_script_sees_what_it_would_see_of_a_start_of_its_own(
    owned: server.PreforkProcess, tmp_path: Path
) -> None:
    seen: list[dict[str, Any]] = []
    for path in ("", owned.path, owned.path):
        result = tmp_path / "result"
        process = RankProcess(launch(tmp_path, FACTS, str(result), "7", rank=1), 1, 0, warm=path)
        events = run(process)
        assert process.wait() == 7, events
        assert process.warm == bool(path)
        assert lines(events) == ["said", "left"]
        assert lines(events, "stderr") == ["complained"]
        seen.append(json.loads(result.read_text()))
    for drawn in ("python_drawn", "numpy_drawn", "torch_drawn"):
        assert len({facts.pop(drawn) for facts in seen}) == 3, drawn
    assert seen[1] == seen[2] == seen[0]
    assert seen[1]["environment"]["RANK"] == "1"
    assert seen[1]["masked"] == []
    default = repr(signal.Handlers.SIG_DFL)
    assert [seen[1]["handlers"][str(number)] for number in (signal.SIGHUP, signal.SIGQUIT)] == [default] * 2


def test_what_it_starts_ends_with_it_and_its_signal_is_told(
    owned: server.PreforkProcess, tmp_path: Path
) -> None:
    script = """
import os, signal, subprocess, sys
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(child.pid, flush=True)
os.kill(os.getpid(), 9) if sys.argv[1] == "die" else signal.pause()
"""
    for what, stop in (("die", None), ("stay", "stop"), ("stay", "kill"), ("stay", "leave")):
        process = RankProcess(launch(tmp_path, script, what), 0, 0, warm=owned.path)
        events = run(process, lambda events: bool(lines(events)))
        child = psutil.Process(int(lines(events)[0]))
        if stop == "stop":
            process.stop(60)
        elif stop == "kill":
            process.kill()
        elif stop == "leave":
            rank = psutil.Process(process.pid)
            process._connection.close()  # as the kernel does when its worker is killed
            psutil.wait_procs([rank, child], timeout=WAIT)
            assert not gone(rank)
        if stop != "leave":
            run(process)
            assert process.wait() == (-signal.SIGTERM if stop == "stop" else -signal.SIGKILL)
        assert process.warm
        assert not gone(child)


def test_an_interrupted_script_ends_as_python_ends_it(owned: server.PreforkProcess, tmp_path: Path) -> None:
    script = "import atexit\natexit.register(lambda: print('at exit', flush=True))\nraise KeyboardInterrupt('as asked')"
    for path in (owned.path, ""):
        process = RankProcess(launch(tmp_path, script), 0, 0, warm=path)
        events = run(process)
        assert process.wait() == -signal.SIGINT
        assert lines(events) == ["at exit"]
        said = lines(events, "stderr")
        assert said[-1] == "KeyboardInterrupt: as asked"
        assert said.count("Traceback (most recent call last):") == 1
        assert process.warm == bool(path)


def gone(process: psutil.Process) -> bool:
    """Whether it still runs."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_rank_goes_on_when_its_warm_process_and_that_ones_owner_have_ended(tmp_path: Path) -> None:
    started = server.start(job_environment(order(), Path("/j"), NODE))
    go = tmp_path / "go"
    script = "import os, sys, time\nprint('on', flush=True)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)"
    process = RankProcess(launch(tmp_path, script, str(go)), 0, 0, warm=started.path)
    run(process, says("on"))
    started.process.kill()
    started.process.wait()
    started.alive.close()
    go.touch()
    run(process)
    assert (process.wait(), process.warm) == (0, True)


@pytest.mark.parametrize(
    "change", [{"environment": {"TORCH_LOGS": "+dynamo"}}, {"cpus": 1.0}, {"function": "script:run"}]
)
def test_another_environment_or_program_starts_cold(
    owned: server.PreforkProcess, tmp_path: Path, change: dict[str, Any]
) -> None:
    script = "def run(): pass\nprint('ran')\n"
    process = RankProcess(launch(tmp_path, script, **change), 0, 0, warm=owned.path)
    events = run(process)
    assert (process.wait(), process.warm, lines(events)) == (0, False, ["ran"])


def test_where_no_warm_process_is_or_it_ends_or_hangs_ranks_start_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "WARM_SECONDS", 0.5)
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        hung = RankProcess(launch(tmp_path, "print('ran')"), 0, 0, warm=str(path))
        ends = RankProcess(launch(tmp_path, "print('ran')"), 0, 0, warm=str(path))
        assert lines(run(hung)) == ["ran"]
    assert lines(run(ends)) == ["ran"]
    none = RankProcess(launch(tmp_path, "print('ran')"), 0, 0, warm=str(path))
    assert lines(run(none)) == ["ran"]
    assert [(each.wait(), each.warm) for each in (hung, ends, none)] == [(0, False)] * 3


@pytest.mark.parametrize("warm_too", [False, True])
def test_one_that_is_stopped_before_it_runs_ends(tmp_path: Path, warm_too: bool) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        path = str(tmp_path / "socket") if warm_too else ""
        stopped = RankProcess(launch(tmp_path, "print('ran')"), 0, 0, warm=path)
        stopped.stop(1)
        killed = RankProcess(launch(tmp_path, "print('ran')"), 0, 0, warm=path)
        killed.kill()
        killed.kill()
        assert lines(run(stopped)) == lines(run(killed)) == []
        assert (stopped.wait(), killed.wait()) == (-signal.SIGTERM, -signal.SIGKILL)


def test_a_large_launch_arrives_whole(owned: server.PreforkProcess, tmp_path: Path) -> None:
    for path in ("", owned.path):
        asked = launch(tmp_path, "import sys; print(sum(map(len, sys.argv[1:])))", *["x" * 60_000] * 20)
        process = RankProcess(asked, 0, 0, warm=path)
        assert lines(run(process)) == ["1200000"]
        assert (process.wait(), process.warm) == (0, bool(path))


def test_what_does_not_outlive_a_fork_is_not_forked() -> None:
    code = """
import os, sys, threading
from torchrelay.workers.training.prefork import server as warm
asked = []
assert warm._unfit(lambda: asked.append(1) or True) == "" and not asked
assert "CUDA" in warm._unfit(lambda: False)
assert "CUDA" in warm._unfit(lambda: os.abort())
assert "CUDA" in warm._unfit(lambda: 1 / 0)
threading.Thread(target=threading.Event().wait, daemon=True).start()
sys.exit("threads" not in warm._unfit(lambda: True))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
