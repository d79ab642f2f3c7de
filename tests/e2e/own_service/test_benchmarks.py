"""Benchmarks say which bars were not met, and with --check their exit status says it too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def run(script: str, *flags: str) -> tuple[int, list[str]]:
    command = [sys.executable, str(BENCHMARKS / script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def test_a_checked_first_step_that_was_held_against_nothing_fails(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--variants", "eager", "--no-steady", "--steps", "1", "--out", str(tmp_path)]
    status, lines = run("first_step.py", *flags, "--check")
    assert (tmp_path / "first_step.json").exists()
    assert status == 1 and "FAIL  nothing was measured that has a bar" in lines, lines


def test_a_checked_gateway_benchmark_exits_as_its_lines_say(tmp_path: Path) -> None:
    flags = ["--requests", "5", "--seconds", "0.3", "--connections", "2", "--out", str(tmp_path / "g.json")]
    status, lines = run("gateway.py", *flags, "--check")
    said = [line[:4] for line in lines if line[:6] in ("pass  ", "FAIL  ")]
    assert len(said) == 4 and status == ("FAIL" in said), lines


def rows_of(tmp_path: Path, *parts: str) -> dict[str, dict[str, Any]]:
    out = tmp_path / "scale.json"
    run("scale.py", "--quick", "--out", str(out), "--parts", *parts)
    return {row["name"]: row for row in json.loads(out.read_text())["rows"]}


@pytest.mark.slow
def test_the_scale_benchmark_measures_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from support import scale_hits

    if not scale_hits.can_be_measured():
        pytest.skip("wrk or nginx is not installed: `make test-slow` fetches them from Debian's packages")
    rows = rows_of(tmp_path, "hits")
    assert rows["hits, 20 kB, POST / redis-py"]["value"] > 0
    assert rows["hits, 20 kB, edge / nginx"]["value"] > 0


@pytest.mark.slow
def test_each_other_part_of_the_scale_benchmark_finds_what_it_measures(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "start", "misses", "idle", "ranks")
    once = [row["value"] for name, row in rows.items() if "of a graph" in name or "a body crosses" in name]
    # one of several gateways may get no request
    assert len(once) == 6 and all(0 < value <= 1 for value in once), rows
    assert rows["10 ranks, one artifact of 1 MB: a gateway's peak memory"]["ok"]
    assert any(name.endswith("lines lost or doubled") and row["ok"] for name, row in rows.items())
