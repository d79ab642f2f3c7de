"""Ranks on all GPUs of this machine through nccl, beside compile slots that keep theirs. Needs CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
from waiting import wait_until

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from torchrelay.compiler.api.training.events import RankStarted  # noqa: E402
from torchrelay.compiler.errors import NoWorker  # noqa: E402
from torchrelay.workers.pool import PoolSettings, WorkerPool  # noqa: E402
from train_engine_parts import RAY_TOKEN, Site  # noqa: E402

MEET = """
    import os, signal
    import torch, torch.distributed as dist
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    total = torch.tensor(float(dist.get_rank() + 1), device="cuda")
    dist.all_reduce(total)
    name = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    print(f"sum {total.item():g} sees {torch.cuda.device_count()} has {name}", flush=True)
    signal.pause()
"""


def test_ranks_have_a_gpu_each_while_slots_keep_theirs_and_nothing_is_searched_there(tmp_path: Path) -> None:
    gpus = torch.cuda.device_count()
    site = Site(tmp_path)
    site.pool = WorkerPool(PoolSettings(cpu_slots=0, gpu_slots_per_gpu=1, ray_token=RAY_TOKEN))
    try:
        site.call(site.pool.start())
        workers = site.pool.workers
        wait_until(lambda: [worker.state for worker in workers()].count("idle") >= gpus, 300, told=workers)
        slots = list(site.pool.slots.all.values())
        assert len({slot.ready.device for slot in slots}) == gpus
        first = slots[0].ready
        assert len(site.pool.search_devices(first.toolchain, first.target)) == gpus

        job = site.begin(MEET, workers=gpus, device="cuda", cpus=1.0)
        job.started(ranks=gpus)
        job.until(lambda job: len(job.lines()) == gpus)
        lines = [line.split() for line in job.lines()]
        assert {(line[1], line[3]) for line in lines} == {(f"{gpus * (gpus + 1) // 2}", str(gpus))}
        assert len({line[5] for line in lines}) == gpus
        assert len(job.of(RankStarted)) == gpus
        wait_until(lambda: site.pool.slots.rank_devices, 60)
        with pytest.raises(NoWorker, match="training jobs hold all devices"):
            site.pool.search_devices(first.toolchain, first.target)
        assert [worker.state for worker in site.pool.workers()] == ["idle"] * gpus
        site.call(site.pool.training.cancel(job.order.job))
        assert job.end(60).state == "cancelled"
        job.forget()
    finally:
        site.call(site.pool.close())
        site.loop.call_soon_threadsafe(site.loop.stop)
