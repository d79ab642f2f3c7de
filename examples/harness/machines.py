"""Simulates an unused machine: the environment of child processes names empty folders."""

from __future__ import annotations

import os
import shutil
import site
from pathlib import Path

COMPILERS = ("g++", "gcc", "c++", "cc", "clang", "clang++", "nvcc", "ptxas")
_KEPT_OUT = ("TORCHRELAY_", "TORCHINDUCTOR_", "TRITON_CACHE_", "XDG_", "PYTHONDONTWRITEBYTECODE")
"""The last: what pip installs has its bytecode, and this checkout is to have it too."""


class FreshMachine:
    """Home and caches under `root`, all empty; without `compiler`, no compiler is found either.

    Processes started with `environment()` share nothing with the caller's caches. Starting a second
    process on the same FreshMachine is a warm start.
    """

    def __init__(self, root: Path, *, compiler: bool = True) -> None:
        self.root = root
        self.compiler = compiler
        for folder in ("home", "empty-bin", "tmp"):
            (root / folder).mkdir(parents=True, exist_ok=True)

    def environment(self, **more: str) -> dict[str, str]:
        """The caller's environment, with every variable replaced that could point to a cache or a compiler."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_KEPT_OUT)}
        environment |= {
            "HOME": str(self.root / "home"),
            "PYTHONUSERBASE": site.getuserbase(),  # packages are installed, only the home is new
            "XDG_CACHE_HOME": str(self.root / "home" / ".cache"),
            "XDG_STATE_HOME": str(self.root / "home" / ".state"),
            "XDG_CONFIG_HOME": str(self.root / "home" / ".config"),
            "TMPDIR": str(self.root / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.root / "inductor"),
            "TRITON_CACHE_DIR": str(self.root / "triton"),
        }
        if not self.compiler:
            nowhere = self.root / "empty-bin"
            environment |= {
                "PATH": str(nowhere),
                "CC": str(nowhere / "no-cc"),
                "CXX": str(nowhere / "no-c++"),
            }
        return environment | more

    def compilers(self) -> list[str]:
        """Compilers that a process on this machine can find on its PATH."""
        path = self.environment().get("PATH", "")
        return [found for name in COMPILERS if (found := shutil.which(name, path=path))]
