"""Guards on how a graph's inputs share memory.

AOTAutograd adds them where it compiles (torch/_functorch/_aot_autograd/input_output_analysis.py:
compute_overlapping_inputs), which is not this process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ..symbolic_shapes import sym_env


def guard_overlap(sharing: Sequence[tuple[torch.fx.Node, torch.Tensor]]) -> None:
    """Have Dynamo check at each call that inputs which share a storage overlap as they do now, and are views of the
    same tensors. sharing: their placeholders and example values. Does nothing if none of them overlap and no size is
    symbolic (as AOTAutograd), or outside of Dynamo."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._guards import DuplicateInputs, StorageOverlap, TracingContext

    context = TracingContext.try_get()
    sources: list[Any] = [getattr(node, "_dynamo_source", None) for node, _ in sharing]
    if context is None or None in sources or getattr(context.fake_mode, "shape_env", None) is None:
        return
    tensors = [tensor for _, tensor in sharing]
    found, symbolic = overlapping(tensors)
    if not found and not symbolic:
        return
    guards = context.guards_context
    guards.aotautograd_guards.append(
        StorageOverlap(
            [sources[position] for position in sorted(found)],
            [source for position, source in enumerate(sources) if position not in found],
        )
    )
    if not found:
        return
    any_view = any(tensor._base is not None for tensor in tensors)
    known = _tracked() | {id(tensor): source for tensor, source in zip(tensors, sources, strict=True)}
    for tensor, source in zip(tensors, sources, strict=True):
        base = AttrSource(source, "_base")
        if tensor._base is None:
            if not any_view:
                guards.dynamo_guards.add(base.make_guard(GuardBuilder.CONSTANT_MATCH))
        elif id(tensor._base) in known:
            guards.aotautograd_guards.append(DuplicateInputs(known[id(tensor._base)], base))
        else:
            guards.dynamo_guards.add(base.make_guard(GuardBuilder.TENSOR_MATCH))
            known[id(tensor._base)] = base


def overlapping(tensors: Sequence[torch.Tensor]) -> tuple[set[int], bool]:
    """Positions of those of one storage that overlap with another one of them; whether any size is symbolic."""
    from torch._C._dynamo.guards import compute_overlapping_tensors

    sizes = [n for tensor in tensors for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset())]
    symbolic = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    with contextlib.nullcontext() if symbolic is None else sym_env(symbolic).suppress_guards():
        found = compute_overlapping_tensors(list(tensors), symbolic=symbolic is not None)
    return set(found), symbolic is not None


def _tracked() -> dict[int, Any]:
    """Sources of all tensors that the frame has read, those that its graph does not use too, by the ids of their fakes:
    Dynamo's guard on duplicates has all of them. The base of a view that it has read has no guard yet."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tracked = InstructionTranslator.current_tx().output.tracked_fakes
    except AttributeError:  # no frame is traced
        return {}
    return {id(each.fake): each.source for each in tracked if getattr(each.source, "member", "") != "_base"}
