"""Where the libraries of artifacts lie. Ranks of one machine start at one time, with one cache folder."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torchrelay.clients.artifacts import shared_libraries
from torchrelay.clients.artifacts.shared_libraries import loading_folder, store_library, why_nothing_loads

_RANK = """
import sys, time
from pathlib import Path
from torchrelay.clients.artifacts import shared_libraries
shared_libraries._PREFIX = sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
for turn in range(50):
    shared_libraries._folders.clear()  # as a rank that has just started
    print(shared_libraries.why_nothing_loads(Path(sys.argv[1])) or "all well", flush=True)
"""


def test_ranks_that_start_at_one_time_all_find_that_code_can_be_loaded(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _RANK, str(tmp_path / "cache"), f"torchrelay-test-{os.getpid()}-"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ranks = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(4)
    ]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    said = []
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    for rank in ranks:
        said += rank.communicate(timeout=120)[0].splitlines()
    assert said == ["all well"] * 200


@pytest.mark.parametrize(("code", "told"), [("EPERM", "can be executed"), ("ENOSPC", "")])
def test_what_concerns_one_process_alone_is_nothing_that_its_machine_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, told: str
) -> None:
    error = OSError(getattr(errno, code), "no")
    monkeypatch.setattr(shared_libraries, "_folders", {})
    monkeypatch.setattr(shared_libraries, "why_not_executable", lambda folder: error)
    assert told in why_nothing_loads(tmp_path)
    assert bool(why_nothing_loads(tmp_path)) == bool(told)


def test_a_folder_that_somebody_has_removed_is_made_again(tmp_path: Path) -> None:
    shutil.rmtree(loading_folder(tmp_path))
    assert store_library(b"one", tmp_path).read_bytes() == b"one"
