"""The zoo's models are all there, and one of them goes through a service of its own by every phase."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
COUNTS = {"transformers": 46, "timm": 61, "torchbench": 56, "newer": 39}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from zoo_models import registry

    return registry


@pytest.mark.parametrize("suite", COUNTS)
def test_each_name_of_a_suite_has_an_entry(suite: str, registry: Any) -> None:
    if importlib.util.find_spec(registry.NEEDS[suite]) is None:
        pytest.skip(f"{registry.NEEDS[suite]} is not installed: `make test-slow` fetches it")
    models = registry.models((suite,))
    assert len(models) == COUNTS[suite]
    assert all((model.build is None) == bool(model.missing) for model in models.values())


def test_models_for_which_a_gpu_had_no_room_run_again_with_fewer_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from support import zoo_jobs, zoo_records

    alone = threading.Lock()
    ran: list[str] = []

    class Small(zoo_jobs.Zoo):
        def _child(self, job: Any, timeout: float) -> dict[str, Any]:
            ran.append(job.model)
            if ran.count(job.model) == 1 and job.model != "m/0":
                return {"status": "model_fail_to_load", "error": FULL}
            assert alone.acquire(blocking=False)
            time.sleep(0.02)
            alone.release()
            return {"status": "pass"}

    plan = dict.fromkeys(field.name for field in dataclasses.fields(zoo_jobs.Plan))
    values = {"parallel": 4, "minutes": 1.0, "timeout": 60.0, "precision": "amp", "ways": ("torchrelay",)}
    models: dict[str, Any] = {f"m/{number}": SimpleNamespace(missing="") for number in range(4)}
    records = zoo_records.Records(tmp_path / "records.jsonl")
    zoo = Small(zoo_jobs.Plan(**plan | values), models, records, tmp_path, None)
    zoo.run("fill")
    found = [records.get(name, "fill", "torchrelay", "amp")["status"] for name in models]
    assert found == ["pass"] * 4
    assert sorted(ran) == sorted([*models, *models][1:])


FULL = "ModuleNotFoundError: no module\nfrom AcceleratorError: CUDA error: out of memory"


@pytest.mark.slow
@pytest.mark.parametrize("suite", COUNTS)
def test_each_model_can_be_built_small(suite: str, registry: Any) -> None:
    failed: dict[str, str] = {}
    for name, model in registry.models((suite,)).items():
        if model.build is None:
            continue
        try:
            with torch.device("meta"):
                model.build(True)
        except ModuleNotFoundError as error:
            assert error.name in ("timm", "diffusers")
        except Exception as error:
            failed[name] = repr(error)
    assert not failed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_goes_through_every_phase(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCHMARKS / "zoo.py"),
        "--only",
        "torchbench/soft_actor_critic",
        "--check",
    ]
    flags = ["--device", "cpu", "--rounds", "5", "--parallel", "2", "--state", str(tmp_path / "state")]
    flags += ["--recorded", str(tmp_path / "recorded")]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [
        json.loads(line) for line in (tmp_path / "recorded" / "cpu-small.jsonl").read_text().splitlines()
    ]
    assert {record["phase"] for record in records} == {"programs", "fill", "first-step", "accuracy", "time"}
    by_way = {record["way"]: record for record in records if record["phase"] == "first-step"}
    assert by_way["hit"]["remote"] == by_way["hit"]["graphs"] > 0 == by_way["hit"]["misses"]
    assert by_way["programs"]["programs"] > 0
    (times,) = (record["milliseconds"] for record in records if record["phase"] == "time")
    assert set(times) == {"eager", "inductor", "torchrelay"}
    assert "soft_actor_critic" in (tmp_path / "recorded" / "zoo.md").read_text()
    assert (tmp_path / "recorded" / "images" / "zoo.svg").exists()
