"""A program for phones: torch.export's becomes an ExecuTorch program (.pte), whose products XNNPACK computes.

The package `executorch` is an extra of its own (`torchrelay[executorch]`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...compiler.errors import ExportFailed

_ARRANGES = ("alloc", "free", "getitem", "executorch_call_delegate")
"""Calls of a finished program that compute nothing themselves."""


def require_executorch() -> None:
    """Raises ExportFailed, which says what to install, if this Python has no ExecuTorch that works with its torch."""
    try:
        import executorch.exir
        import executorch.runtime  # noqa: F401
    except (ImportError, OSError, AttributeError) as error:
        raise ExportFailed(
            f"--format pte needs ExecuTorch: {error}",
            hint=f"pip install executorch, in the version for torch {torch.__version__}; "
            "for a node, name executorch in the file of --requirements",
        ) from None


def build_program(exported: torch.export.ExportedProgram, file: Path) -> str:
    """Write the program to `file`, with its weights; returns what computes it: XNNPACK, and operators that are left to
    ExecuTorch's portable kernels. Raises ExecuTorch's own errors."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    with file.open("wb") as opened:
        program.write_to_file(opened)
    nodes = program.exported_program().graph.nodes
    calls = {
        str(getattr(node.target, "__name__", node.target)) for node in nodes if node.op == "call_function"
    }
    how = ["XNNPACK"] if "executorch_call_delegate" in calls else []
    if portable := sorted(name.partition(".")[0] for name in calls - set(_ARRANGES)):
        how.append(f"portable kernels: {', '.join(dict.fromkeys(portable))}")
    return "; ".join(how)


def load_program(file: Path) -> Callable[..., Sequence[Any]]:
    """The program, called with a model's tensors, as ExecuTorch's own runtime runs it; returns its outputs in order.
    Raises RuntimeError."""
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(file.read_bytes())
    program.load_method("forward")  # a method does not keep its program, nor the bytes that it runs from
    return lambda *inputs: program.load_method("forward").execute(inputs)
