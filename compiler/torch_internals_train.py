"""PyTorch's private functions that training jobs and exports alone use: the sibling of torch_internals.py, same rules.

Each function names its upstream home. Tested with torch 2.11 to 2.13.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def aoti_package(exported: torch.export.ExportedProgram, file: Path, options: Mapping[str, Any]) -> None:
    """torch._inductor.aoti_compile_and_package: Inductor's C++ of an exported program, built, with its weights, into
    `file`, which must end in .pt2. Leaves what it built in Inductor's cache folder. Upstream writes what it built for
    into the process' configuration, from where it would go into the next package and into every request's options."""
    from torch._inductor import aoti_compile_and_package, config

    with config.patch({"aot_inductor.metadata": {}}), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of how it copies a pytree
        aoti_compile_and_package(exported, package_path=str(file), inductor_configs=dict(options))


def aoti_load(file: Path) -> Callable[..., Any]:
    """torch._inductor.aoti_load_package: a package's model, called as the exported module was."""
    from torch._inductor import aoti_load_package

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # as above
        loaded: Callable[..., Any] = aoti_load_package(str(file))
    return loaded


def pretend_process_group(rank: int, world_size: int) -> None:
    """torch.testing._internal.distributed.fake_pg: a default process group of `world_size` ranks whose other ranks are
    not there; collectives end at once, and what they would have brought is made up."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def triton_caches() -> list[Path]:
    """torch._inductor.runtime.cache_dir_utils.triton_cache_dir: the folders in which Triton keeps what it compiled
    for this process, each kernel in one of its own."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    return [Path(triton_cache_dir(number)) for number in range(torch.cuda.device_count())]


def profiler_enabled() -> bool:
    """torch._C._autograd._profiler_enabled: whether any profiler of autograd's is on in this thread."""
    return bool(torch._C._autograd._profiler_enabled())
