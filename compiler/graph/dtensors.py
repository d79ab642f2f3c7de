"""Stages 1 and 7, for DTensors: a graph gets plain inputs and outputs, and calls that can be sent; and back.

An input that is a DTensor is passed as this rank's local tensor and made a DTensor inside the graph. An output leaves
the graph as the local tensor and is made a DTensor again on the client, over the real mesh. So the graph that is sent,
compiled and loaded has plain inputs and outputs, and the communication of ranks inside.

The worker's process becomes one rank of a fake process group, at the client's position in each mesh. DTensor's work is
then traced as on the client, collectives included. Process groups get names that `group_name` makes; the client
replaces them by its own in the generated code.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from msgspec import Struct

from ..errors import ForbiddenTarget, Unsupported
from ..request import allowed_names, schema
from ..torch_internals import compatibility
from ..torch_internals.distributed import dtensor, fake_process_group


class DTensorCall:
    """A node's target: one of allowed_names.DTENSOR_CALLS. Without `run`, the graph can only be sent."""

    def __init__(self, target: str, run: Callable[..., Any] | None = None) -> None:
        self.target = target
        self._run = run
        self.__name__ = self.__qualname__ = target.rpartition(".")[2]
        self.__module__ = __name__

    def __call__(self, *args: Any) -> Any:
        if self._run is None:
            raise Unsupported(f"{self.target} in a graph that is only to be sent")
        return self._run(*args)

    def __deepcopy__(self, memo: Any) -> DTensorCall:
        return self


def placement_text(placement: Any) -> str:
    """A placement's name on the wire. Raises Unsupported if it is not of the three kinds."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Replicate:
        return "R"
    if type(placement) is Shard:
        return f"S{placement.dim}"
    if type(placement) is Partial and allowed_names.PLACEMENT.fullmatch(f"P{placement.reduce_op}"):
        return f"P{placement.reduce_op}"
    raise Unsupported(f"a tensor that lies on its mesh as {type(placement).__name__}")


def placements_text(placements: Sequence[Any]) -> tuple[str, ...]:
    return tuple(map(placement_text, placements))


def group_name(mesh: int, dimension: int) -> str:
    """The name, in generated code, of the process group of a mesh's dimension."""
    return f"torchrelay_mesh_{mesh}_{dimension}"


# --- on the client ---------------------------------------------------------------------------------------

_CALLS = {name: DTensorCall(f"torchrelay.{name}") for name in ("from_local", "redistribute", "to_local")}


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


