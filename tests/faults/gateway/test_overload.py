"""Twice the capacity, for a while, and Redis fails over twice: benchmarks/overload.py says what each namespace gets and
what stays flat."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torchrelay

BENCHMARK = Path(torchrelay.__file__).parent / "benchmarks" / "overload.py"


@pytest.mark.slow
def test_namespaces_keep_their_share_at_twice_the_capacity_while_redis_fails_over(tmp_path: Path) -> None:
    out = tmp_path / "overload.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--seconds", "45", "--check", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    namespaces = found["namespaces"]
    assert namespaces["large"]["misses"]["429"] > 0
    assert sum(seen["without_retry_after"] for seen in namespaces.values()) == 0
    assert found["failovers"] == 2
    assert sum(seen["misses"].get("503", 0) for seen in namespaces.values()) > 0, "nobody met a failover"
    assert {status for seen in namespaces.values() for status in seen["hits"]} == {"200"}
