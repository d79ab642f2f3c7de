"""Simulates a job of many ranks in one process, with PyTorch's fake process groups.

Shapes, meshes, buckets and shards are those of the real job, and so are the graphs. Data from other ranks is invented,
so numbers mean nothing here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ....compiler.errors import Unsupported
from ....compiler.torch_internals.distributed import fake_process_group


@contextmanager
def fake_process_groups(rank: int, world_size: int) -> Iterator[None]:
    """Inside, `init_process_group` of any back end makes this process `rank` of `world_size`, without the others."""
    if not dist.is_available():
        yield
        return
    start, group, barrier = dist.init_process_group, dist.new_group, dist.monitored_barrier
    backends: dict[Any, str] = {}

    def init_process_group(backend: Any = None, *_: Any, **given: Any) -> None:
        size, mine = given.get("world_size", -1), given.get("rank", -1)
        with ExitStack() as real:
            real.enter_context(_replaced(init_process_group, start))
            fake_process_group.init_fake_process_group(
                rank if mine < 0 else mine, world_size if size < 0 else size
            )
        backends[None] = backends[dist.group.WORLD] = _name(backend)

    def new_group(ranks: Any = None, *_: Any, **given: Any) -> Any:
        kept = {name: given[name] for name in ("group_desc", "use_local_synchronization") if name in given}
        made = group(ranks, **kept)
        backends[made] = _name(given["backend"]) if given.get("backend") else backends.get(None, "")
        return made

    def get_backend(of: Any = None) -> str:
        return backends.get(of) or asked(of)

    with ExitStack() as stack:
        stack.enter_context(_replaced(start, init_process_group))
        stack.enter_context(_replaced(group, new_group))
        stack.enter_context(_replaced(barrier, lambda *_, **__: None))
        asked = stack.enter_context(_seen_by_script(get_backend))
        stack.enter_context(_ddp_without_reduction())
        stack.enter_context(_no_rpc())
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _name(backend: Any) -> str:
    """As `get_backend` returns it; '' for one that this torch does not have."""
    name = dist.Backend.UNDEFINED if backend is None else dist.Backend(backend)
    known = name == dist.Backend.UNDEFINED or ":" in name or dist.is_backend_available(name)
    return name if known else ""


@contextmanager
def _seen_by_script(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Replace a function of torch.distributed for scripts that choose a device by it; PyTorch's own modules use the
    original, which is yielded."""
    before = getattr(dist, function.__name__)
    setattr(dist, function.__name__, function)
    try:
        yield before
    finally:
        setattr(dist, function.__name__, before)


@contextmanager
def _replaced(original: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function in all modules of torch.distributed: they import it from each other by name."""
    name = original.__name__
    modules = [
        module
        for path, module in list(sys.modules.items())
        if path.startswith("torch.distributed") and vars(module).get(name) is original
    ]
    for module in modules:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, name, original)


@contextmanager
def _ddp_without_reduction() -> Iterator[None]:
    """DDP's reducer needs a result of its all-reduce, which a fake group does not have: gradients stay unchanged. The
    script's own hooks change no graph, and are not used."""
    ddp: Any = DistributedDataParallel
    before = ddp.__init__, ddp.register_comm_hook, ddp._register_builtin_comm_hook

    def init(self: Any, *args: Any, **given: Any) -> None:
        before[0](self, *args, **given)
        before[1](self, None, _unreduced)

    ddp.__init__ = init
    ddp.register_comm_hook = ddp._register_builtin_comm_hook = lambda self, *_, **__: None
    try:
        yield
    finally:
        ddp.__init__, ddp.register_comm_hook, ddp._register_builtin_comm_hook = before


def _unreduced(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and takes no texts
    done: Future[Any] = Future()
    done.set_result(bucket.buffer())
    return done


@contextmanager
def _no_rpc() -> Iterator[None]:
    """RPC needs the other ranks: refuse the capture instead of waiting for them."""
    try:
        from torch.distributed import rpc
    except ImportError:
        yield
        return

    def init_rpc(*_: Any, **__: Any) -> None:
        raise Unsupported("RPC cannot be simulated", hint="Set `capture: false`")

    before = rpc.init_rpc
    rpc.init_rpc = init_rpc
    try:
        yield
    finally:
        rpc.init_rpc = before
