"""torchrelay.background with a search against a whole service: eager, then the tuned artifact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchrelay.clients.reports.run_report import last_run
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = Path(__file__).parents[1] / "parts" / "background_search.py"


def run(
    service: PrivateService, folder: Path, salt: float, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **service.environment, "TORCHRELAY_CACHE_DIR": str(folder), **variables}
    command = [sys.executable, str(SCRIPT), str(salt), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done


def found(
    service: PrivateService, folder: Path, salt: float, *words: str, **variables: str
) -> dict[str, Any]:
    """What the script told, with its one graph as `graph`. Eager steps are exactly eager's."""
    told: dict[str, Any] = json.loads(run(service, folder, salt, *words, **variables).stdout.splitlines()[-1])
    (told["graph"],) = told["report"]["graphs"]
    assert told["differences"].get("eager", 0.0) == 0.0
    assert all(each < 1e-4 for each in told["differences"].values()), told["differences"]
    return told


def programs(folder: Path) -> dict[str, str]:
    """Settings with which a function that was traced starts without tracing the next time."""
    return {"TORCHRELAY_PROGRAMS": "1", "TORCHRELAY_STATE_DIR": str(folder / "state")}


@pytest.mark.slow
def test_each_version_computes_what_inductor_does_here_and_a_hit_is_tuned_from_the_start(
    service: PrivateService, tmp_path: Path
) -> None:
    first = found(service, tmp_path / "a", 3.125, "LOCAL")
    graph = first["graph"]
    assert (first["error"], first["told"], first["report"]["fallbacks"]) == ("", [], {})
    assert graph["outcome"] == "miss" and graph["eager_calls"] > 0
    assert set(first["differences"]) == {"eager", "tuned"}
    assert (first["report"]["background"], first["report"]["misses"]) == (0, 1)
    kept = programs(tmp_path)
    for outcome, started in (("hit", 0), ("disk_hit", 1)):
        again = found(service, tmp_path / "b", 3.125, **kept)
        assert (again["graph"]["outcome"], again["graph"]["key"]) == (outcome, graph["key"])
        assert again["graph"]["eager_calls"] == 0
        assert again["report"]["programs"] == started


@pytest.mark.slow
def test_a_search_that_fails_is_compiled_here_and_mode_require_raises(
    service: PrivateService, tmp_path: Path
) -> None:
    (tmp_path / "team.lock").write_text("version = 1\n")
    lock = {"TORCHRELAY_TUNING_LOCK": str(tmp_path / "team.lock"), **programs(tmp_path)}
    refused = found(service, tmp_path / "b", 3.25, **lock)
    graph, report = refused["graph"], refused["report"]
    assert (graph["outcome"], graph["reason"]) == ("fallback", "tuning_unknown")
    assert (refused["error"], report["background"]) == ("", 0)
    assert report["fallbacks"] == {"tuning_unknown": 1} and len(refused["told"]) == 1

    strict = found(service, tmp_path / "b", 3.25, **lock, TORCHRELAY_MODE="require")
    assert strict["error"].startswith("TuningUnknown: ") and strict["told"] == []
    assert strict["graph"]["outcome"] == "raised"
    assert [told["report"]["programs"] for told in (refused, strict)] == [0, 0]
    assert {each["reason"] for each in report["traced"]} >= {"a graph that has no artifact"}


def test_a_program_that_ends_before_the_search_ends_at_once_and_says_nothing(
    service: PrivateService, tmp_path: Path
) -> None:
    quiet = {"TORCHRELAY_STATE_DIR": str(tmp_path), "PYTHONWARNINGS": "error", "TORCHRELAY_SUMMARY": "0"}
    assert run(service, tmp_path, 3.375, "LEAVES", **quiet).stderr == ""
    left = last_run(tmp_path)
    assert left is not None
    (graph,) = left.processes[0].graphs
    assert graph.outcome == "background"


@pytest.mark.slow
def test_in_mode_cache_nothing_is_compiled_for_later(service: PrivateService, tmp_path: Path) -> None:
    told = found(service, tmp_path, 3.5, TORCHRELAY_MODE="cache")
    assert told["report"]["fallbacks"] == {"not_cached": 1}
    assert told["graph"]["eager_calls"] == 0
