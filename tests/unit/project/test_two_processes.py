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
import time
def test_hang(): time.sleep(1000)
def test_after_it(): pass
"""
WHERE = """
import os
from pathlib import Path
def test_where():
    (Path(__file__).parent / f"{os.environ['PYTEST_XDIST_WORKER']}-ran").touch()
def test_where_too(): test_where()
"""
STALLS = """
import asyncio, time
def test_stalls():
    async def turns():
        began = time.monotonic()
        for _ in range(1000):
            await asyncio.sleep(0)
        return time.monotonic() - began
    assert asyncio.run(turns()) > 0.1
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


def test_a_folder_with_one_service_goes_to_one_process_and_any_other_file_to_any(tmp_path: Path) -> None:
    files = {f"{folder}/test_{name}.py": WHERE for folder in ("e2e", "compile") for name in "abcd"}
    status, told = run(tmp_path, files)
    assert status == 0, told
    ran = {path.parent.name: path.name for path in (tmp_path / "tests").glob("*/*-ran")}
    assert len(list((tmp_path / "tests").glob("*/*-ran"))) == 2
    assert ran["e2e"] != ran["compile"]


def test_a_file_there_that_starts_its_own_services_goes_to_any(tmp_path: Path) -> None:
    status, told = run(
        tmp_path, {"e2e/test_a.py": WHERE, "e2e/test_b.py": WHERE, "e2e/own_service/test_up.py": WHERE}
    )
    assert status == 0, told
    assert len(list((tmp_path / "tests" / "e2e").rglob("*-ran"))) == 2


def test_event_loops_stall_where_that_is_asked(tmp_path: Path) -> None:
    status, told = run(tmp_path, {"unit/test_a.py": STALLS}, "--stall=1")
    assert status == 0, told
