"""Lower a graph and build no kernel, to learn what must be searched before a compile."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ..patching import patched


class DryRunControl(Protocol):
    """Says of a compile whether it only finds out what must be searched."""

    @property
    def in_dry_run(self) -> bool: ...

    def report_problems(self) -> None:
        """The forward was lowered, and the backward will be."""


class DryRunFinished(BaseException):
    """A graph was lowered and no code generated. No Exception, so that nobody takes it for a failure."""


class _LoweringStopped(BaseException):
    """What was lowered (GraphLowering), where its code would have been generated."""

    def __init__(self, lowering: Any) -> None:
        self.lowering = lowering


@contextlib.contextmanager
def stop_after_lowering(lower: Callable[..., Any], control: DryRunControl) -> Iterator[Callable[..., Any]]:
    """compile_fx_inner that stops before torch._inductor.graph.GraphLowering.compile_to_module if `control` is in a
    dry run by then. What cannot run takes a forward's place; its outputs' strides decide the backward's inputs."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import set_tracing_context_output_strides

    original = GraphLowering.compile_to_module

    def compile_to_module(self: Any) -> Any:
        if control.in_dry_run:
            raise _LoweringStopped(self)
        return original(self)

    @functools.wraps(lower)
    def lower_only(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        try:
            return lower(gm, inputs, **kwargs)
        except _LoweringStopped as stopped:
            if kwargs.get("is_backward") or kwargs.get("is_inference"):
                raise DryRunFinished from None
            control.report_problems()
            strides: Any = types.SimpleNamespace(output_strides=_output_strides(stopped.lowering))
            set_tracing_context_output_strides(inputs, strides)
            return forward_not_compiled

    with patched(GraphLowering, "compile_to_module", compile_to_module):
        yield lower_only


def _output_strides(lowering: Any) -> list[tuple[str, ...] | None]:
    """The strides of a graph's outputs, as codegen_and_compile in torch._inductor.compile_fx writes them down."""
    from torch._inductor.ir import IRNode
    from torch.fx.experimental.symbolic_shapes import SymExprPrinter, free_unbacked_symbols

    printer = SymExprPrinter()
    return [
        tuple(printer.doprint(stride) for stride in out.get_layout().stride)
        if isinstance(out, IRNode) and out.has_tensor_output() and not free_unbacked_symbols(out.get_stride())
        else None
        for out in lowering.graph_outputs or ()
    ]


def forward_not_compiled(inputs: Any) -> Any:
    """Stands for the forward while only the backward's problems are of interest."""
    raise AssertionError("the forward was not compiled in this process")


forward_not_compiled._boxed_call = True  # type: ignore[attr-defined]
