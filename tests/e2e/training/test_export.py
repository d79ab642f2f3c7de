"""`torchrelay export` through a real service: compiled on a worker from a user's code, fetched and loaded here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import exporting
import pytest
import torch
from torchrelay.compiler.torch_internals.inductor import aot_inductor
from torchrelay.examples.harness.private_service import PrivateService

TRAINING = Path(__file__).parents[2] / "train" / "parts"

SCRIPT = """\
import torch
from exporting import Net
from torchrelay import train

torch.manual_seed(3)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with train.Checkpoints() as checkpoints:
    for step in range(1, 4):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        checkpoints.save(step, model, optimizer, wait=True)
torch.save(model.state_dict(), "WEIGHTS")
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A working directory with the user's code."""
    shutil.copy(TRAINING / "exporting.py", tmp_path)
    return tmp_path


def relay(
    service: PrivateService, folder: Path, *arguments: str, status: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "torchrelay.clients.cli", *arguments],
        env={**os.environ, **service.environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr + service.log_tail()
    return done


def jobs(service: PrivateService, folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(relay(service, folder, "train", "ls", "--json").stdout)
    return found


def test_a_worker_compiles_it_and_its_files_are_the_jobs(service: PrivateService, work: Path) -> None:
    torch.manual_seed(5)
    model = exporting.Net().eval()
    torch.save(model.state_dict(), work / "weights.pt")
    flags = ["--checkpoint", "weights.pt", "--dynamic", "batch=1:64", "--format", "both", "--json"]
    told = json.loads(relay(service, work, "export", "exporting:net", *flags).stdout)
    assert told["weights"] == "weights.pt" and told["sizes"] == {"batch": [1, 64]}
    rows = torch.randn(3, 8)
    with torch.no_grad():
        package = aot_inductor.load_package(work / "exported" / "model-cpu.pt2")(rows)
        script = torch.jit.load(work / "exported" / "model-cpu.torchscript.pt")(rows)
        torch.testing.assert_close(package, model(rows), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(script, model(rows))
    (job,) = (job for job in jobs(service, work) if job["spec"]["name"] == "export exporting:net")
    assert (job["spec"]["kind"], job["state"]) == ("export", "done")
    listed = json.loads(relay(service, work, "train", "files", job["id"], "--json").stdout)
    assert {file["name"] for file in listed} == {path.name for path in (work / "exported").iterdir()}


@pytest.mark.slow
def test_nothing_is_handed_out_of_an_export_that_fails(service: PrivateService, work: Path) -> None:
    flags = ["--format", "torchscript", "--dynamic", "batch=1:64"]
    done = relay(service, work, "export", "exporting:baked", *flags, status=1)
    assert "traced" in done.stderr and "differs from eager" in done.stderr
    assert not (work / "exported").exists()
    (job,) = (job for job in jobs(service, work) if job["spec"]["name"] == "export exporting:baked")
    assert job["state"] == "failed" and "differs from eager" in job["detail"]
    assert json.loads(relay(service, work, "train", "files", job["id"], "--json").stdout) == []
    done = relay(service, work, "export", "exporting:net", "--checkpoint", "nowhere.pt", status=1)
    assert "neither in" in done.stderr


@pytest.mark.slow
def test_the_weights_are_those_of_a_training_jobs_last_checkpoint(
    service: PrivateService, work: Path
) -> None:
    (work / "job.py").write_text(SCRIPT.replace("WEIGHTS", str(work / "trained.pt")))
    relay(service, work, "train", "job.py", "--name", "trained", "--no-capture")
    flags = ["--checkpoint", "trained", "--format", "torchscript", "--json"]
    told = json.loads(relay(service, work, "export", "exporting:net", *flags).stdout)
    assert told["weights"] == "step-3"
    model, rows = exporting.Net().eval(), torch.randn(4, 8)
    model.load_state_dict(torch.load(work / "trained.pt"))
    script = torch.jit.load(work / "exported" / "model-cpu.torchscript.pt")
    torch.testing.assert_close(script(rows), model(rows))
