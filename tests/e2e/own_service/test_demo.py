"""`torchrelay demo` from start to end, and cut short."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

COMMAND = [sys.executable, "-u", "-m", "torchrelay.examples.demo", "--only", "digits_cnn"]


def test_the_demo_keeps_its_promises_and_draws_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--out", str(tmp_path)], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything held" in done.stdout
    assert "FAIL" not in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_leaves_no_process_and_no_folder_behind(tmp_path: Path) -> None:
    place = tempfile.mkdtemp(dir=tmp_path)
    with subprocess.Popen(
        [*COMMAND, "--out", str(tmp_path)],
        env={**psutil.Process().environ(), "TMPDIR": place},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        line = demo.stdout.readline()  # the service is starting
        while "worker" not in line and "ready" not in line:
            line = demo.stdout.readline()
            assert line, "the demo ended by itself"
        children = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert list(Path(place).iterdir()) == []
