"""One rank: CASE[,CASE...] FOLDER in, FOLDER/<rank>.json out. torchrun starts it.

Each case trains three times from the same start: through the service, compiled locally, and (rank 0's view of it) as
one process that has all ranks' batches. A loss is the mean over the ranks that had a batch.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchrelay
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from torchrelay import train

STEPS = 4
WIDTH = 16
Batches = list[list[tuple[torch.Tensor, torch.Tensor]]]


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rise, self.fall = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.fall(nn.functional.gelu(self.rise(self.norm(rows))))


class Net(nn.Module):
    def __init__(self, inner: int = 64, *, recompute: bool = False, spare: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(WIDTH, inner) for _ in range(2))
        self.spare = nn.Linear(4, 4) if spare else None
        self.recompute = recompute

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        for block in self.blocks:
            rows = checkpoint(block, rows, use_reentrant=False) if self.recompute else block(rows)
        return self.last(rows)


def batches(ranks: int, *, alike: int = 1, lengths: list[int] | None = None) -> Batches:
    """Of each rank. alike: so many ranks, tensor parallel to each other, have the same."""
    draw = torch.Generator().manual_seed(1)
    found: Batches = []
    for rank in range(ranks):
        count = STEPS if lengths is None else lengths[rank]
        if rank % alike:
            found.append(found[-1])
            continue
        found.append(
            [(torch.randn(8, 8, generator=draw), torch.randn(8, 1, generator=draw)) for _ in range(count)]
        )
    return found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def slowly(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


def zero_adam(parameters: Any) -> torch.optim.Optimizer:
    return train.zero(parameters, torch.optim.AdamW, lr=0.02)


class Case:
    """wrap: an eager model in, the distributed and compiled one out. every: micro batches for one step."""

    def __init__(
        self,
        wrap: Callable[[nn.Module, str], nn.Module],
        *,
        net: Callable[[], nn.Module] = Net,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        alike: int = 1,
        lengths: list[int] | None = None,
        every: int = 1,
        autocast: bool = False,
    ) -> None:
        self.wrap, self.net, self.optimizer = wrap, net, optimizer
        self.alike, self.lengths, self.every, self.autocast = alike, lengths, every, autocast


def ddp(**options: Any) -> Callable[[nn.Module, str], nn.Module]:
    def wrap(net: nn.Module, backend: str) -> nn.Module:
        mode = options.get("mode")
        given = {name: value for name, value in options.items() if name != "mode"}
        if given.get("hook") == "powersgd":
            given["state"] = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        return torch.compile(train.ddp(net, **given), backend=backend, mode=mode)  # type: ignore[return-value]

    return wrap


def averaged_by_hand(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def fsdp(**options: Any) -> Callable[[nn.Module, str], nn.Module]:
    def wrap(net: nn.Module, backend: str) -> nn.Module:
        for block in net.blocks:  # type: ignore[union-attr]
            fully_shard(block, **options)
            block.compile(backend=backend)
        return fully_shard(net, **options)

    return wrap


def tensor_parallel(net: nn.Module, backend: str = "") -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, {"rise": ColwiseParallel(), "fall": RowwiseParallel()})
        if backend:
            block.compile(backend=backend)
    return net


def sequence_parallel(net: nn.Module, backend: str) -> nn.Module:
    """Inside a block, rows are spread too: gathered before the first product, reduced and scattered after the last."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "rise": ColwiseParallel(input_layouts=Shard(0)),
        "fall": RowwiseParallel(output_layouts=Shard(0)),
    }
    spread = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=True
    )
    gathered = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    for block in net.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, plan)
        parallelize_module(block, mesh, spread)
        parallelize_module(block, mesh, gathered)
        block.compile(backend=backend)
    return net


def whole_and_recomputed(net: nn.Module, backend: str) -> nn.Module:
    """One graph, whose blocks are graphs inside it: tensor parallel, and checkpointed."""
    return torch.compile(tensor_parallel(net), backend=backend)  # type: ignore[return-value]


