"""Compile a graph, forward and backward, with Inductor (compile_fx), and serialize what was compiled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..dynamo.kernel_side_table import empty_kernel_side_table
from .compiled_graphs import GENERATED_CODE, copy_graph
from .dry_run import DryRunControl, DryRunFinished, stop_after_lowering


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
                before.meta[GENERATED_CODE] = getattr(lowered, "source_code", "")
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
