"""Tests that two processes share (`pytest -n 2`): what crashes or hangs is named, and nothing else is lost."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")

CRASHES = """
import os
def test_before(): pass
def test_crash(): os._exit(3)
def test_wrong(): assert 0
def test_after(): pass
"""
HANGS = """
import signal
def test_hang(): signal.pause()
def test_after_it(): pass
"""


def run(folder: Path, files: dict[str, str], *options: str) -> tuple[int, str]:
    """pytest's exit status and output, with these files and our conftest.py."""
    for name, text in files.items():
        path = folder / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    shutil.copy(Path(__file__).parents[2] / "conftest.py", folder / "tests" / "conftest.py")
    command = [sys.executable, "-m", "pytest", "tests", "-n", "2", "-p", "no:cacheprovider", *options]
    whole = {
        **os.environ,
        "CI": "true",
        "COLUMNS": "200",
    }  # else pytest shortens lines to the terminal's width
    done = subprocess.run(
        command, cwd=folder, env=whole, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_test_that_ends_its_process_fails_by_name_once_and_the_others_run(tmp_path: Path) -> None:
    quiet = "def test_quiet(): pass\n"
    status, told = run(
        tmp_path, {"unit/test_a.py": CRASHES, "unit/test_b.py": quiet, "unit/test_c.py": quiet}
    )
    assert status == 1, told
    assert "crashed while running 'tests/unit/test_a.py::test_crash'" in told, told
    failed = re.findall(r"^FAILED tests/unit/test_a.py::(\w+)", told, re.MULTILINE)
    assert sorted(failed) == ["test_crash", "test_wrong"], told
    assert re.fullmatch(r"=+ 2 failed, 4 passed in [0-9.]+s( \([0-9:]+\))? =+", told.splitlines()[-1]), told


def test_a_test_that_hangs_is_ended_and_named(tmp_path: Path) -> None:
    status, told = run(tmp_path, {"unit/test_a.py": HANGS}, "--timeout=2")
    assert status == 1, told
    assert "FAILED tests/unit/test_a.py::test_hang - Failed: Timeout" in told, told
    assert re.fullmatch(r"=+ 1 failed, 1 passed in [0-9.]+s( \([0-9:]+\))? =+", told.splitlines()[-1]), told