class Gathered(nn.Module):
    """Rows are spread, and gathered by a method that cannot be sent."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.mesh = net, init_device_mesh("cpu", (dist.get_world_size(),))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        spread = DTensor.from_local(rows, self.mesh, [Replicate()]).redistribute(placements=[Shard(0)])
        return self.net(spread.full_tensor())


def gathered(net: nn.Module, backend: str) -> nn.Module:
    return torch.compile(Gathered(net), backend=backend)  # type: ignore[return-value]


def two_dimensions(net: nn.Module, backend: str) -> nn.Module:
    """FSDP2 over the first dimension of the mesh, tensor parallel over the second."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    for block in net.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tensor"], {"rise": ColwiseParallel(), "fall": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
        block.compile(backend=backend)
    return fully_shard(net, mesh=mesh["data"])


def wide() -> nn.Module:
    return Net(24_000)  # blocks of 3 MB: buckets of 1 MB split the graph between them


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, Case] = {
    "ddp": Case(ddp()),
    "static": Case(ddp(static_graph=True)),
    "unused": Case(ddp(find_unused_parameters=True), net=lambda: Net(spare=True)),
    "split": Case(ddp(bucket_cap_mb=1), net=wide, optimizer=slowly),
    "fp16": Case(ddp(hook="fp16")),
    "bf16": Case(ddp(hook="bf16")),
    "powersgd": Case(ddp(hook="powersgd")),
    "own": Case(ddp(hook=averaged_by_hand)),
    "zero": Case(ddp(), optimizer=zero_adam),
    "join": Case(ddp(), lengths=[2, STEPS]),
    "join_zero": Case(ddp(), optimizer=zero_adam, lengths=[STEPS, 2]),
    "accumulate": Case(ddp(), every=2),
    "reduce_overhead": Case(ddp(mode="reduce-overhead")),
    "checkpoint": Case(ddp(), net=lambda: Net(recompute=True)),
    "autocast": Case(ddp(), autocast=True),
    "fsdp": Case(fsdp()),
    "fsdp_half": Case(fsdp(mp_policy=HALF)),
    "fsdp_accumulate": Case(fsdp(), every=2),
    "tensor": Case(tensor_parallel, alike=2),
    "sequence": Case(sequence_parallel, alike=2),
    "recompute": Case(whole_and_recomputed, net=lambda: Net(recompute=True), alike=2),
    "gathered": Case(gathered, alike=2),
    "two": Case(two_dimensions, alike=2),
}


def run(case: Case, backend: str, mine: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """This rank's losses."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = case.wrap(case.net(), backend)
    optimizer = case.optimizer(model.parameters())
    losses = []
    with train.join(model, optimizer) if case.lengths else nullcontext():
        for step, (rows, wanted) in enumerate(mine):
            last = (step + 1) % case.every == 0
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.autocast), _synced(model, last):
                loss = nn.functional.mse_loss(model(rows), wanted)
                (loss / case.every).backward()
            losses.append(loss.item())
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return losses


def _synced(model: nn.Module, last: bool) -> Any:
    inner = getattr(model, "_orig_mod", model)
    if hasattr(inner, "set_requires_gradient_sync"):
        inner.set_requires_gradient_sync(last)
    elif not last:
        return inner.no_sync()
    return nullcontext()


def alone(case: Case, everybody: Batches) -> list[float]:
    """One process with all batches: the mean loss of each step, over the ranks that have a batch then."""
    torch.manual_seed(0)
    net = case.net()
    factory = case.optimizer
    optimizer = (
        torch.optim.AdamW(net.parameters(), lr=0.02) if factory is zero_adam else factory(net.parameters())
    )
    shares = everybody[:: case.alike]
    losses = []
    for step in range(max(map(len, shares))):
        given = [share[step] for share in shares if step < len(share)]
        found = [nn.functional.mse_loss(net(rows), wanted) for rows, wanted in given]
        (torch.stack(found).sum() / len(shares) / case.every).backward()
        losses.append(torch.stack(found).mean().item())
        if (step + 1) % case.every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def together(losses: list[float]) -> list[float]:
    """All ranks' losses, averaged step by step over those that have one."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, losses)
    return list(_means(everybody))


def _means(everybody: list[list[float]]) -> Iterator[float]:
    for step in range(max(map(len, everybody))):
        had = [losses[step] for losses in everybody if step < len(losses)]
        yield sum(had) / len(had)


def main() -> None:
    names, folder = sys.argv[1].split(","), Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    told = {}
    for name in names:
        case = CASES[name]
        everybody = batches(ranks, alike=case.alike, lengths=case.lengths)
        before = len(torchrelay.report().graphs)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", torchrelay.FallbackWarning)
            relay = together(run(case, "torchrelay", everybody[rank]))
        graphs = torchrelay.report().graphs[before:]
        told[name] = {
            "relay": relay,
            "local": together(run(case, "inductor", everybody[rank])),
            "alone": alone(case, everybody),
            "warned": " ".join(
                str(each.message) for each in warned if each.category is torchrelay.FallbackWarning
            ),
            "keys": [graph.key for graph in graphs],
            "outcomes": [graph.outcome + graph.reason for graph in graphs],
        }
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
