"""Two ranks on two GPUs: one loads what the other caused, and both train as compiled locally."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = Path(__file__).resolve().parents[2] / "e2e" / "parts" / "ranks.py"

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")


def test_one_rank_loads_what_the_other_caused(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    with PrivateService(tmp_path / "service") as service:
        environment = {**os.environ, **service.environment, "XDG_STATE_HOME": str(folder / "state")}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*launcher, str(SCRIPT), str(folder), "CUDA"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        compiles = service.stats()["compiles"]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["keys"] == ranks[1]["keys"] != []
    assert ranks[0]["digests"] == ranks[1]["digests"]
    assert sum("shared" in rank["outcomes"] for rank in ranks) == 1
    assert compiles == len(ranks[0]["keys"])
    for rank in ranks:
        assert rank["relay"] == pytest.approx(rank["local"], rel=1e-4)
