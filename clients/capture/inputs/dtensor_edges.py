"""Before stage 1: replaces the DTensors among a graph's inputs and outputs by plain tensors.

An input that is a DTensor is passed as this rank's local tensor and made a DTensor inside the graph. An output leaves
the graph as the local tensor and is made a DTensor again here, over the real mesh. So the graph that is sent, compiled
and loaded has plain inputs and outputs, and the communication of ranks (compiler/graph/dtensor_calls.py) inside.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import torch
from msgspec import Struct

from ....compiler.errors import Unsupported
from ....compiler.graph import dtensor_calls
from ....compiler.request import schema
from ....compiler.torch_internals import compatibility
from ....compiler.torch_internals.distributed import dtensor

_CALLS = {
    name: dtensor_calls.DTensorCall(f"torchrelay.{name}")
    for name in ("from_local", "redistribute", "to_local")
}


class DTensorLayout(Struct, frozen=True):
    """All of a DTensor but this rank's local tensor."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, part: torch.Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


class LocalGraph(Struct, frozen=True):
    """gm, inputs: of plain tensors. groups: what generated code calls a process group, and its name here. even: all
    ranks' local tensors have the same sizes, so that the graphs of ranks differ in the coordinate alone."""

    gm: torch.fx.GraphModule
    inputs: list[Any]
    meshes: list[schema.Mesh] = []
    groups: dict[str, str] = {}
    even: bool = True
    dropped: frozenset[int] = frozenset()
    """Positions of the graph's inputs that are meshes."""
    parts: frozenset[int] = frozenset()
    """Positions that are DTensors."""
    outputs: dict[int, DTensorLayout] = {}

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A callable of the original inputs, which gives the original outputs."""
        if not self.meshes:
            return compiled

        @functools.wraps(compiled)
        def call(*args: Any) -> Any:
            found = compiled(*self.plain(args))
            if not self.outputs:
                return found
            layouts = self.outputs
            return type(found)(
                layouts[position].of(value) if position in layouts else value
                for position, value in enumerate(found)
            )

        return call

    def shards(self, names: Sequence[str]) -> set[str]:
        """Placeholders of local tensors. names: of the original placeholders."""
        return {names[position] for position in self.parts}

    def plain(self, values: Sequence[Any]) -> list[Any]:
        """The inputs of the plain graph, from those of the original."""
        sharded = [value for position, value in enumerate(values) if position in self.parts]
        parts = iter(dtensor.local_shards(sharded))
        return [
            next(parts) if position in self.parts else value
            for position, value in enumerate(values)
            if position not in self.dropped
        ]


def to_local_tensors(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> LocalGraph:
    """`gm` itself is not changed. Raises Unsupported for a DTensor that a request cannot describe."""
    if "torch.distributed.tensor" not in sys.modules:
        return LocalGraph(gm, list(example_inputs))
    from torch.distributed.tensor import DTensor

    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    examples = [
        node.meta.get("example_value", given) for node, given in zip(nodes, example_inputs, strict=True)
    ]
    edges = any(isinstance(value, DTensor) or dtensor.device_mesh_of(value) is not None for value in examples)
    if not edges and not _has_dtensors(gm):
        return LocalGraph(gm, list(example_inputs))
    compatibility.check("distributed")
    return _LocalGraphBuilder(gm, examples).build(example_inputs)


class _LocalGraphBuilder:
    """Rewrites one graph and the graphs inside it; has what they share (meshes, evenness)."""

    def __init__(self, gm: torch.fx.GraphModule, examples: Sequence[Any]) -> None:
        self._gm = gm
        self._graph = copy.deepcopy(gm.graph)
        self._examples = examples
        self._meshes: list[Any] = []
        self._even = True

    def build(self, inputs: Sequence[Any]) -> LocalGraph:
        from torch.distributed.tensor import DTensor

        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        found = map(dtensor.device_mesh_of, self._examples)
        given = {position: mesh for position, mesh in enumerate(found) if mesh is not None}
        parts = {i for i, value in enumerate(self._examples) if isinstance(value, DTensor)}
        for position in sorted(parts):
            self._rewrite_input(placeholders[position], self._examples[position], placeholders[-1])
        outputs = self._rewrite_outputs()
        rewritten = self._rewritten(
            self._gm, self._graph, {placeholders[position]: mesh for position, mesh in given.items()}
        )
        self._renumber(rewritten)
        plain = LocalGraph(
            rewritten,
            [],
            meshes=[
                schema.Mesh(shape=list(mesh.shape), coordinate=list(mesh.get_coordinate()))
                for mesh in self._meshes
            ],
            groups={
                dtensor_calls.group_name(index, axis): str(mesh.get_group(axis).group_name)
                for index, mesh in enumerate(self._meshes)
                for axis in range(len(mesh.shape))
            },
            even=self._even,
            dropped=frozenset(given),
            parts=frozenset(parts),
            outputs=outputs,
        )
        return msgspec.structs.replace(plain, inputs=plain.plain(inputs))

    def _rewritten(
        self, gm: torch.fx.GraphModule, graph: torch.fx.Graph, given: Mapping[torch.fx.Node, Any]
    ) -> torch.fx.GraphModule:
        """`graph`, a copy of `gm`'s, with DTensor's methods as calls that can be sent, and without its placeholders
        that are meshes (`given`)."""
        attributes = {
            str(node.target): functools.reduce(getattr, str(node.target).split("."), gm)
            for node in graph.nodes
            if node.op == "get_attr"
        }
        for node in list(graph.nodes):
            for position, body in enumerate(node.args):
                if isinstance(body, torch.fx.Node) and isinstance(
                    inside := attributes.get(str(body.target)) if body.op == "get_attr" else None,
                    torch.fx.GraphModule,
                ):
                    self._inside(node, position, inside, attributes, given)
        for node in list(graph.nodes):
            if not isinstance(node.target, dtensor_calls.DTensorCall):
                self._convert(graph, node, given)
        for node in given:
            if node.users:
                raise Unsupported("a mesh that is something else than DTensor's argument")
            graph.erase_node(node)
        made = torch.fx.GraphModule(attributes, graph)
        made.meta.update(gm.meta)
        return made

    def _inside(
        self,
        node: torch.fx.Node,
        position: int,
        inside: torch.fx.GraphModule,
        attributes: dict[str, Any],
        given: Mapping[torch.fx.Node, Any],
    ) -> None:
        """The graph that a higher-order operator takes, and after it that graph's arguments (activation checkpointing
        does); one with other habits may have no DTensor in it."""
        if not _has_dtensors(inside):
            return
        body, arguments = cast(torch.fx.Node, node.args[position]), node.args[position + 1 :]
        graph = copy.deepcopy(inside.graph)
        placeholders = [each for each in graph.nodes if each.op == "placeholder"]
        if len(arguments) != len(placeholders) or len(body.users) != 1:
            raise Unsupported(f"a DTensor inside {node.target}")
        meshes = {
            placeholder: given[argument]
            for placeholder, argument in zip(placeholders, arguments, strict=True)
            if isinstance(argument, torch.fx.Node) and argument in given
        }
        attributes[str(body.target)] = self._rewritten(inside, graph, meshes)
        remaining = [
            argument
            for argument in arguments
            if not isinstance(argument, torch.fx.Node) or argument not in given
        ]
        node.args = (*node.args[: position + 1], *remaining)

    def _rewrite_input(self, node: torch.fx.Node, value: Any, last: torch.fx.Node) -> None:
        layout = self._layout(value)
        self._even = self._even and _evenly_sharded(value)
        part = dtensor.local_shard(value).detach().requires_grad_(value.requires_grad)
        node.meta["example_value"] = part
        with self._graph.inserting_after(last):
            made = self._graph.call_function(
                _CALLS["from_local"],
                (
                    node,
                    self._number(layout.mesh),
                    dtensor_calls.placements_text(layout.placements),
                    tuple(layout.shape),
                    layout.stride,
                ),
            )
        made.meta["example_value"] = value
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)

    def _rewrite_outputs(self) -> dict[int, DTensorLayout]:
        from torch.distributed.tensor import DTensor

        end = next(iter(reversed(self._graph.nodes)))
        found: dict[int, DTensorLayout] = {}
        values = list(end.args[0]) if isinstance(end.args[0], tuple | list) else []
        for position, node in enumerate(values):
            value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
            if isinstance(value, DTensor):
                found[position] = self._layout(value)
                with self._graph.inserting_before(end):
                    values[position] = self._graph.call_function(_CALLS["to_local"], (node, None))
        if found:
            end.args = (type(end.args[0])(values),)
        return found

    def _layout(self, value: Any) -> DTensorLayout:
        """The layout of a DTensor that is an input or output; its sizes must be numbers."""
        if any(placement.is_partial() for placement in value.placements):
            raise Unsupported("a DTensor that is still to be reduced comes into the graph, or leaves it")
        if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
            raise Unsupported("a DTensor of symbolic sizes comes into the graph, or leaves it")
        return DTensorLayout(value.device_mesh, tuple(value.placements), value.shape, tuple(value.stride()))

    def _convert(
        self, graph: torch.fx.Graph, node: torch.fx.Node, given_meshes: Mapping[torch.fx.Node, Any]
    ) -> None:
        from torch.distributed.tensor import DTensor

        value = node.meta.get("example_value")
        if isinstance(value, DTensor):
            self._even = self._even and _evenly_sharded(value)
        call = dtensor.dtensor_call(node)
        if call is None:
            return
        name, args, given = call
        made: tuple[Any, ...]
        match name:
            case "from_local":
                bound = _arguments(("part", "device_mesh", "placements"), args, given)
                mesh = given_meshes.get(bound["device_mesh"], bound["device_mesh"])
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
                    bound["part"],
                    self._number(mesh),
                    dtensor_calls.placements_text(bound["placements"] or value.placements),  # type: ignore[union-attr]
                    None if shape is None else tuple(shape),
                    None if stride is None else tuple(stride),
                )
            case "redistribute":
                bound = _arguments(("tensor", "device_mesh", "placements"), args, given)
                mesh = given_meshes.get(bound["device_mesh"], bound["device_mesh"])
                if mesh is not None and mesh != value.device_mesh:  # type: ignore[union-attr]
                    raise Unsupported("DTensor.redistribute to another mesh")
                made = (
                    bound["tensor"],
                    dtensor_calls.placements_text(bound["placements"]),
                    bool(given.pop("async_op", False)),
                    given.pop("forward_dtype", None),
                    given.pop("backward_dtype", None),
                )
            case _:
                bound = _arguments(("tensor",), args, given)
                lies = given.pop("grad_placements", None)
                made = (bound["tensor"], None if lies is None else dtensor_calls.placements_text(lies))
        if given:
            raise Unsupported(f"DTensor.{name} with {', '.join(given)}")
        with graph.inserting_before(node):
            replacement = graph.call_function(_CALLS[name], made)
        replacement.meta.update(node.meta)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)

    def _number(self, mesh: Any) -> int:
        if mesh.get_coordinate() is None:
            raise Unsupported("a mesh that this rank is not in")
        if mesh not in self._meshes:
            self._meshes.append(mesh)
        return self._meshes.index(mesh)

    def _renumber(self, gm: torch.fx.GraphModule) -> None:
        """Meshes in order of first use, whatever order they were met in."""
        order: list[int] = []
        for node in _all_nodes(gm):
            if node.target is _CALLS["from_local"]:
                index = cast(int, node.args[1])
                if index not in order:
                    order.append(index)
                node.args = (node.args[0], order.index(index), *node.args[2:])
        self._meshes = [self._meshes[index] for index in order]


def _all_nodes(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Also of the graphs inside, each where it is first named: the order in which a request is read."""
    seen: set[str] = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr" and node.target not in seen:
            seen.add(str(node.target))
            inside = functools.reduce(getattr, str(node.target).split("."), gm)
            if isinstance(inside, torch.fx.GraphModule):
                yield from _all_nodes(inside)
        yield node


def _has_dtensors(gm: torch.fx.GraphModule) -> bool:
    from torch.distributed.tensor import DTensor

    return any(
        isinstance(node.meta.get("example_value"), DTensor)
        or dtensor.device_mesh_of(node.meta.get("example_value")) is not None
        for node in _all_nodes(gm)
    )


def _arguments(parameters: Sequence[str], args: Sequence[Any], given: dict[str, Any]) -> Mapping[str, Any]:
    """Arguments by parameter; keyword arguments of these names are taken out of `given`."""
    if len(args) > len(parameters):
        raise Unsupported(f"a method of DTensor with {len(args)} arguments")
    found = dict(zip(parameters, args, strict=False))
    return {name: found[name] if name in found else given.pop(name, None) for name in parameters}


def _evenly_sharded(value: Any) -> bool:
    return all(
        not placement.is_shard() or value.shape[placement.dim] % size == 0
        for placement, size in zip(value.placements, value.device_mesh.shape, strict=True)
    )
