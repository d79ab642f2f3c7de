"""`torchrelay run train.py`: the program as it is, with torchrelay in Inductor's place in all of its processes.

`import torch` calls the entry points of the group torch.backends. The folder autoload/ holds the metadata of a
distribution with such an entry point. On PYTHONPATH it reaches the program and every Python that it starts
(`accelerate launch`, torchrun, workers of its own), and no other.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from ...compiler.errors import SettingsError
from ..settings import child_environment

_AUTOLOAD = str(Path(__file__).parent / "autoload")
_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def run(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM [ARGUMENTS]...",
            help="A Python script; `-m MODULE`; or a program that starts Python, such as `accelerate launch`.",
        ),
    ],
) -> None:
    """Run a program unchanged: its graphs for Inductor go through the service.

    That is every torch.compile that names no back end, or "inductor", as Accelerate and Hugging Face's Trainer do.
    """
    command = _command(program)
    environment = child_environment()
    if environment.get(_SWITCH, "1") != "1":
        raise SettingsError(
            f"{_SWITCH} is {environment[_SWITCH]!r}, so `import torch` loads nothing for this command",
            hint=f"Unset {_SWITCH}, or call torchrelay.enable() in the script",
        )
    path = [_AUTOLOAD, *filter(None, [environment.get("PYTHONPATH")])]
    os.execve(command[0], command, environment | {"PYTHONPATH": os.pathsep.join(path)})


def _command(program: list[str]) -> list[str]:
    """What to execute, its file first. Raises SettingsError."""
    first = program[0]
    if first == "-m" or first.endswith(".py"):
        return [sys.executable, *program]
    beside = str(Path(sys.executable).parent)  # the programs of this environment, active or not
    found = shutil.which(first, path=beside) or shutil.which(first)
    if found is None:
        raise SettingsError(
            f"{first[:200]!r} is neither a Python script (*.py) nor a program that is found",
            hint="For a module: torchrelay run -m MODULE",
        )
    return [found, *program[1:]]
