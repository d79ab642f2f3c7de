"""Simulates a job of many ranks in one process, with PyTorch's fake process groups.

Shapes, meshes, buckets and shards are those of the real job, and so are the graphs. Data from other ranks is invented,
so numbers mean nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from ....compiler.torch_internals.distributed import fake_process_group


@contextmanager
def fake_process_groups(rank: int, world_size: int) -> Iterator[None]:
    """Inside, `init_process_group` of any back end makes this process `rank` of `world_size`, without the others."""
    if not dist.is_available():
        yield
        return
    start, group, barrier = dist.init_process_group, dist.new_group, dist.monitored_barrier
    backends: dict[Any, str] = {}

    def init_process_group(backend: Any = None, *_: Any, **options: Any) -> None:
        size, mine = options.get("world_size", -1), options.get("rank", -1)
        with ExitStack() as real:
            real.enter_context(fake_process_group.replaced_everywhere(init_process_group, start))
            fake_process_group.init_fake_process_group(
                rank if mine < 0 else mine, world_size if size < 0 else size
            )
        backends[None] = backends[dist.group.WORLD] = _name(backend)

    def new_group(ranks: Any = None, *_: Any, **options: Any) -> Any:
        kept = {
            name: options[name] for name in ("group_desc", "use_local_synchronization") if name in options
        }
        made = group(ranks, **kept)
        backends[made] = _name(options["backend"]) if options.get("backend") else backends.get(None, "")
        return made

    def get_backend(of: Any = None) -> str:
        return backends.get(of) or asked(of)

    with ExitStack() as stack:
        stack.enter_context(fake_process_group.replaced_everywhere(start, init_process_group))
        stack.enter_context(fake_process_group.replaced_everywhere(group, new_group))
        stack.enter_context(fake_process_group.replaced_everywhere(barrier, lambda *_, **__: None))
        asked = stack.enter_context(fake_process_group.replaced_in_torch_distributed(get_backend))
        stack.enter_context(fake_process_group.ddp_without_reduction())
        stack.enter_context(fake_process_group.refusing_rpc())
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _name(backend: Any) -> str:
    """The name that `get_backend` returns; '' for one that this torch does not have."""
    name = dist.Backend.UNDEFINED if backend is None else dist.Backend(backend)
    known = name == dist.Backend.UNDEFINED or ":" in name or dist.is_backend_available(name)
    return name if known else ""
