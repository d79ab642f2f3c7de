"""Ranks profiled on GPUs: kernels with their launches, Tensor Cores, memory, NCCL beside computation, NVTX."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torchrelay.clients.reports.profiling import kineto_trace
from torchrelay.clients.reports.profiling.advice import advice
from torchrelay.clients.reports.profiling.summary import ProfileSummary
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training import jobs as records
from torchrelay.compiler.api.training import rank_environment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
how, compiled = sys.argv[1:3]
several = dist.is_torchelastic_launched() or int(__import__("os").environ["WORLD_SIZE"]) > 1
if several: dist.init_process_group("nccl")
rank = dist.get_rank() if several else 0
torch.cuda.set_device(rank)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2048, 4096), nn.GELU(), nn.Linear(4096, 2048)).cuda()
net = nn.parallel.DistributedDataParallel(model, device_ids=[rank]) if several else model
if compiled != "no": net = torch.compile(net, mode=compiled)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x = torch.randn(1024, 2048, device="cuda")
for step in range(9):
    with torch.autocast("cuda", torch.bfloat16, enabled=how == "bf16"):
        loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if several: dist.destroy_process_group()
"""
PARAMETERS = 4 * (2048 * 4096 * 2 + 4096 + 2048)


def profiled(folder: Path, *arguments: str, ranks: int = 1, nvtx: bool = False) -> list[ProfileSummary]:
    (folder / "train.py").write_text(SCRIPT)
    profile = records.ProfileSpec(first=3, last=6, ranks=list(range(ranks)), nvtx=nvtx)
    spec = records.TrainSpec(name="p", script="train.py", device="cuda", compile="off", profile=profile)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "torchrelay.clients.training.rank.main", "--", "train.py", *arguments],
            cwd=folder,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                rank_environment.SPEC_ENVIRONMENT: msgspec.json.encode(spec).decode(),
            },
        )
        for rank in range(ranks)
    ]
    try:
        assert [rank.wait(400) for rank in started] == [0] * ranks
    finally:
        for process in started:
            process.kill()
    files = sorted((folder / "profile").glob("*.summary.json"))
    return [decoding.from_json(file.read_bytes(), type=ProfileSummary) for file in files]


def test_kernels_tell_their_launches_and_products_run_on_tensor_cores(tmp_path: Path) -> None:
    (found,) = profiled(tmp_path, "bf16", "no", nvtx=True)
    assert found.device == "cuda"
    assert found.device_name == torch.cuda.get_device_name(0)
    assert [step.number for step in found.steps] == [3, 4, 5]
    assert found.product_time > 0
    assert found.tensor_yes >= 0.9 * found.product_time, [
        k.name for k in found.kernels if k.tensor_cores != "yes"
    ]
    assert "tensor_cores" not in {each.rule for each in advice([found])}
    most = found.kernels[0]
    assert len(most.grid) == len(most.block) == 3 and most.registers > 0 and most.op
    events = kineto_trace.read_trace(tmp_path / "profile" / "rank-0.trace.json.gz").events
    assert [event for event in events if event.cat == "fwdbwd" and event.ph == "f"]
    memory = next(each for each in found.memory if each.device == "cuda:0")
    assert memory.limit == torch.cuda.get_device_properties(0).total_memory
    assert memory.points[-1].bytes[0] == PARAMETERS
    assert memory.points[-1].bytes[1] >= 2 * PARAMETERS
    assert max(point.bytes[3] for point in memory.points) >= 2 * 1024 * 4096, "bfloat16 activations"


def test_products_in_float32_are_told_to_use_no_tensor_cores(tmp_path: Path) -> None:
    (found,) = profiled(tmp_path, "fp32", "no")
    said = {each.rule: each for each in advice([found])}
    assert said["tensor_cores"].number < 0.05, [(k.name, k.how) for k in found.kernels]


def test_triton_kernels_are_known_by_what_they_were_compiled_to(tmp_path: Path) -> None:
    (found,) = profiled(tmp_path, "bf16", "max-autotune-no-cudagraphs")
    triton = [kernel for kernel in found.kernels if kernel.name.startswith("triton_")]
    assert triton
    assert all(kernel.tensor_cores != "unknown" for kernel in triton), [(k.name, k.how) for k in triton]
    for kernel in triton:
        assert (kernel.tensor_cores == "yes") == ("tem_fused" in kernel.name), (kernel.name, kernel.how)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_two_ranks_communicate_beside_their_computation(tmp_path: Path) -> None:
    found = profiled(tmp_path, "bf16", "default", ranks=2)
    assert [each.rank for each in found] == [0, 1]
    for each in found:
        assert any(collective.name.startswith("nccl") for collective in each.collectives)
        assert each.total("communication") > 0
        assert each.total("exposed") <= each.total("communication")
        moved = each.overlap + each.total("exposed")
        assert moved == pytest.approx(each.total("communication"), rel=0.05)
