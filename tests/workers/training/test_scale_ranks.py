"""The benchmark of a job with many ranks, with few."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
_FEW = """
import json
from dataclasses import asdict
from support import scale_ranks
print(json.dumps([asdict(row) for row in scale_ranks.rows((2, 6), on_node=3, seconds=1.5, settle=1.0)]))
"""


@pytest.mark.slow
def test_the_benchmark_of_many_ranks_finds_every_line_once() -> None:
    # in a process of its own: Ray reads its environment as it is imported, and this process may start one later
    ran = subprocess.run(
        [sys.executable, "-c", _FEW],
        cwd=_BENCHMARKS,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    rows = {row["name"].partition(": ")[2]: row for row in json.loads(ran.stdout.splitlines()[-1])}
    assert rows["lines lost or doubled"]["ok"]
    assert rows["calls to the driver"]["value"] > 0
    assert rows["report to visible, median"]["value"] > 0
    assert "with 2, 6" in rows["driver's share of a core"]["law"]
