"""What a real g++ prints, told apart: a source that it refuses, and a machine that does not let it work."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from torchrelay.compiler.pipeline.inductor import complaint, refuses_source

GOOD, WRONG = "int x;\n", "int x = ;\n"
MISSING = '#include "nowhere.h"\n'
UNDEFINED = "int y(); int main() { return y(); }\n"


def printed(folder: Path, source: str, *options: str) -> str:
    path = folder / "source.cpp"
    path.write_text(source)
    command = ["g++", str(path), "-o", str(folder / "out"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize(("source", "options"), [(WRONG, ["-c"]), (UNDEFINED, [])])
def test_a_source_that_it_refuses(source: str, options: list[str], tmp_path: Path) -> None:
    assert refuses_source(printed(tmp_path, source, *options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-c", "-wrapper", "/nowhere/cc1plus"], "cannot execute"),
        (["-c", "-o", "/dev/full"], "No space left"),
        (["-c", "-march=none"], "march"),
    ],
)
def test_a_machine_on_which_it_cannot_work(options: list[str], words: str, tmp_path: Path) -> None:
    output = printed(tmp_path, GOOD, *options)
    assert not refuses_source(output)
    assert words in complaint(output)


def test_a_machine_without_a_header(tmp_path: Path) -> None:
    """Generated code includes PyTorch's headers and precompiled ones."""
    output = printed(tmp_path, MISSING, "-c")
    assert not refuses_source(output)
    assert "nowhere.h" in complaint(output)


def test_a_source_that_it_refuses_for_want_of_room_may_be_taken_the_next_time(tmp_path: Path) -> None:
    assert not refuses_source("a.cpp:1:2: fatal error: error writing to /tmp/cc.s: No space left on device\n")
    assert complaint("") == "it said nothing"
