"""Stage 2, at the gate: what a request says of meshes, and of the DTensors over them, looked at without torch.

Three calls stand for DTensor's methods, with positional arguments alone; placements are texts of names.PLACEMENT, one
for each dimension of the mesh:

    torchrelay.from_local(part, mesh, placements, shape, stride)    shape, stride: of the whole, or None
    torchrelay.redistribute(dtensor, placements, async_op, forward_dtype, backward_dtype)
    torchrelay.to_local(dtensor, grad_placements)                   or None
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import LimitExceeded, MalformedRequest
from . import allowed_names, schema

MOST_MESHES = 8
MOST_DIMENSIONS = 4
MOST_RANKS = 1024
MOST_COORDINATES = 64
"""The most coordinates for which a graph is made ahead."""


def check(meshes: Sequence[schema.Mesh]) -> None:
    """Raises LimitExceeded or MalformedRequest."""
    if len(meshes) > MOST_MESHES:
        raise LimitExceeded(f"{len(meshes)} meshes, {MOST_MESHES} allowed")
    for index, mesh in enumerate(meshes):
        if not 1 <= len(mesh.shape) <= MOST_DIMENSIONS or len(mesh.coordinate) != len(mesh.shape):
            raise MalformedRequest(
                f"mesh {index} has {len(mesh.shape)} sizes, {len(mesh.coordinate)} coordinates"
            )
        if not all(0 <= at < size for at, size in zip(mesh.coordinate, mesh.shape, strict=True)):
            raise MalformedRequest(f"mesh {index} does not hold the place that it names")
        if math.prod(mesh.shape) > MOST_RANKS:
            raise LimitExceeded(f"mesh {index} has more than {MOST_RANKS} ranks")


def check_call(node: schema.Node, where: str, meshes: Sequence[schema.Mesh], used: int) -> int:
    """How many meshes are used so far, this call included. Raises MalformedRequest."""
    match node.target, node.args:
        case "torchrelay.from_local", [schema.Ref(), int(index), placements, shape, stride] if not isinstance(
            index, bool
        ):
            if not 0 <= index <= used or index >= len(meshes):
                raise MalformedRequest(f"{where} holds no mesh, or meshes are out of order")
            _placements(placements, where, len(meshes[index].shape))
            if (shape is None) != (stride is None) or not (_sizes(shape) and _sizes(stride)):
                raise MalformedRequest(f"{where} has a shape or a stride of something else than sizes")
            used = max(used, index + 1)
        case "torchrelay.redistribute", [schema.Ref(), placements, bool(), forward, backward]:
            _placements(placements, where)
            if not all(dtype is None or isinstance(dtype, schema.DTypeArg) for dtype in (forward, backward)):
                raise MalformedRequest(f"{where} has a dtype that is none")
        case "torchrelay.to_local", [schema.Ref(), placements]:
            if placements is not None:
                _placements(placements, where)
        case _:
            raise MalformedRequest(f"{where} has other arguments than {node.target} takes")
    if node.kwargs:
        raise MalformedRequest(f"{where} has keyword arguments")
    return used


def _placements(value: Any, where: str, count: int = 0) -> None:
    if not isinstance(value, schema.TupleArg) or not 1 <= len(value.items) <= MOST_DIMENSIONS:
        raise MalformedRequest(f"{where} has no placements")
    if count and len(value.items) != count:
        raise MalformedRequest(f"{where} has {len(value.items)} placements for {count} dimensions")
    if not all(isinstance(item, str) and allowed_names.PLACEMENT.fullmatch(item) for item in value.items):
        raise MalformedRequest(f"{where} has a placement that is not known")


def _sizes(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, schema.TupleArg) and all(
        (isinstance(item, int) and not isinstance(item, bool) and item >= 0)
        or isinstance(item, schema.Ref | schema.Sym)
        for item in value.items
    )


def at_all_coordinates(request: schema.GraphRequest) -> list[schema.GraphRequest]:
    """The same request, from each place of its mesh: what the other ranks will ask for, if tensors are spread evenly.
    Of a graph with no mesh, with several, or with a large one: only itself."""
    if len(request.meshes) != 1 or math.prod(request.meshes[0].shape) > MOST_COORDINATES:
        return [request]
    shape = request.meshes[0].shape
    return [
        msgspec.structs.replace(request, meshes=[schema.Mesh(shape=shape, coordinate=list(place))])
        for place in itertools.product(*map(range, shape))
    ]
