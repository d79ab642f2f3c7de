"""The tuning jobs of examples/ that need a GPU run through a whole service, each with a budget of seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
JOBS = ["tune/attention", "tune/gpt2", "tune/llama-7b", "tune/resnet50"]
JOBS += ["kernels/pointwise", "kernels/reduction", "kernels/softmax"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateService]:
    with PrivateService(tmp_path_factory.mktemp("s")) as running:
        yield running


@pytest.mark.parametrize("name", JOBS)
def test_an_examples_job_is_searched(name: str, service: PrivateService, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    lines = (EXAMPLES / f"{name}.yaml").read_text().splitlines()
    file.write_text("\n".join(["budget: {seconds: 45}", *(x for x in lines if not x.startswith("budget:"))]))
    done = subprocess.run(
        [sys.executable, "-m", "torchrelay.clients.cli", "tune", str(file), "--json"],
        env=FreshMachine(tmp_path / "machine").environment(**service.environment),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr + service.log_tail()
    states = [item["state"] for item in json.loads(done.stdout)["progress"]]
    assert "done" in states and set(states) <= {"done", "known", "skipped"}, states
