"""What keeps a worker's node running: its raylet is a program of that name here, and `ray start` a shell."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

RUN = """
import sys
from torchrelay.service.local import supervisor, worker
command = ["sh", "-c", f"{sys.argv[1]} 1000 & wait; sleep 1000"]
sys.exit(supervisor.run_supervised(lambda: worker.run(command), longest_pause=60.0))
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[psutil.Popen]:
    shutil.copy(shutil.which("sleep") or "", tmp_path / "raylet")
    process = psutil.Popen(
        [sys.executable, "-c", RUN, str(tmp_path / "raylet")], stdout=subprocess.PIPE, text=True
    )
    yield process
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
    process.wait()


def raylets(node: psutil.Popen) -> list[psutil.Process]:
    return [each for each in node.children(recursive=True) if each.name() == "raylet"]


def test_a_node_is_started_again_when_its_raylet_has_ended_although_ray_goes_on(node: psutil.Popen) -> None:
    wait_until(lambda: len(raylets(node)) == 1, seconds=60)
    (first,) = raylets(node)
    time.sleep(2)  # it is looked for twice a second
    first.terminate()  # as it ends when its agent was killed
    assert "its raylet has ended" in node.stdout.readline()
    wait_until(lambda: len(raylets(node)) == 1 and raylets(node) != [first], seconds=60)
    below = node.children(recursive=True)
    node.send_signal(signal.SIGTERM)
    assert node.wait(60) == 0
    assert not psutil.wait_procs(below, timeout=20)[1]


def test_a_node_ends_with_the_process_that_keeps_it(node: psutil.Popen) -> None:
    wait_until(lambda: len(raylets(node)) == 1, seconds=60)
    starter = next(each for each in node.children(recursive=True) if each.name() == "sh")
    node.kill()
    node.wait()
    assert starter.wait(20) is None or not starter.is_running()
