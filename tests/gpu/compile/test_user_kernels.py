"""User-written Triton kernels on a GPU, on code that a real service compiled from their source."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrelay.clients.gateway.admin_client import AdminClient
from torchrelay.clients.settings import load_settings
from torchrelay.compiler.api.admin import TokenRequest
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = Path(__file__).parents[1] / "parts" / "user_kernels.py"
ROUNDING = 1e-5
"""Relative; the same kernels run on both sides, and only GEMMs around them may round otherwise."""
RUNS = ["add", "tuned", "dynamic", "step", "rich"]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateService]:
    with PrivateService(tmp_path_factory.mktemp("s")) as running:
        yield running


def child(*flags: str, machine: FreshMachine, service: PrivateService, **more: str) -> dict[str, Any]:
    environment = machine.environment(**service.environment, **{"TORCHRELAY_MODE": "require", **more})
    command = [sys.executable, str(SCRIPT), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + service.log_tail()
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(record))
    return record


def token(service: PrivateService, *, allow_source: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    with monkeypatch.context() as patch:
        for name, value in service.environment.items():
            patch.setenv(name, value)
        with AdminClient(load_settings()) as administration:
            asked = TokenRequest("ada", frozenset({"compile"}), 3600, allow_source=allow_source)
            return administration.create_token(asked).token


@pytest.mark.parametrize("run", RUNS)
def test_results_are_those_of_local_compilation(run: str, service: PrivateService, tmp_path: Path) -> None:
    record = child(run, machine=FreshMachine(tmp_path), service=service)
    assert record["fallbacks"] == {}
    assert record["hits"] + record["misses"] == record["graphs"] >= 1
    assert record["measured"] == 0  # winners come with the artifact
    assert record["difference"] <= ROUNDING


@pytest.mark.parametrize("run", RUNS)
def test_a_teammate_without_a_compiler_and_without_the_permission_hits(
    run: str, service: PrivateService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(run, "--relay-only", machine=FreshMachine(tmp_path / "first"), service=service)
    teammate = FreshMachine(tmp_path / "teammate", compiler=False)
    assert not teammate.compilers()
    reader = token(service, allow_source=False, monkeypatch=monkeypatch)
    record = child(run, "--relay-only", machine=teammate, service=service, TORCHRELAY_TOKEN=reader)
    assert record["misses"] == 0
    assert record["hits"] == record["graphs"] >= 1
    assert record["measured"] == 0


def test_a_token_without_the_permission_compiles_locally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PrivateService(tmp_path / "s") as service:
        reader = token(service, allow_source=False, monkeypatch=monkeypatch)
        machine = FreshMachine(tmp_path / "m")
        record = child(
            "step", machine=machine, service=service, TORCHRELAY_TOKEN=reader, TORCHRELAY_MODE="remote"
        )
        assert record["fallbacks"] == {"source_forbidden": 1}
        (warning,) = record["warnings"]
        assert "--allow-source" in warning
        assert record["difference"] <= ROUNDING
        assert service.stats()["compiles"] == 0
        allowed = token(service, allow_source=True, monkeypatch=monkeypatch)
        record = child("step", "--relay-only", machine=machine, service=service, TORCHRELAY_TOKEN=allowed)
        assert record["misses"] == record["graphs"] == 1
