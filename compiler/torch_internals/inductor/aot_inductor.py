"""AOTInductor packages: build one, load one, find out whether loading one ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import compatibility


def build_package(exported: torch.export.ExportedProgram, file: Path, options: Mapping[str, Any]) -> None:
    """torch._inductor.aoti_compile_and_package: Inductor's C++ of an exported program, built, with its weights, into
    `file`, which must end in .pt2. Leaves what it built in Inductor's cache folder, and nothing in the process'
    configuration, as upstream would. Raises Unsupported with a torch that lacks what this needs."""
    compatibility.check("training")
    from torch._inductor import aoti_compile_and_package, config

    with config.patch({"aot_inductor.metadata": {}}), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of how it copies a pytree
        aoti_compile_and_package(exported, package_path=str(file), inductor_configs=dict(options))


def load_package(file: Path) -> Callable[..., Any]:
    """torch._inductor.aoti_load_package: a package's model, called as the exported module was."""
    from torch._inductor import aoti_load_package

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # as above
        loaded: Callable[..., Any] = aoti_load_package(str(file))
    return loaded


def signal_on_load(file: Path) -> int:
    """The signal that ends a process that only loads the package (torch._inductor.aoti_load_package); 0: none does."""
    code = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])"
    environment = {
        **os.environ,
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }  # or it tries what this processor can do, for 4 s
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(file)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    return max(0, -done.returncode)
