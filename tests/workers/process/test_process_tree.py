"""What is killed is gone when kill_below returns. Real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torchrelay.workers.process.process_tree import descendants, kill_below

HOLDS = "import signal, sys; held = bytearray(b'x') * (1 << 30); print('on', flush=True); signal.pause()"
"""The kernel takes some tenths of a second to end a process of 1 GiB."""


@pytest.fixture
def large() -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "HOLDER": "this"}
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        yield process
        process.kill()


def test_what_is_marked_is_killed_and_nothing_else(large: subprocess.Popen[bytes]) -> None:
    kill_below(os.getpid(), mark="HOLDER=other")
    assert large.pid in descendants(os.getpid())
    kill_below(os.getpid(), mark="HOLDER=this")
    assert large.pid not in descendants(os.getpid())


def test_what_is_below_a_marked_process_is_killed_whatever_its_own_environment_says() -> None:
    """A program that sets its title writes over what its environment was."""
    inner = [sys.executable, "-c", "import signal; print('on', flush=True); signal.pause()"]
    outer = f"import subprocess; subprocess.run({inner}, env={{}})"
    environment = {**os.environ, "HOLDER": "this"}
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        (below,) = psutil.Process(process.pid).children()
        kill_below(os.getpid(), mark="HOLDER=this")
        below.wait(10)


def test_what_has_been_killed_and_has_no_environment_any_more_is_waited_for(
    large: subprocess.Popen[bytes],
) -> None:
    large.send_signal(signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # as some kernels say it
        while Path(f"/proc/{large.pid}/environ").read_bytes():
            pass
    kill_below(os.getpid(), mark="HOLDER=this")
    assert large.pid not in descendants(os.getpid())
