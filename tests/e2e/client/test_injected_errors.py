"""An error in any call that the back end makes: training goes on with the right result and at most one warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = Path(__file__).parents[1] / "parts" / "injected_errors.py"
REPORTING = ("warn", "report", "fallback", "fell_back", "_append")
"""Calls that report: an error there can cost the warning."""


def tried(service: PrivateService, folder: Path, part: int, parts: int) -> None:
    environment = {**os.environ, **service.environment, "TORCHRELAY_CACHE_DIR": str(folder)}
    found = subprocess.run(
        [sys.executable, str(SCRIPT), str(part), str(parts)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    counted, *trials = map(json.loads, found.stdout.splitlines())
    assert counted["sites"] > 400 and len(trials) == counted["chosen"] > 0
    for trial in trials:
        assert trial["error"] == "" and trial["right"], trial
        assert trial["told"] <= 1, trial
        served = (
            trial["hits"] == 1 or trial["told"] == 1 or any(word in trial["site"][0] for word in REPORTING)
        )
        assert served, trial
    assert sum(trial["raised"] for trial in trials) > 0.8 * len(trials)
    assert sum(trial["told"] for trial in trials) > 0.5 * len(trials)


def test_an_error_in_one_call_of_25(service: PrivateService, tmp_path: Path) -> None:
    tried(service, tmp_path, 7, 25)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_an_error_in_each_call(service: PrivateService, tmp_path: Path, part: int) -> None:
    tried(service, tmp_path, part, 5)
