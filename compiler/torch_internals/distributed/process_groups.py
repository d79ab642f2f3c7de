"""This process's groups, and the store that its job shares. A trace may take ranks and names from groups, on which
Dynamo has no guards."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import compatibility


def described() -> list[Any]:
    """This process's rank; then name, back end, tag and ranks of each of its groups, in the order in which they were
    made (torch.distributed.distributed_c10d._world). [] without a process group."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    from torch.distributed import distributed_c10d as c10d

    world: Any = c10d._world
    return [
        dist.get_rank(),
        *(
            [
                group.group_name,
                str(dist.get_backend(group)),
                world.pg_to_tag.get(group, ""),
                dist.get_process_group_ranks(group),
            ]
            for group in list(world.pg_map)
        ),
    ]


def has_peers() -> bool:
    """Whether this process is one of several in a process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def trace_together() -> bool:
    """Whether ranks compare sizes while they trace (torch._dynamo.distributed.get_compile_pg): those that trace wait
    for one that does not."""
    together: bool = torch._dynamo.config.enable_compiler_collectives
    return together and dist.is_available() and dist.is_initialized()


def job_store(endpoint: tuple[str, int] | None, timeout: timedelta) -> Any:
    """The c10d store that the processes of this job share; None where there is none (yet).

    A connection of our own to the store at `endpoint`, else to the one behind the default process group
    (torch.distributed.distributed_c10d._get_default_store): waiting on it holds up nobody's collectives. Of a group
    whose store is not TCP, that store itself. Raises RuntimeError where it does not answer, Unsupported
    with a torch that has no such store (compatibility.py).
    """
    if not dist.is_available():
        return None
    compatibility.check("distributed")
    from torch._C import _distributed_c10d as c10d

    if endpoint is None:
        if not dist.is_initialized():
            return None
        from torch.distributed.distributed_c10d import _get_default_store

        store: Any = _get_default_store()
        while isinstance(store, c10d.PrefixStore):
            store = store.underlying_store
        if not isinstance(store, c10d.TCPStore):
            return store
        endpoint = store.host, store.port
    return c10d.TCPStore(*endpoint, None, False, timeout, wait_for_workers=False)
