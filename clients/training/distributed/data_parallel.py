"""Data parallelism by PyTorch's own classes, with a name for what takes several lines there.

    model = train.ddp(model, hook="bf16")
    optimizer = train.zero(model.parameters(), torch.optim.AdamW, lr=3e-4)
    with train.join(model, optimizer):
        for batch in my_own_share: ...

Each returns what PyTorch's own call would, and works without a process group too: then nothing is distributed. FSDP2
(`fully_shard`), tensor parallelism and meshes need no helper: torch's own calls are short.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ....compiler.torch_internals.dynamo import backend_interface

Hook = Callable[[Any, Any], Any]
"""(state, dist.GradBucket) -> torch.futures.Future of the bucket's reduced tensor: DDP's communication hooks."""

HOOKS = ("fp16", "bf16", "powersgd")


def ddp(model: nn.Module, *, hook: str | Hook | None = None, state: Any = None, **options: Any) -> nn.Module:
    """DistributedDataParallel over `model`, which is on its device; without a process group, `model` itself.

    hook: how gradients are reduced. "fp16", "bf16": halved on the wire (averaged in that precision). "powersgd": by
    matrices of low rank (Vogels et al. 2019, arXiv:1905.13727); `state` is its PowerSGDState, by default of rank 1,
    which compresses from step 1000 on. Or a communication hook of yours, called with `state` (None: the process
    group). options: DistributedDataParallel's own. Raises ValueError for another name.
    """
    if isinstance(hook, str) and hook not in HOOKS:
        raise ValueError(
            f"no communication hook {hook!r}; there are {', '.join(HOOKS)}, or a function of yours"
        )
    if not _in_group():
        return model
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        options.setdefault("device_ids", [device.index])
    wrapped = DistributedDataParallel(model, **options)
    if hook is not None:
        chosen, of = (
            _named(hook, state, wrapped.process_group, device) if isinstance(hook, str) else (hook, state)
        )
        wrapped.register_comm_hook(wrapped.process_group if of is None else of, chosen)
    return wrapped


def _named(hook: str, state: Any, group: Any, device: torch.device) -> tuple[Hook, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "powersgd":
        return powerSGD_hook.powerSGD_hook, state or powerSGD_hook.PowerSGDState(group)
    if hook == "fp16":
        return default_hooks.fp16_compress_hook, state
    if device.type == "cuda":
        return default_hooks.bf16_compress_hook, state
    # DDP refuses the hook itself, by its name, where there is no NCCL; gloo adds bfloat16 as well.
    return lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket), state


def zero(
    parameters: Iterable[Any], optimizer: type[torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """`optimizer(parameters, **options)` whose state is spread over the ranks (ZeroRedundancyOptimizer); without a
    process group, that optimizer itself. Wants DDP's gradients, and dense parameters of which each rank has all."""
    if not _in_group():
        return optimizer(parameters, **options)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(list(parameters), optimizer, **options)


@contextlib.contextmanager
def join(*parts: Any, by_initial_ranks: bool = True) -> Iterator[None]:
    """A block in which ranks may have different numbers of batches: those that have ended shadow the collectives of
    the others (torch.distributed.algorithms.join.Join).

    parts: the DDP model (compiled or not) first, then the optimizer if it is of `zero`. by_initial_ranks: gradients
    are averaged over all ranks to the end, as if who has ended had none; else over those that still train. With
    `zero`, each batch must be followed by a step. Without a process group, it does nothing.
    """
    from torch.distributed.algorithms.join import Join, Joinable
    from torch.distributed.optim import ZeroRedundancyOptimizer

    joined: list[Any] = []
    with contextlib.ExitStack() as stack:
        for part in (backend_interface.uncompiled(part) for part in parts):
            if isinstance(part, ZeroRedundancyOptimizer):
                joined.append(stack.enter_context(_gradients_for_all(part)))
            if isinstance(part, Joinable):
                joined.append(part)
        if joined:
            stack.enter_context(Join(joined, divide_by_initial_world_size=by_initial_ranks))
        yield


@contextlib.contextmanager
def _gradients_for_all(optimizer: Any) -> Iterator[Any]:
    """Makes Join correct for ZeRO. A rank that has ended still updates its share of the parameters, and needs their
    gradients, but DDP discards the result of the all-reduce there (ZeroRedundancyOptimizer.join_hook: "Gradients must
    be properly set before this hook is called"). Before each step, a rank that still trains broadcasts them."""
    from torch.distributed.algorithms.join import Joinable, JoinHook

    class Ended(JoinHook):
        def main_hook(self) -> None:
            told.ended = True

    class Told(Joinable):
        def __init__(self) -> None:
            super().__init__()
            self.ended = False

        def join_hook(self, **options: Any) -> JoinHook:
            return Ended()

        @property
        def join_device(self) -> torch.device:
            return torch.device(optimizer.join_device)

        @property
        def join_process_group(self) -> Any:
            return optimizer.process_group

    told = Told()
    hook = optimizer.register_step_pre_hook(lambda *_: _share_gradients(optimizer, told.ended))
    try:
        yield told
    finally:
        hook.remove()


def _share_gradients(optimizer: Any, ended: bool) -> None:
    group, rank = optimizer.process_group, dist.get_rank()
    # The lowest rank that still trains, and whether all ranks do.
    found = torch.tensor(
        [dist.get_world_size() if ended else rank, int(not ended)], device=optimizer.join_device
    )
    dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
    source, all_train = (int(value) for value in found)
    if all_train:
        return
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=found.device)
    dist.broadcast(has, source, group=group)
    for parameter, present in zip(parameters, has.tolist(), strict=True):
        if not present:
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        dist.broadcast(parameter.grad, source, group=group)


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized()
