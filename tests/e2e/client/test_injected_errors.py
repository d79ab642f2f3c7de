"""An error in any call, in the back end or while a function is recorded or starts without tracing: training goes on
with the right result and at most one warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = Path(__file__).parents[1] / "parts" / "injected_errors.py"
REPORTING = ("warn", "report", "fallback", "fell_back", "_append")
"""Calls that report: an error there can cost the warning."""


def trials(service: PrivateService, folder: Path, where: str, part: int, parts: int) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        **service.environment,
        "TORCHRELAY_CACHE_DIR": str(folder),
        "TORCHRELAY_PROGRAMS": str(int(where != "backend")),
        "TORCHRELAY_PROGRAMS_CHECK": "0",
    }
    found = subprocess.run(
        [sys.executable, str(SCRIPT), where, str(part), str(parts)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    counted, *tried = map(json.loads, found.stdout.splitlines())
    assert counted["sites"] > 400 and len(tried) == counted["chosen"] > 0
    for trial in tried:
        assert trial["error"] == "" and trial["right"], trial
        assert trial["told"] <= 1, trial
    assert sum(trial["raised"] for trial in tried) > 0.8 * len(tried)
    return tried


def in_the_back_end(service: PrivateService, folder: Path, part: int, parts: int) -> None:
    tried = trials(service, folder, "backend", part, parts)
    for trial in tried:
        served = (
            trial["hits"] == 1 or trial["told"] == 1 or any(word in trial["site"][0] for word in REPORTING)
        )
        assert served, trial
    assert sum(trial["told"] for trial in tried) > 0.5 * len(tried)


def in_programs(service: PrivateService, folder: Path, where: str, part: int, parts: int) -> None:
    """The function is traced, and its graph is served."""
    for trial in trials(service, folder, where, part, parts):
        assert trial["hits"] >= 1 and trial["told"] == 0, trial


def test_an_error_in_one_call_of_25(service: PrivateService, tmp_path: Path) -> None:
    in_the_back_end(service, tmp_path, 7, 25)


@pytest.mark.parametrize("where", ["record", "start"])
def test_an_error_in_one_call_of_25_of_programs(service: PrivateService, tmp_path: Path, where: str) -> None:
    in_programs(service, tmp_path, where, 7, 25)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_an_error_in_each_call(service: PrivateService, tmp_path: Path, part: int) -> None:
    in_the_back_end(service, tmp_path, part, 5)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["record", "start"])
def test_an_error_in_each_call_of_programs(service: PrivateService, tmp_path: Path, where: str) -> None:
    in_programs(service, tmp_path, where, 0, 1)
