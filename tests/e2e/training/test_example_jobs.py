"""The job files of examples/train run through a whole service, with fewer steps than they name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command_line import torchrelay
from torchrelay.examples.harness.private_service import PrivateService

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "train"
SHORT = {
    "char_gpt.yaml": ["--way", "ddp", "--steps", "6", "--layers", "1", "--batch", "4"],
    "digits.yaml": ["--way", "fsdp", "--epochs", "1", "--width", "8"],
}


def command(service: PrivateService, *arguments: str) -> str:
    environment = {**os.environ, **service.environment, "COLUMNS": "250"}
    done = torchrelay("train", *arguments, environment=environment, folder=EXAMPLES, status=0, seconds=500)
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("file", SHORT)
def test_an_examples_job_runs_and_its_ranks_compile_nothing(service: PrivateService, file: str) -> None:
    name = file.partition(".")[0]
    command(service, file, "--name", name, "--cpus", "0.5", "--", *SHORT[file])
    job: dict[str, Any] = json.loads(command(service, "show", name, "--json"))
    assert job["state"] == "done" and job["spec"]["workers"] == 2
    compiles = job["compiles"]
    assert compiles["captured"] >= 1 and compiles["hits"] >= 2
    assert not compiles.get("misses") and not compiles.get("fallbacks"), compiles


def test_every_job_file_is_run() -> None:
    assert set(SHORT) == {path.name for path in EXAMPLES.glob("*.yaml")}
