"""What the first compiled graph makes PyTorch import, for who imports it earlier. Imports no torch itself."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator

_BY_THE_PROGRAM = frozenset(
    {
        "torch._dynamo",
        "torch._dynamo.config",
        "torch._functorch.config",
        "torch._inductor.config",
    }
)
_MODULES = (
    "torch._dynamo.convert_frame",
    "torch._inductor.codegen.common",
    "torch._export.serde.schema",
    "torch.export.pt2_archive._package",
    "torch._inductor.codecache",
    "torch._inductor.output_code",
    "torch._functorch._aot_autograd.aot_autograd_result",
    "torch._inductor.inductor_prims",
    "torch._functorch.partitioners",
    "torch._functorch.aot_autograd",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.debug_utils",
    "torch._dynamo.repro.after_dynamo",
)
"""In parts of at most 0.1 s. None of them asks for GPUs or starts a process."""


def may_begin() -> bool:
    """Whether the program has imported the settings that PyTorch reads from the environment. Before that it may still
    change its environment, and nothing may be imported early."""
    return sys.modules.keys() >= _BY_THE_PROGRAM


def parts() -> Iterator[Callable[[], object]]:
    """The imports, one after another."""
    return (functools.partial(_import, name) for name in _MODULES)


def _import(name: str) -> None:
    from .light_imports import libraries_when_used  # which imports torch

    with libraries_when_used():
        importlib.import_module(name)