class DTensorEdges(Struct, frozen=True):
    """The DTensors and meshes among the inputs and outputs of a graph that is sent with plain ones."""

    meshes: list[schema.Mesh]
    groups: dict[str, str]
    """What generated code calls a process group -> its name here."""
    even: bool
    """Whether all ranks' local tensors have the same sizes, so that the graphs of ranks differ in the coordinate
    alone."""
    mesh_inputs: frozenset[int]
    """Positions of the original inputs that are meshes."""
    dtensor_inputs: frozenset[int]
    dtensor_outputs: dict[int, DTensorLayout]

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A callable of the original inputs, which gives the original outputs."""

        @functools.wraps(compiled)
        def call(*args: Any) -> Any:
            results = compiled(*self.plain(args))
            layouts = self.dtensor_outputs
            if not layouts:
                return results
            return type(results)(
                layouts[position].of(value) if position in layouts else value
                for position, value in enumerate(results)
            )

        return call

    def shards(self, names: Sequence[str]) -> set[str]:
        """Placeholders of local tensors. names: of the original placeholders."""
        return {names[position] for position in self.dtensor_inputs}

    def plain(self, values: Sequence[Any]) -> list[Any]:
        """The inputs of the plain graph, from those of the original."""
        sharded = [value for position, value in enumerate(values) if position in self.dtensor_inputs]
        parts = iter(dtensor.local_shards(sharded))
        return [
            next(parts) if position in self.dtensor_inputs else value
            for position, value in enumerate(values)
            if position not in self.mesh_inputs
        ]


def to_local_tensors(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[torch.fx.GraphModule, DTensorEdges | None]:
    """The graph of plain tensors; `gm` itself and None if it has no DTensors. `gm` is not changed. Raises Unsupported
    for a DTensor that a request cannot describe."""
    from torch.distributed.tensor import DTensor

    nodes = gm.graph.find_nodes(op="placeholder")
    examples = [
        node.meta.get("example_value", example) for node, example in zip(nodes, example_inputs, strict=True)
    ]
    edges = any(isinstance(value, DTensor) or dtensor.device_mesh_of(value) is not None for value in examples)
    if not edges and not _has_dtensors(gm):
        return gm, None
    compatibility.check("distributed")
    return _LocalGraphBuilder(gm, examples).build()


class _LocalGraphBuilder:
    """Rewrites one graph and the graphs inside it; has what they share (meshes, evenness)."""

    def __init__(self, gm: torch.fx.GraphModule, examples: Sequence[Any]) -> None:
        self._gm = gm
        self._graph = copy.deepcopy(gm.graph)
        self._examples = examples
        self._meshes: list[Any] = []
        self._even = True

    def build(self) -> tuple[torch.fx.GraphModule, DTensorEdges]:
        from torch.distributed.tensor import DTensor

        placeholders = self._graph.find_nodes(op="placeholder")
        meshes = {
            position: mesh
            for position, value in enumerate(self._examples)
            if (mesh := dtensor.device_mesh_of(value)) is not None
        }
        inputs = frozenset(i for i, value in enumerate(self._examples) if isinstance(value, DTensor))
        for position in sorted(inputs):
            self._rewrite_input(placeholders[position], self._examples[position], placeholders[-1])
        outputs = self._rewrite_outputs()
        rewritten = self._rewritten(
            self._gm, self._graph, {placeholders[position]: mesh for position, mesh in meshes.items()}
        )
        self._renumber(rewritten)
        edges = DTensorEdges(
            meshes=[
                schema.Mesh(shape=list(mesh.shape), coordinate=list(mesh.get_coordinate()))
                for mesh in self._meshes
            ],
            groups={
                group_name(index, axis): str(mesh.get_group(axis).group_name)
                for index, mesh in enumerate(self._meshes)
                for axis in range(len(mesh.shape))
            },
            even=self._even,
            mesh_inputs=frozenset(meshes),
            dtensor_inputs=inputs,
            dtensor_outputs=outputs,
        )
        return rewritten, edges

    def _rewritten(
        self, gm: torch.fx.GraphModule, graph: torch.fx.Graph, meshes: Mapping[torch.fx.Node, Any]
    ) -> torch.fx.GraphModule:
        """`graph`, a copy of `gm`'s, with DTensor's methods as calls that can be sent, and without its placeholders
        that are meshes (`meshes`)."""
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
                    self._inside(node, position, inside, attributes, meshes)
        for node in list(graph.nodes):
            if not isinstance(node.target, DTensorCall):
                self._convert(graph, node, meshes)
        for node in meshes:
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
        meshes: Mapping[torch.fx.Node, Any],
    ) -> None:
        """The graph that a higher-order operator takes, and after it that graph's arguments (activation checkpointing
        does); one with other habits may have no DTensor in it."""
        if not _has_dtensors(inside):
            return
        body, arguments = cast(torch.fx.Node, node.args[position]), node.args[position + 1 :]
        graph = copy.deepcopy(inside.graph)
        placeholders = graph.find_nodes(op="placeholder")
        if len(arguments) != len(placeholders) or len(body.users) != 1:
            raise Unsupported(f"a DTensor inside {node.target}")
        inner = {
            placeholder: meshes[argument]
            for placeholder, argument in zip(placeholders, arguments, strict=True)
            if isinstance(argument, torch.fx.Node) and argument in meshes
        }
        attributes[str(body.target)] = self._rewritten(inside, graph, inner)
        remaining = [
            argument
            for argument in arguments
            if not isinstance(argument, torch.fx.Node) or argument not in meshes
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
                    placements_text(layout.placements),
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
        self, graph: torch.fx.Graph, node: torch.fx.Node, meshes: Mapping[torch.fx.Node, Any]
    ) -> None:
        from torch.distributed.tensor import DTensor

        value = node.meta.get("example_value")
        if isinstance(value, DTensor):
            self._even = self._even and _evenly_sharded(value)
        call = dtensor.dtensor_call(node)
        if call is None:
            return
        name, args, kwargs = call
        made: tuple[Any, ...]
        match name:
            case "from_local":
                bound = _arguments(("part", "device_mesh", "placements"), args, kwargs)
                mesh = meshes.get(bound["device_mesh"], bound["device_mesh"])
                if (
                    mesh is None
                    or kwargs.pop("run_check", False)
                    or kwargs.pop("grad_placements", None) is not None
                ):
                    raise Unsupported(
                        "DTensor.from_local without a mesh, with a check or with grad_placements"
                    )
                shape, stride = kwargs.pop("shape", None), kwargs.pop("stride", None)
                made = (
                    bound["part"],
                    self._number(mesh),
                    placements_text(bound["placements"] or value.placements),  # type: ignore[union-attr]
                    None if shape is None else tuple(shape),
                    None if stride is None else tuple(stride),
                )
            case "redistribute":
                bound = _arguments(("tensor", "device_mesh", "placements"), args, kwargs)
                mesh = meshes.get(bound["device_mesh"], bound["device_mesh"])
                if mesh is not None and mesh != value.device_mesh:  # type: ignore[union-attr]
                    raise Unsupported("DTensor.redistribute to another mesh")
                made = (
                    bound["tensor"],
                    placements_text(bound["placements"]),
                    bool(kwargs.pop("async_op", False)),
                    kwargs.pop("forward_dtype", None),
                    kwargs.pop("backward_dtype", None),
                )
            case _:
                bound = _arguments(("tensor",), args, kwargs)
                lies = kwargs.pop("grad_placements", None)
                made = (bound["tensor"], None if lies is None else placements_text(lies))
        if kwargs:
            raise Unsupported(f"DTensor.{name} with {', '.join(kwargs)}")
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


def _arguments(parameters: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """Arguments by parameter; keyword arguments of these names are taken out of `kwargs`."""
    if len(args) > len(parameters):
        raise Unsupported(f"a method of DTensor with {len(args)} arguments")
    found = dict(zip(parameters, args, strict=False))
    return {name: found[name] if name in found else kwargs.pop(name, None) for name in parameters}


def _evenly_sharded(value: Any) -> bool:
    return all(
        not placement.is_shard() or value.shape[placement.dim] % size == 0
        for placement, size in zip(value.placements, value.device_mesh.shape, strict=True)
    )


# --- on the worker ---------------------------------------------------------------------------------------


def _placement(text: str) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if not allowed_names.PLACEMENT.fullmatch(text):
        raise ForbiddenTarget(f"placement {text[:40]!r} is not known")
    return Replicate() if text == "R" else Shard(int(text[1:])) if text[0] == "S" else Partial(text[1:])


class RequestMeshes:
    """Makes DTensor calls over a request's meshes."""

    def __init__(self, meshes: Sequence[schema.Mesh], device: str) -> None:
        self._described = tuple((tuple(mesh.shape), tuple(mesh.coordinate)) for mesh in meshes)
        self._device = device

    def call(self, target: str, args: tuple[Any, ...]) -> tuple[DTensorCall, tuple[Any, ...]]:
        """A node's target and arguments for those on the wire. Raises ForbiddenTarget."""
        match target, args:
            case "torchrelay.from_local", (part, mesh, placements, shape, stride):
                return self._from_local(mesh, placements, shape is not None), (
                    (part,) if shape is None else (part, shape, stride)
                )
            case "torchrelay.redistribute", (tensor, placements, async_op, forward, backward):
                return _redistribute(placements, async_op, forward, backward), (tensor,)
            case "torchrelay.to_local", (tensor, placements):
                return _to_local(placements), (tensor,)
        raise ForbiddenTarget(f"{target} with {len(args)} arguments")

    def _from_local(self, mesh: int, texts: Sequence[str], whole: bool) -> DTensorCall:
        meshes = fake_process_group.fake_device_meshes(self._described, self._device, group_name)
        lies = tuple(map(_placement, texts))

        def run(part: torch.Tensor, shape: Any = None, stride: Any = None) -> Any:
            from torch.distributed.tensor import DTensor

            given: dict[str, Any] = {"shape": torch.Size(shape), "stride": tuple(stride)} if whole else {}
            return DTensor.from_local(part, meshes[mesh], lies, run_check=False, **given)

        return DTensorCall("torchrelay.from_local", run)


def _redistribute(texts: Sequence[str], async_op: bool, forward: Any, backward: Any) -> DTensorCall:
    lies = tuple(map(_placement, texts))
    given = {
        name: dtype
        for name, dtype in (("forward_dtype", forward), ("backward_dtype", backward))
        if dtype is not None
    }
    return DTensorCall(
        "torchrelay.redistribute",
        lambda tensor: tensor.redistribute(placements=lies, async_op=async_op, **given),
    )


def _to_local(texts: Sequence[str] | None) -> DTensorCall:
    lies = None if texts is None else tuple(map(_placement, texts))
    return DTensorCall("torchrelay.to_local", lambda tensor: tensor.to_local(grad_placements=lies))
