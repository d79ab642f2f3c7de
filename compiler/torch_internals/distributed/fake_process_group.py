"""PyTorch's fake process groups: one process that takes the place of a rank among many."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from ...errors import Unsupported
from .. import compatibility


def init_fake_process_group(rank: int, world_size: int) -> None:
    """torch.testing._internal.distributed.fake_pg: a default process group of `world_size` ranks whose other ranks are
    not there; collectives end at once, and what they would have brought is made up. Raises Unsupported."""
    compatibility.check("fake_process_group")
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the back end

    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=world_size)


def unfilled_collective(generated: bytes) -> str:
    """The first collective in generated code whose result this torch's fake process group leaves as memory was; '' for
    none. Since 2.13 it fills them all (torch.testing._internal.distributed.fake_pg)."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        return ""
    unfilled = ("reduce_scatter", "all_to_all", "alltoall")
    return next((name for name in unfilled if name.encode() in generated), "")


@functools.lru_cache(maxsize=1)
def fake_device_meshes(
    meshes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...],
    device: str,
    group_name: Callable[[int, int], str],
) -> list[Any]:
    """A DeviceMesh for each (shape, where this process stands in it), whose process groups are named
    `group_name(mesh, dimension)` (torch.distributed.distributed_c10d._process_group_name gives names by counting).

    Makes this process one rank of a simulated world, larger than any of them: a mesh of all ranks would have the
    world's own group. Raises Unsupported where it already is a rank of something else.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.distributed.device_mesh import DeviceMesh

    if dist.is_initialized():
        raise Unsupported("this process is a rank already")
    strides = [[math.prod(shape[axis + 1 :]) for axis in range(len(shape))] for shape, _ in meshes]
    places = [
        sum(at * step for at, step in zip(coordinate, steps, strict=True))
        for (_, coordinate), steps in zip(meshes, strides, strict=True)
    ]
    rank = max(places)
    first = [rank - place for place in places]
    world = max(start + math.prod(shape) for start, (shape, _) in zip(first, meshes, strict=True))
    init_fake_process_group(rank, world + 1)
    named = distributed_c10d._process_group_name
    found = []
    try:
        for index, (shape, _) in enumerate(meshes):
            mine, others = itertools.count(), itertools.count()

            def name(ranks: Any, *_: Any, **__: Any) -> str:
                if rank in ranks:
                    return group_name(index, next(mine))  # noqa: B023
                return f"{group_name(index, 0)}_other_{next(others)}"  # noqa: B023

            setattr(distributed_c10d, "_process_group_name", name)  # noqa: B010
            ranks = torch.arange(first[index], first[index] + math.prod(shape)).reshape(shape)
            mesh = DeviceMesh(device, ranks)
            have = [mesh.get_group(axis).group_name for axis in range(len(shape))]
            if have != [group_name(index, axis) for axis in range(len(shape))]:
                raise Unsupported(f"a mesh's process groups are called {', '.join(have)} here")
            found.append(mesh)
    finally:
        distributed_c10d._process_group_name = named
    return found
