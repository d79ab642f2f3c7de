"""The zoo's models are all there, and one of them goes through a service of its own by every phase."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

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


@pytest.fixture
def run_zoo(tmp_path: Path, registry: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """The records of four models, of which each job is a call of `child`. known: phases that have a record."""
    from support import zoo_jobs, zoo_records

    def run(phases: str, parallel: int, child: Any, batch: int = 0, known: Any = ()) -> list[Any]:
        plan = dict.fromkeys(field.name for field in dataclasses.fields(zoo_jobs.Plan))
        plan |= {
            "phases": tuple(phases.split(",")),
            "batch": batch,
            "parallel": parallel,
            "minutes": 1.0,
            "timeout": 60.0,
            "precision": "amp",
            "ways": ("torchrelay",),
        }
        models: dict[str, Any] = {f"m/{number}": SimpleNamespace(missing="") for number in range(4)}
        records = zoo_records.Records(tmp_path / "records.jsonl")
        for name, phase in known:
            way = "all" if phase == "time" else "torchrelay"
            about = {"model": name, "phase": phase, "way": way, "precision": "amp", "status": "pass"}
            records.append(about)
        zoo = zoo_jobs.Zoo(zoo_jobs.Plan(**plan), models, records, tmp_path, None)
        monkeypatch.setattr(zoo, "_child", child)
        zoo.run_all()
        return records.all()

    return run


def test_models_for_which_a_gpu_had_no_room_run_again_with_fewer_at_once(
    run_zoo: Callable[..., list[Any]],
) -> None:
    alone = threading.Lock()
    ran: list[str] = []

    def child(job: Any, timeout: float, turn: None) -> dict[str, Any]:
        ran.append(job.model)
        if ran.count(job.model) == 1 and job.model != "m/0":
            return {"status": "model_fail_to_load", "error": FULL}
        assert alone.acquire(blocking=False)
        time.sleep(0.02)
        alone.release()
        return {"status": "pass"}

    found = run_zoo("fill", 4, child)
    assert [record["status"] for record in found] == ["pass"] * 4
    assert sorted(ran) == sorted([record["model"] for record in found] * 2)[1:]


def test_what_is_timed_is_timed_alone_when_all_with_it_are_ready(run_zoo: Callable[..., list[Any]]) -> None:
    told: list[str] = []

    def child(job: Any, timeout: float, turn: TextIO) -> dict[str, Any]:
        time.sleep(0.1 * int(job.model[-1]))
        told.append("ready")
        fcntl.flock(turn, fcntl.LOCK_EX)
        told.append("begins")
        time.sleep(0.02)
        told.append("ends")
        return {"status": "pass"}

    assert len(run_zoo("time", 2, child)) == 4
    assert told == ["ready", "ready", *["begins", "ends"] * 2] * 2


def test_on_another_machine_a_model_is_filled_again_for_what_is_still_to_be_timed(
    run_zoo: Callable[..., list[Any]],
) -> None:
    told: list[tuple[str, str]] = []

    def child(job: Any, timeout: float, turn: TextIO | None) -> dict[str, Any]:
        told.append((job.phase, job.model))
        return {"status": "pass"}

    run_zoo("fill,time", 1, child, 2, [("m/0", "fill"), ("m/1", "time"), ("m/2", "fill")])
    first = [("fill", "m/0"), ("fill", "m/1"), ("time", "m/0")]
    assert told == [*first, ("fill", "m/2"), ("fill", "m/3"), ("time", "m/2"), ("time", "m/3")]


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
    assert "(zoo-cpu-small-float32.md)" in (tmp_path / "recorded" / "zoo.md").read_text()
    assert "soft_actor_critic" in (tmp_path / "recorded" / "zoo-cpu-small-float32.md").read_text()
    assert (tmp_path / "recorded" / "images" / "zoo.svg").exists()
