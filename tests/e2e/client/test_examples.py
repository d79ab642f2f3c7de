"""The example scripts run by themselves, and through a whole service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(script: str, *arguments: str, environment: dict[str, str], result: Path) -> dict[str, Any]:
    command = [sys.executable, str(EXAMPLES / script), *arguments, "--json", str(result), "--device", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads(result.read_text())
    return record


@pytest.mark.parametrize(("script", "steps"), [("char_gpt.py", 30), ("digits_cnn.py", 100)])
def test_an_example_run_by_its_path_learns(script: str, steps: int, tmp_path: Path) -> None:
    environment = FreshMachine(tmp_path).environment()
    record = run(
        script,
        "--backend",
        "eager",
        "--steps",
        str(steps),
        environment=environment,
        result=tmp_path / "r.json",
    )
    assert len(record["losses"]) == steps
    assert record["losses"][-1] < 0.8 * record["losses"][0]
    assert record["seconds_from_process_start"] > record["seconds_to_first_step"] > 0
    assert record["report"] is None


def test_a_teammate_without_a_compiler_trains_on_what_the_first_run_compiled(
    service: PrivateService, tmp_path: Path
) -> None:
    small = ("--backend", "torchrelay", "--steps", "3", "--layers", "1", "--width", "32", "--context", "16")
    client = {**service.environment, "TORCHRELAY_MODE": "require"}
    records = []
    for name, compiler in (("first", True), ("teammate", False)):
        machine = FreshMachine(tmp_path / name, compiler=compiler)
        environment = machine.environment(**client)
        records.append(run("char_gpt.py", *small, environment=environment, result=tmp_path / f"{name}.json"))
    assert not machine.compilers()
    first, teammate = (record["report"] for record in records)
    assert first["misses"] >= 1 and first["hits"] == 0
    assert teammate["misses"] == 0 and teammate["hits"] == first["misses"]
    assert first["fallbacks"] == teammate["fallbacks"] == {}
    assert records[0]["losses"] == pytest.approx(records[1]["losses"], rel=1e-5)
