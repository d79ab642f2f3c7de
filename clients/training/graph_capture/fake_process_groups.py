"""A world of many ranks, of which only this process is there: what a script builds for N ranks, it builds here alone.

Process groups are PyTorch's fake ones: shapes, meshes, buckets and shards are those of the real job, and so are the
graphs; what other ranks would have sent is made up. Nothing here says whether numbers are right.
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
    told: dict[Any, str] = {}

    def init_process_group(backend: Any = None, *_: Any, **given: Any) -> None:
        size, mine = given.get("world_size", -1), given.get("rank", -1)
        with ExitStack() as real:
            real.enter_context(_in_place_of(init_process_group, start))
            fake_process_group.init_fake_process_group(
                rank if mine < 0 else mine, world_size if size < 0 else size
            )
        told[None] = told[dist.group.WORLD] = _name(backend)

    def new_group(ranks: Any = None, *_: Any, **given: Any) -> Any:
        kept = {name: given[name] for name in ("group_desc", "use_local_synchronization") if name in given}
        made = group(ranks, **kept)
        told[made] = _name(given["backend"]) if given.get("backend") else told.get(None, "")
        return made

    def get_backend(of: Any = None) -> str:
        return told.get(of) or asked(of)

    with ExitStack() as stack:
        stack.enter_context(_in_place_of(start, init_process_group))
        stack.enter_context(_in_place_of(group, new_group))
        stack.enter_context(_in_place_of(barrier, lambda *_, **__: None))
        asked = stack.enter_context(_seen_by_script(get_backend))
        stack.enter_context(_lone_ddp())
        stack.enter_context(_no_rpc())
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _name(backend: Any) -> str:
    """As `get_backend` tells it; '' of one that this torch has not."""
    name = dist.Backend.UNDEFINED if backend is None else dist.Backend(backend)
    known = name == dist.Backend.UNDEFINED or ":" in name or dist.is_backend_available(name)
    return name if known else ""


@contextmanager
def _seen_by_script(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """In torch.distributed alone, for scripts that choose a device by it: what PyTorch's modules ask each other stays
    true. What was there before is given."""
    before = getattr(dist, function.__name__)
    setattr(dist, function.__name__, function)
    try:
        yield before
    finally:
        setattr(dist, function.__name__, before)


@contextmanager
def _in_place_of(original: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Wherever torch.distributed's modules hold it: they import it from each other by name."""
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
def _lone_ddp() -> Iterator[None]:
    """DDP's reducer wants a result of its all-reduce, which a fake group has not: gradients stay as they are. The
    script's own hooks change no graph, and are not used."""
    ddp: Any = DistributedDataParallel
    before = ddp.__init__, ddp.register_comm_hook, ddp._register_builtin_comm_hook

    def init(self: Any, *args: Any, **given: Any) -> None:
        before[0](self, *args, **given)
        before[1](self, None, _as_it_is)

    ddp.__init__ = init
    ddp.register_comm_hook = ddp._register_builtin_comm_hook = lambda self, *_, **__: None
    try:
        yield
    finally:
        ddp.__init__, ddp.register_comm_hook, ddp._register_builtin_comm_hook = before


def _as_it_is(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and takes no texts
    done: Future[Any] = Future()
    done.set_result(bucket.buffer())
    return done


@contextmanager
def _no_rpc() -> Iterator[None]:
    """RPC needs the others: better no capture than one that waits for them."""
    try:
        from torch.distributed import rpc
    except ImportError:
        yield
        return

    def init_rpc(*_: Any, **__: Any) -> None:
        raise Unsupported("RPC cannot be pretended", hint="Set `capture: false`")

    before = rpc.init_rpc
    rpc.init_rpc = init_rpc
    try:
        yield
    finally:
        rpc.init_rpc = before
