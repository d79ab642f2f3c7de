"""Two ranks on two GPUs start without tracing, each from its own records."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from program_job import Job
from torchrelay.examples.harness.private_service import PrivateService

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")

CASES = ("plain", "ddp_compiled", "compiled_in_ddp", "fsdp")


def test_the_next_start_traces_nothing_on_either_gpu_and_computes_the_same(tmp_path: Path) -> None:
    with PrivateService(tmp_path / "service") as service:
        job = Job(service, tmp_path / "job")
        first, second = (job.start(*CASES, GPUS="yes") for _ in range(2))

    for before, after in zip(first, second, strict=True):
        for case in CASES:
            assert before[case]["traced"]
            assert (after[case]["traced"], after[case]["reasons"]) == (False, []), (case, before[case])
            assert after[case]["programs"] > 0
            assert after[case]["losses"] == before[case]["losses"]
