"""Before stage 1: a Dynamo graph gets plain tensors as its only inputs, and is then captured as a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct

from ...compiler.errors import BindingMismatch, Unsupported
from ...compiler.graph.annotations import refuse_annotations
from ...compiler.graph.torch_names import dtype_name
from ...compiler.request import schema
from ...compiler.torch_internals.dynamo.tensors import aliasing
from .configuration import Mode
from .inputs.dtensor_edges import LocalGraph, to_local_tensors
from .inputs.float_inputs import with_constants
from .inputs.held_tensors import HoistedGraph, hoist_tensors
from .locked_tunings import LockedTunings
from .request import CapturedGraph, capture


class PreparedGraph(Struct, frozen=True):
    """A captured graph of plain tensors, and what binds its compiled form to the original inputs."""

    captured: CapturedGraph
    hoisted: HoistedGraph
    local: LocalGraph

    @property
    def is_plain(self) -> bool:
        """Whether the request alone says how the artifact is called: `bind` changes nothing."""
        captured = self.captured
        return not (
            self.hoisted.held
            or self.local.meshes
            or self.local.parts
            or self.local.outputs
            or captured.floats
            or captured.groups
        )

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A callable of the original graph's inputs, which returns the original graph's outputs."""
        return self.hoisted.bind(self.local.bind(compiled))

    def without_inputs(self) -> PreparedGraph:
        """The same without the example inputs, which `bind` does not need."""
        hoisted = msgspec.structs.replace(self.hoisted, inputs=[])
        return PreparedGraph(self.captured, hoisted, msgspec.structs.replace(self.local, inputs=[]))


def prepare(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: Mode,
    options: Mapping[str, Any],
    lock: LockedTunings | None = None,
) -> PreparedGraph:
    """Capture `gm` and leave it unchanged. Raises as `capture` does, and BindingMismatch."""
    names = _placeholders(gm)
    hoisted = hoist_tensors(with_constants(gm), example_inputs)
    local = to_local_tensors(hoisted.gm, hoisted.inputs)
    if local.gm is not gm:  # a copy has what its nodes name; capture() looks at it alone
        refuse_annotations(gm)
    captured = capture(
        local.gm,
        local.inputs,
        mode=mode,
        options=options,
        lock=lock,
        meshes=local.meshes,
        groups=local.groups,
        shards=local.shards(names),
    )
    prepared = PreparedGraph(captured, hoisted, local)
    check_binding(prepared, names)
    _guard_memory(gm, prepared)
    return prepared


def check_binding(prepared: PreparedGraph, names: Sequence[str]) -> None:
    """Whether `bind` gives each value to the placeholder that was made for it. names: of the original graph's
    placeholders. Raises BindingMismatch."""
    hoisted, local = prepared.hoisted, prepared.local
    bound = [name for position, name in enumerate(names) if position not in local.dropped]
    bound += hoisted.held
    taken = _placeholders(local.gm)
    if bound != taken:
        differing = next((pair for pair in zip(bound, taken, strict=False) if pair[0] != pair[1]), None)
        raise BindingMismatch(
            f"placeholder {differing[1]!r} would get the value of {differing[0]!r}"
            if differing
            else f"{len(bound)} values for {len(taken)} placeholders"
        )
    described = prepared.captured.request.inputs
    if len(described) != len(local.inputs):
        raise BindingMismatch(f"{len(local.inputs)} values for {len(described)} described inputs")
    shards = local.shards(names)
    for position, (spec, value) in enumerate(zip(described, local.inputs, strict=True)):
        # A local tensor requires gradients only where they are recorded when it is taken from its DTensor.
        differs = _difference(spec, value, gradients=taken[position] not in shards)
        if differs:
            raise BindingMismatch(f"input {position} ({taken[position]!r}): {differs}")


def _guard_memory(gm: torch.fx.GraphModule, prepared: PreparedGraph) -> None:
    """Have Dynamo trace again when inputs overlap in another way than in the request. Raises Unsupported for DTensors
    that do: AOTAutograd compiles no change in place of them, and of their local tensors it would not know the bases."""
    nodes = {node.name: node for node in gm.graph.nodes if node.op == "placeholder"}
    shards = prepared.local.shards([*nodes])
    sharing: dict[int, list[tuple[torch.fx.Node, torch.Tensor]]] = {}
    local = prepared.local.gm.graph.find_nodes(op="placeholder")
    for node, spec, value in zip(local, prepared.captured.request.inputs, prepared.local.inputs, strict=True):
        if isinstance(spec, schema.TensorInput) and spec.storage >= 0 and node.name in nodes:
            pair = nodes[node.name], node.meta.get("example_value", value)
            sharing.setdefault(spec.storage, []).append(pair)
    for inputs in sharing.values():
        names = [node.name for node, _ in inputs]
        if not shards.isdisjoint(names):
            found, _ = aliasing.overlapping([tensor for _, tensor in inputs])
            if any(names[position] in shards for position in found):
                raise Unsupported(f"a DTensor shares memory with another input ({', '.join(names)})")
        plain = [pair for pair, name in zip(inputs, names, strict=True) if name not in shards]
        if len(plain) > 1:
            aliasing.guard_overlap(plain)


def _placeholders(gm: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "placeholder"]


def _difference(spec: schema.Input, value: Any, *, gradients: bool) -> str:
    """How a value is unlike what the request says of it; '' if it is not. Sizes that are symbolic on either side are
    not compared: Dynamo has guards on them."""
    if not isinstance(spec, schema.TensorInput):
        return "" if not isinstance(value, torch.Tensor) else "a tensor where the request has a number"
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} where the request has a tensor"
    pairs: dict[str, tuple[Any, Any]] = {
        "shape": (spec.shape, list(value.shape)),
        "stride": (spec.stride, list(value.stride())),
        "dtype": (spec.dtype, dtype_name(value.dtype)),
        "device": (spec.device, value.device.type),
    }
    if gradients:
        pairs["requires_grad"] = spec.requires_grad, value.requires_grad
    for name, (said, found) in pairs.items():
        if isinstance(said, list) and isinstance(found, list):
            numbers = zip(said, found, strict=False)
            same = len(said) == len(found) and all(
                one == other for one, other in numbers if type(one) is int and type(other) is int
            )
        else:
            same = said == found
        if not same:
            return f"its {name} is {found}, in the request {said}"
    return ""
