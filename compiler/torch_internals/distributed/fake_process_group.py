"""PyTorch's fake process groups, and what they need replaced: one process takes the place of a rank among many."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ...errors import Unsupported
from .. import compatibility
from ..patching import patched


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
    found = []
    for index, (shape, _) in enumerate(meshes):
        mine, others = itertools.count(), itertools.count()

        def name(ranks: Any, *_: Any, **__: Any) -> str:
            if rank in ranks:
                return group_name(index, next(mine))  # noqa: B023
            return f"{group_name(index, 0)}_other_{next(others)}"  # noqa: B023

        ranks = torch.arange(first[index], first[index] + math.prod(shape)).reshape(shape)
        with patched(distributed_c10d, "_process_group_name", name):
            mesh = DeviceMesh(device, ranks)
        have = [mesh.get_group(axis).group_name for axis in range(len(shape))]
        if have != [group_name(index, axis) for axis in range(len(shape))]:
            raise Unsupported(f"a mesh's process groups are called {', '.join(have)} here")
        found.append(mesh)
    return found


@contextmanager
def replaced_in_torch_distributed(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Replace torch.distributed's function of the same name, and give the original. Scripts see the replacement;
    PyTorch's modules, which import the function from elsewhere, do not."""
    name = function.__name__
    original = getattr(dist, name)
    with patched(dist, name, function):
        yield original


@contextmanager
def replaced_everywhere(original: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function in each module of torch.distributed that has it: they import it from each other by name."""
    name = original.__name__
    with ExitStack() as stack:
        for path, module in list(sys.modules.items()):
            if path.startswith("torch.distributed") and vars(module).get(name) is original:
                stack.enter_context(patched(module, name, replacement))
        yield


@contextmanager
def ddp_without_reduction() -> Iterator[None]:
    """DistributedDataParallel leaves gradients as they are: a fake group gives its reducer no result. The script's own
    communication hooks change no graph, and are not used."""
    ddp: Any = DistributedDataParallel
    construct, register = ddp.__init__, ddp.register_comm_hook

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        register(self, None, _unreduced)

    def ignored(self: Any, *_: Any, **__: Any) -> None: ...

    with (
        patched(ddp, "__init__", init),
        patched(ddp, "register_comm_hook", ignored),
        patched(ddp, "_register_builtin_comm_hook", ignored),
    ):
        yield


def _unreduced(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and takes no texts
    done: Future[Any] = Future()
    done.set_result(bucket.buffer())
    return done


@contextmanager
def refusing_rpc() -> Iterator[None]:
    """torch.distributed.rpc.init_rpc raises Unsupported: it would wait for the other ranks."""
    try:
        from torch.distributed import rpc
    except ImportError:
        yield
        return

    def init_rpc(*_: Any, **__: Any) -> None:
        raise Unsupported("RPC cannot be simulated", hint="Set `capture: false`")

    with patched(rpc, "init_rpc", init_rpc):
        yield
