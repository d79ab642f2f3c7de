"""Lightning's Trainer and Fabric train on what the service compiled. `import lightning` replaces torch.compile, before
or after torchrelay does."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from torchrelay.examples.harness.private_service import PrivateService
from trainer_programs import PROGRAMS, ROUNDING, run


@pytest.fixture(scope="module", params=["lightning", "torchrelay"])
def fitted(request: pytest.FixtureRequest, service: PrivateService, folder: Path) -> dict[str, Any]:
    """By what is imported first."""
    return run(service, folder, str(PROGRAMS / "lightning_fit.py"), request.param)


@pytest.mark.parametrize("way", ["fit", "fabric"])
def test_a_compiled_module_learns_what_it_learns_with_inductor(fitted: dict[str, Any], way: str) -> None:
    assert len(fitted[way]) == 3
    assert fitted[way] == pytest.approx(fitted[f"{way}_inductor"], rel=ROUNDING)


def test_all_graphs_come_from_the_service_until_it_is_disabled(fitted: dict[str, Any]) -> None:
    served, graphs = fitted["served"]
    assert served == graphs >= 2
    assert fitted["after"] == 0


def test_the_trainers_logger_gets_hits_misses_and_seconds(fitted: dict[str, Any]) -> None:
    rows = [row for row in csv.DictReader(fitted["logged"]) if row["torchrelay/misses"]]
    last = {name.removeprefix("torchrelay/"): float(value) for name, value in rows[-1].items() if value}
    assert last["hits"] + last["misses"] >= 1
    assert last["fallbacks"] == 0
    assert last["load_seconds"] > 0
