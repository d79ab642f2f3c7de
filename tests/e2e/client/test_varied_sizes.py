"""A size that varied in a run is a symbol in the first trace of the script's next start, on any machine; others are
not, and whatever forbids symbols comes first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = """
import torchrelay
torchrelay.enable()
import torch
import json, os, pathlib, sys, time

def function(x, y, count):
    return ((x @ y).sin() * count).sum(0)

cache, machine, sizes = pathlib.Path(os.environ["TORCHRELAY_CACHE_DIR"]), sys.argv[1], json.loads(sys.argv[2])
until = time.monotonic() + 120  # what building a large model takes
while machine != "first" and time.monotonic() < until and not [p for p in cache.rglob("*") if len(p.name) == 64]:
    time.sleep(0.02)
dynamic = False if machine == "static" else None
compiled = torch.compile(function, backend="torchrelay", dynamic=dynamic)
right, y = True, torch.linspace(-2, 2, 15).reshape(5, 3)
if machine == "marked":
    torch._dynamo.mark_static_address(y)
for rows, count in sizes:
    x = torch.linspace(-1, 1, rows * 5).reshape(rows, 5)
    if machine == "marked":
        torch._dynamo.mark_static(x, 0)
    right = right and torch.allclose(compiled(x, y, count), function(x, y, count), rtol=1e-5, atol=1e-6)
traces = torch._dynamo.utils.counters["stats"]["unique_graphs"]
report = torchrelay.report()
print(json.dumps([right, traces, report.misses, report.started, report.prefetch_failures, report.fallbacks]))
"""
VARIED = [(8, 2), (12, 3), (20, 4), (28, 5)]


def start(
    service: PrivateService, script: Path, machine: Path, sizes: list[tuple[int, int]], **variables: str
) -> int:
    """How often the script traced its function; machine: a folder, whose name says how the script starts."""
    environment = {
        **os.environ,
        **service.environment,
        "TORCHRELAY_CACHE_DIR": str(machine),
        "TORCHRELAY_PROGRAMS": "0",
        "XDG_STATE_HOME": str(machine / "state"),
        "TORCHINDUCTOR_CACHE_DIR": str(machine / "inductor"),
        **variables,
    }
    command = [sys.executable, str(script), machine.name, json.dumps(sizes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    right, traces, _, _, failures, fallbacks = json.loads(done.stdout.splitlines()[-1])
    assert (right, failures, fallbacks) == (True, 0, {})
    return int(traces)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_the_next_start_traces_once_and_with_symbols(
    service: PrivateService, script: Path, tmp_path: Path
) -> None:
    assert start(service, script, tmp_path / "first", VARIED) == 2
    assert start(service, script, tmp_path / "second", [(6, 9), *VARIED]) == 1
    variables = {"TORCHRELAY_PROGRAMS": "1", "TORCHRELAY_PROGRAMS_CHECK": "0"}
    assert start(service, script, tmp_path / "programs", VARIED, **variables) == 1
    assert start(service, script, tmp_path / "programs", VARIED, **variables) == 0
    assert start(service, script, tmp_path / "team", VARIED, TORCHRELAY_PROGRAMS="team") == 1
    assert start(service, script, tmp_path / "no_prefetch" / "first", VARIED, TORCHRELAY_PREFETCH="0") == 2
    assert start(service, script, tmp_path / "rank", VARIED, RANK="0", WORLD_SIZE="2") == 2
    assert start(service, script, tmp_path / "static", VARIED) == 4
    assert start(service, script, tmp_path / "marked", [(8, 2), (12, 2), (20, 2)]) == 3
    script.write_text(SCRIPT.replace("sin", "cos"))
    assert start(service, script, tmp_path / "changed", VARIED) == 2


def test_a_last_batch_that_is_smaller_changes_nothing(
    service: PrivateService, script: Path, tmp_path: Path
) -> None:
    epoch = [(32, 1)] * 3 + [(7, 1)]
    script.write_text(SCRIPT.replace("@ y)", "@ y).neg()"))
    assert start(service, script, tmp_path / "first", epoch * 3) == 2
    assert start(service, script, tmp_path / "second", epoch * 3) == 2
    assert start(service, script, tmp_path / "third", [(32, 1)] * 3) == 1


@pytest.mark.parametrize("programs", ["0", "1"])
def test_a_size_that_varies_no_longer_is_constant_again(
    service: PrivateService, script: Path, tmp_path: Path, programs: str
) -> None:
    script.write_text(SCRIPT.replace("@ y)", f"@ y).abs().add({programs})"))
    assert start(service, script, tmp_path / "first", VARIED) == 2
    machine, variables = (
        tmp_path / "second",
        {"TORCHRELAY_PROGRAMS": programs, "TORCHRELAY_PROGRAMS_CHECK": "0"},
    )
    assert start(service, script, machine, [(32, 1)] * 40 + [(7, 2)], **variables) == 1
    assert start(service, script, machine, [(32, 1), (7, 2)], **variables) == 2
