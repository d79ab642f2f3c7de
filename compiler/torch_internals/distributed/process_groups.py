"""This process's groups: a trace may take ranks and names from them, on which Dynamo has no guards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


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


def trace_together() -> bool:
    """Whether ranks compare sizes while they trace (torch._dynamo.distributed.get_compile_pg): those that trace wait
    for one that does not."""
    together: bool = torch._dynamo.config.enable_compiler_collectives
    return together and dist.is_available() and dist.is_initialized()
