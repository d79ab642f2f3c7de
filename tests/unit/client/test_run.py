"""`torchrelay run` starts the program with its arguments, and ends with its exit status. Where its graphs come from:
tests/e2e/trainers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command_line import torchrelay, user


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return torchrelay("run", *arguments, environment=user(folder, **variables), folder=folder)


@pytest.mark.parametrize("program", [["program.py"], ["-m", "program"]])
def test_arguments_and_exit_status_are_the_programs_own(tmp_path: Path, program: list[str]) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    done = run(tmp_path, *program, "--help", "-m", "--", "x y")
    assert (done.stdout, done.returncode) == ("['--help', '-m', '--', 'x y']\n", 7), done.stderr


def test_what_cannot_be_run_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    done = run(tmp_path, "no-such-program")
    assert done.returncode != 0
    assert "'no-such-program' is neither" in done.stderr
    assert "torchrelay run -m MODULE" in done.stderr
    done = run(tmp_path, "program.py", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode != 0
    assert "Unset TORCH_DEVICE_BACKEND_AUTOLOAD" in done.stderr
