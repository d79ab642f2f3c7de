"""Before stage 1: a Dynamo graph whose tensors are spread over ranks (DTensor) in; the same of plain tensors out.

A DTensor that comes in is handed over as this rank's part of it, and made a DTensor inside the graph; one that goes out
leaves as its part and is made a DTensor again here, over the real mesh. So what is sent, compiled and loaded has plain
tensors at its edges, and what happens between ranks (compiler/dtensors.py) inside.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct

from ..compiler import dtensors, torch_internals_train, wire
from ..compiler.errors import Unsupported

_CALLS = {name: dtensors.Call(f"torchrelay.{name}") for name in ("from_local", "redistribute", "to_local")}


class Whole(Struct, frozen=True):
    """What a DTensor is besides this rank's part."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, part: torch.Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


class Spread(Struct, frozen=True):
    """gm, inputs: of plain tensors. groups: what generated code calls a process group, and its name here. even: every
    rank's parts are alike in size, so that a graph of another rank differs in its place alone."""

    gm: torch.fx.GraphModule
    inputs: list[Any]
    meshes: list[wire.Mesh] = []
    groups: dict[str, str] = {}
    even: bool = True
    dropped: frozenset[int] = frozenset()
    """Positions of the graph's inputs that are meshes."""
    parts: frozenset[int] = frozenset()
    """Positions that are DTensors."""
    outputs: dict[int, Whole] = {}

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A callable of the original inputs, which gives the original outputs."""
        if not self.meshes:
            return compiled

        @functools.wraps(compiled)
        def call(*args: Any) -> Any:
            found = compiled(*self.plain(args))
            if not self.outputs:
                return found
            wholes = self.outputs
            return type(found)(
                wholes[position].of(value) if position in wholes else value
                for position, value in enumerate(found)
            )

        return call

    def plain(self, values: Sequence[Any]) -> list[Any]:
        """What the plain graph takes, of what the original takes."""
        return [
            value.to_local() if position in self.parts else value
            for position, value in enumerate(values)
            if position not in self.dropped
        ]


def spread(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Spread:
    """`gm` itself stays as it is. Raises Unsupported for what cannot be said of a DTensor on the wire."""
    if "torch.distributed.tensor" not in sys.modules:
        return Spread(gm, list(example_inputs))
    from torch.distributed.tensor import DTensor

    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    examples = [
        node.meta.get("example_value", given) for node, given in zip(nodes, example_inputs, strict=True)
    ]
    met = [*examples, *(node.meta.get("example_value") for node in gm.graph.nodes)]
    if not any(
        isinstance(value, DTensor) or torch_internals_train.mesh_of(value) is not None for value in met
    ):
        return Spread(gm, list(example_inputs))
    return _Spreading(gm, examples).spread(example_inputs)


class _Spreading:
    def __init__(self, gm: torch.fx.GraphModule, examples: Sequence[Any]) -> None:
        for name, inner in gm.named_modules():
            if name and isinstance(inner, torch.fx.GraphModule):
                raise Unsupported(
                    "a higher-order operator in a graph with a DTensor (activation checkpointing is one)"
                )
        self._gm = gm
        self._graph = copy.deepcopy(gm.graph)
        self._examples = examples
        self._meshes: list[Any] = []
        self._given: dict[torch.fx.Node, Any] = {}
        """Placeholders that are meshes."""
        self._even = True

    def spread(self, inputs: Sequence[Any]) -> Spread:
        from torch.distributed.tensor import DTensor

        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        dropped = {
            i for i, value in enumerate(self._examples) if torch_internals_train.mesh_of(value) is not None
        }
        self._given = {placeholders[i]: torch_internals_train.mesh_of(self._examples[i]) for i in dropped}
        parts = {i for i, value in enumerate(self._examples) if isinstance(value, DTensor)}
        for position in sorted(parts):
            self._come_in(placeholders[position], self._examples[position], placeholders[-1])
        outputs = self._go_out()
        for node in list(self._graph.nodes):
            if not isinstance(node.target, dtensors.Call):
                self._convert(node)
        for node in self._given:
            if node.users:
                raise Unsupported("a mesh that is something else than DTensor's argument")
            self._graph.erase_node(node)
        self._renumber()
        meshes = [
            wire.Mesh(shape=list(mesh.shape), coordinate=list(mesh.get_coordinate())) for mesh in self._meshes
        ]
        groups = {
            dtensors.group_name(index, axis): str(mesh.get_group(axis).group_name)
            for index, mesh in enumerate(self._meshes)
            for axis in range(len(mesh.shape))
        }
        found = Spread(
            torch.fx.GraphModule(self._gm, self._graph),
            [],
            meshes=meshes,
            groups=groups,
            even=self._even,
            dropped=frozenset(dropped),
            parts=frozenset(parts),
            outputs=outputs,
        )
        return msgspec.structs.replace(found, inputs=found.plain(inputs))

    def _come_in(self, node: torch.fx.Node, value: Any, last: torch.fx.Node) -> None:
        whole = self._whole(value)
        part = torch_internals_train.local_part(value).detach().requires_grad_(value.requires_grad)
        node.meta["example_value"] = part
        with self._graph.inserting_after(last):
            made = self._graph.call_function(
                _CALLS["from_local"],
                (
                    node,
                    self._number(whole.mesh),
                    dtensors.placements_text(whole.placements),
                    tuple(whole.shape),
                    whole.stride,
                ),
            )
        made.meta["example_value"] = value
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)

    def _go_out(self) -> dict[int, Whole]:
        from torch.distributed.tensor import DTensor

        end = next(iter(reversed(self._graph.nodes)))
        found: dict[int, Whole] = {}
        values = list(end.args[0]) if isinstance(end.args[0], tuple | list) else []
        for position, node in enumerate(values):
            value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
            if isinstance(value, DTensor):
                found[position] = self._whole(value)
                with self._graph.inserting_before(end):
                    values[position] = self._graph.call_function(_CALLS["to_local"], (node, None))
        if found:
            end.args = (type(end.args[0])(values),)
        return found

    def _whole(self, value: Any) -> Whole:
        """Of a DTensor at an edge, whose sizes must be numbers."""
        if any(placement.is_partial() for placement in value.placements):
            raise Unsupported("a DTensor that is still to be reduced comes into the graph, or leaves it")
        if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
            raise Unsupported("a DTensor of symbolic sizes comes into the graph, or leaves it")
        return Whole(value.device_mesh, tuple(value.placements), value.shape, tuple(value.stride()))

    def _convert(self, node: torch.fx.Node) -> None:
        from torch.distributed.tensor import DTensor

        value = node.meta.get("example_value")
        if isinstance(value, DTensor):
            self._even = self._even and _evenly(value)
        call = torch_internals_train.dtensor_call(node)
        if call is None:
            return
        name, args, given = call
        made: tuple[Any, ...]
        match name:
            case "from_local":
                whole = _arguments(("part", "device_mesh", "placements"), args, given)
                mesh = self._given.get(whole["device_mesh"], whole["device_mesh"])
                if (
                    mesh is None
                    or given.pop("run_check", False)
                    or given.pop("grad_placements", None) is not None
                ):
                    raise Unsupported(
                        "DTensor.from_local without a mesh, with a check or with grad_placements"
                    )
                shape, stride = given.pop("shape", None), given.pop("stride", None)
                made = (
                    whole["part"],
                    self._number(mesh),
                    dtensors.placements_text(whole["placements"] or value.placements),  # type: ignore[union-attr]
                    None if shape is None else tuple(shape),
                    None if stride is None else tuple(stride),
                )
            case "redistribute":
                whole = _arguments(("tensor", "device_mesh", "placements"), args, given)
                mesh = self._given.get(whole["device_mesh"], whole["device_mesh"])
                if mesh is not None and mesh != value.device_mesh:  # type: ignore[union-attr]
                    raise Unsupported("DTensor.redistribute to another mesh")
                made = (
                    whole["tensor"],
                    dtensors.placements_text(whole["placements"]),
                    bool(given.pop("async_op", False)),
                    given.pop("forward_dtype", None),
                    given.pop("backward_dtype", None),
                )
            case _:
                whole = _arguments(("tensor",), args, given)
                lies = given.pop("grad_placements", None)
                made = (whole["tensor"], None if lies is None else dtensors.placements_text(lies))
        if given:
            raise Unsupported(f"DTensor.{name} with {', '.join(given)}")
        with self._graph.inserting_before(node):
            replacement = self._graph.call_function(_CALLS[name], made)
        replacement.meta.update(node.meta)
        node.replace_all_uses_with(replacement)
        self._graph.erase_node(node)

    def _number(self, mesh: Any) -> int:
        if mesh.get_coordinate() is None:
            raise Unsupported("a mesh that this rank is not in")
        if mesh not in self._meshes:
            self._meshes.append(mesh)
        return self._meshes.index(mesh)

    def _renumber(self) -> None:
        """Meshes in order of first use, whatever order they were met in."""
        order: list[int] = []
        makers = [node for node in self._graph.nodes if node.target is _CALLS["from_local"]]
        for node in makers:
            if node.args[1] not in order:
                order.append(node.args[1])
            node.args = (node.args[0], order.index(node.args[1]), *node.args[2:])
        self._meshes = [self._meshes[index] for index in order]


def _arguments(parameters: Sequence[str], args: Sequence[Any], given: dict[str, Any]) -> Mapping[str, Any]:
    """Arguments by parameter; keyword arguments of these names are taken out of `given`."""
    if len(args) > len(parameters):
        raise Unsupported(f"a method of DTensor with {len(args)} arguments")
    found = dict(zip(parameters, args, strict=False))
    return {name: found[name] if name in found else given.pop(name, None) for name in parameters}


def _evenly(value: Any) -> bool:
    return all(
        not placement.is_shard() or value.shape[placement.dim] % size == 0
        for placement, size in zip(value.placements, value.device_mesh.shape, strict=True)
    )
