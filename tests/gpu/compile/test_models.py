"""Training steps of GPT-2 and ResNet-50 on a GPU, on code that a real service compiled."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

MEASURED = Path(__file__).resolve().parents[3] / "benchmarks" / "measured"
ROUNDING = 1e-5
"""Relative. float32 rounds at 6e-8; atomics, and reductions whose winners each side measured, add in any order."""

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateService]:
    with PrivateService(tmp_path_factory.mktemp("s")) as running:
        yield running


def child(script: str, *flags: str, machine: FreshMachine, service: PrivateService) -> dict[str, Any]:
    environment = machine.environment(**service.environment, TORCHRELAY_MODE="require")
    command = [sys.executable, str(MEASURED / script), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def manifests(machine: Path) -> list[artifact_manifest.Manifest]:
    """Of the artifacts in a machine's own cache."""
    files = (path for path in machine.glob("home/.cache/torchrelay/artifacts/*/*") if len(path.name) == 64)
    found = [container.read_manifest(path.read_bytes()) for path in files]
    assert found
    return found


MODELS = [("bert", "transformers"), ("gpt2-12x768", "transformers"), ("resnet50", "timm")]


@pytest.mark.parametrize(("model", "library"), MODELS)
@pytest.mark.parametrize("tuned", [False, True], ids=["deterministic", "tuned"])
def test_gradients_are_those_of_local_compilation(
    model: str, library: str, tuned: bool, service: PrivateService, tmp_path: Path
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    last = f"cuda:{torch.cuda.device_count() - 1}"  # with two GPUs, not the one the worker compiled for
    flags = ["--model", model, "--device", last] + ([] if tuned else ["--deterministic"])
    record = child("compare_gradients.py", *flags, machine=FreshMachine(tmp_path), service=service)
    print(json.dumps(record))
    assert record["remote"] == record["graphs"] >= 1
    assert record["fallbacks"] == {}
    assert record["measured"] == 0
    assert record["equal"] or record["difference"] <= max(10 * record["noise"], ROUNDING)
    for manifest in manifests(tmp_path):
        print(manifest.verification, manifest.stages, manifest.kernels_built, manifest.kernels_reused)
        assert manifest.verification.status == "passed", manifest.verification


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_a_machine_without_a_compiler_trains_on_a_hit(
    mode: str, service: PrivateService, tmp_path: Path
) -> None:
    flags: tuple[str, ...] = (
        "--model",
        "gpt2-12x768",
        "--backend",
        "torchrelay",
        "--device",
        "cuda",
        "--steps",
        "2",
    )
    flags += ("--mode", mode)
    child("train_once.py", *flags, machine=FreshMachine(tmp_path / "first"), service=service)
    teammate = FreshMachine(tmp_path / "teammate", compiler=False)
    assert not teammate.compilers()
    record = child("train_once.py", *flags, machine=teammate, service=service)
    assert record["reuse"]["misses"] == 0
    assert record["reuse"]["hits"] >= 1
