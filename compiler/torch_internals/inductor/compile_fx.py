"""Compile a graph with Inductor (compile_fx), forward and backward, or only lower it; serialize the result, intercept
its calls."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..dynamo.kernel_side_table import empty_kernel_side_table
from ..patching import patched


def compile_graph(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    *,
    on_lowering: Callable[[bool], None] | None = None,
    kept: dict[int, torch.fx.GraphModule] | None = None,
    control: DryRunControl | None = None,
) -> Callable[..., Any]:
    """torch._inductor.compile_fx.compile_fx: AOTAutograd, lowering and code generation.

    on_lowering(is_backward) is called as each half leaves AOTAutograd and enters Inductor. kept: receives a copy of
    each half as it was then, by the id of its compiled form (see `intercepting_calls`). Raises
    DryRunFinished in place of an answer if `control` is in its dry run.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if on_lowering is None:
        compiled = compile_fx(gm, list(inputs), config_patches=dict(patches))
        assert callable(compiled)
        return compiled
    with contextlib.ExitStack() as stack:
        lower: Callable[..., Any] = compile_fx_inner
        if control is not None:
            lower = stack.enter_context(stop_after_lowering(lower, control))

        @functools.wraps(compile_fx_inner)
        def inner(*args: Any, **kwargs: Any) -> Any:
            on_lowering(bool(kwargs.get("is_backward")))
            before = None if kept is None else copy_graph(args[0])
            lowered = lower(*args, **kwargs)
            if kept is not None and before is not None:
                before.meta[_GENERATED_CODE] = getattr(lowered, "source_code", "")
                kept[id(lowered)] = before
            return lowered

        compiled = compile_fx(gm, list(inputs), inner_compile=inner, config_patches=dict(patches))
    if control is not None and control.in_dry_run:
        raise DryRunFinished
    assert callable(compiled)
    return compiled


def serialize(compiled: Any) -> bytes:
    """Pickle of a compiled callable (BundledAOTAutogradSerializableCallable); TypeError if it cannot be."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Serializable

    if getattr(compiled, "serialize", None) is None:
        raise TypeError("the compiled graph has no serialized form")
    with empty_kernel_side_table():
        return Serializable.serialize_compile_artifacts(Serializable(compiled))


# --- the graphs that were compiled ---------------------------------------------------------------------------

_GENERATED_CODE = "torchrelay_generated"


def generated_code(gm: torch.fx.GraphModule) -> str:
    """What Inductor generated for a graph that `compile_graph` kept
    (CompiledFxGraph.source_code)."""
    code: str = gm.meta.get(_GENERATED_CODE, "")
    return code


def copy_graph(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy to be interpreted: _LazyGraphModule makes no Python of it unless asked."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(gm.graph, {}))
    return _LazyGraphModule(gm, copied)


@contextlib.contextmanager
def intercepting_calls(
    kept: Mapping[int, torch.fx.GraphModule],
    replay: Callable[[torch.fx.GraphModule, list[Any], Callable[[list[Any]], Any]], Any],
) -> Iterator[None]:
    """Inside the block, run each compiled graph of `kept` through replay(graph, inputs, run).

    Wraps torch._inductor.output_code.CompiledFxGraph.__call__.
    """
    from torch._inductor.output_code import CompiledFxGraph
    from torch.utils._python_dispatch import _disable_current_modes

    original = CompiledFxGraph.__call__

    def call(self: Any, inputs: Any) -> Any:
        gm = kept.get(id(self))
        if gm is None:
            return original(self, inputs)
        with _disable_current_modes():  # AOTAutograd's watch on custom operators costs the reference a fifth
            return replay(gm, inputs, lambda values: original(self, values))

    with patched(CompiledFxGraph, "__call__", call):
        yield


# --- dry runs: lower a graph and build no kernel, to learn what must be searched before a compile -------------------


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
