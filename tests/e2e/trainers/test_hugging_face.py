"""Hugging Face's Trainer and Accelerate, in each of their spellings, train on what the service compiled; their losses
are those of Inductor in the same process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchrelay.examples.harness.private_service import PrivateService
from trainer_programs import PROGRAMS, ROUNDING, RUN, report, run


@pytest.fixture(scope="module")
def trainer(service: PrivateService, folder: Path) -> dict[str, Any]:
    return run(service, folder, str(PROGRAMS / "hf_trainer.py"), "both")


@pytest.mark.parametrize("spelling", ["enabled", "named", "disabled"])
def test_a_trainer_learns_what_it_learns_with_inductor(trainer: dict[str, Any], spelling: str) -> None:
    assert len(trainer["inductor"]) == 3
    assert trainer[spelling] == pytest.approx(trainer["inductor"], rel=ROUNDING)


def test_a_trainers_graphs_come_from_the_service_until_it_is_disabled(trainer: dict[str, Any]) -> None:
    assert trainer["served"] == [1, 1, 2]
    assert trainer["after"] == 0


def test_a_trainers_log_and_tensorboard_hold_hits_misses_and_seconds(
    trainer: dict[str, Any], folder: Path
) -> None:
    (logged,) = trainer["logged"]
    assert logged["torchrelay/misses"] == logged["torchrelay/hits"] == 1
    assert (logged["torchrelay/fallbacks"], logged["step"]) == (0, 1)
    assert logged["torchrelay/wait_seconds"] > 0
    (events,) = folder.rglob("events.out.tfevents*")
    board = EventAccumulator(str(events)).Reload()
    assert [event.value for event in board.Scalars("train/torchrelay/misses")] == [1]


def test_torchrelay_run_needs_no_edit_of_the_script(
    service: PrivateService, trainer: dict[str, Any], folder: Path
) -> None:
    left = folder / "report.json"
    program = (str(PROGRAMS / "hf_trainer.py"), "plain")
    found = run(service, folder, *RUN, *program, TORCHRELAY_REPORT=str(left))
    assert found["plain"] == pytest.approx(trainer["inductor"], rel=ROUNDING)
    assert (len(report(left)["graphs"]), report(left)["misses"]) == (1, 0)


def test_accelerate_takes_the_name_in_the_script_and_inductors_on_its_command_line(
    service: PrivateService, folder: Path
) -> None:
    script, left = str(PROGRAMS / "accelerate_loop.py"), folder / "launched.json"
    found = run(service, folder, script, "both")
    assert found["named"] == pytest.approx(found["inductor"], rel=ROUNDING)
    assert found["served"] == [1, 1]
    launch = (
        "accelerate",
        "launch",
        "--cpu",
        "--num_processes",
        "1",
        "--dynamo_backend",
        "inductor",
        script,
    )
    told = run(service, folder, *RUN, *launch, "plain", TORCHRELAY_REPORT=str(left))
    assert told["plain"] == pytest.approx(found["inductor"], rel=ROUNDING)
    assert (len(report(left)["graphs"]), report(left)["misses"]) == (1, 0)
