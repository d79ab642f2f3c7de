"""A second compile on a GPU takes the Triton binaries and the winners of the first."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def trained(root: Path, service: PrivateService, *flags: str) -> dict[str, artifact_manifest.Manifest]:
    """The manifests of what a process that trained one step compiled, by key."""
    machine = FreshMachine(root)
    environment = machine.environment(**service.environment, TORCHRELAY_MODE="require")
    command = [
        sys.executable,
        str(BENCHMARKS / "measured" / "train_once.py"),
        "--model",
        "gpt2-12x768",
        "--device",
        "cuda",
    ]
    command += ["--backend", "torchrelay", "--steps", "1", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files = (path for path in root.glob("home/.cache/torchrelay/artifacts/*/*") if len(path.name) == 64)
    return {path.name: container.read_manifest(path.read_bytes()) for path in files}


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_changed_layer_builds_and_measures_only_its_own_kernels(tmp_path: Path) -> None:
    with PrivateService(tmp_path / "service") as service:
        first = trained(tmp_path / "first", service)
        second = trained(tmp_path / "second", service, "--change-layer", "5")
    known = {m.problem: m for manifest in first.values() for m in manifest.tuning}
    for key, manifest in {**first, **second}.items():
        print(
            key[:8], manifest.kernels_built, manifest.kernels_reused, manifest.stages, manifest.verification
        )
    changed = [manifest for key, manifest in second.items() if key not in first]
    built, reused = (sum(getattr(m, f"kernels_{how}") for m in changed) for how in ("built", "reused"))
    assert 0 < built < reused
    again = [m for manifest in changed for m in manifest.tuning if m.problem in known]
    assert again
    for measurement in again:
        assert measurement == known[measurement.problem]  # the time too: it was not taken again
