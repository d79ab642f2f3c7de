"""Twice the capacity, for a while: benchmarks/overload.py says what each namespace gets and what stays flat."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torchrelay

BENCHMARK = Path(torchrelay.__file__).parent / "benchmarks" / "overload.py"


@pytest.mark.slow
def test_namespaces_keep_their_share_at_twice_the_capacity(tmp_path: Path) -> None:
    out = tmp_path / "overload.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--seconds", "30", "--check", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["namespaces"]
    assert found["large"]["misses"]["429"] > 0
    assert sum(seen["without_retry_after"] for seen in found.values()) == 0
