"""Replace parts of torch.distributed inside a block, for a process that is the only rank of a simulated job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ...errors import Unsupported
from ..patching import patched


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
    """DistributedDataParallel leaves gradients as they are: its reducer needs the result of an all-reduce, which a fake
    group does not give. The script's own communication hooks change no graph, and are not used."""
    ddp: Any = DistributedDataParallel
    construct, register = ddp.__init__, ddp.register_comm_hook

    def init(self: Any, *args: Any, **given: Any) -> None:
        construct(self, *args, **given)
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
