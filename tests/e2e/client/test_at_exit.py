"""A graph that an atexit handler compiles, when Python starts no more threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = """
import atexit, json, sys, warnings
import torch, torchrelay

def run(factor):
    x = torch.linspace(-1, 1, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchrelay.FallbackWarning)
        found = torch.compile(lambda x: x.sin() * factor, backend="torchrelay")(x)
    torch.testing.assert_close(found, x.sin() * factor)

def last():
    run(2.625)
    told = torchrelay.report()
    print(json.dumps({"outcomes": [graph.outcome for graph in told.graphs], "fallbacks": told.fallbacks}))

if sys.argv[1] == "at exit":
    run(2.5)
    atexit.register(last)
else:
    run(2.5)
    last()
"""


def run(when: str, cache: Path, environment: dict[str, str]) -> dict[str, Any]:
    environment = {
        **os.environ,
        "TORCHRELAY_PREFETCH": "0",
        **environment,
        "TORCHRELAY_CACHE_DIR": str(cache),
    }
    command = [sys.executable, "-c", SCRIPT, when]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_it_is_a_hit_and_without_a_service_it_runs_as_it_is(service: PrivateService, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert run("before", tmp_path / "first", service.environment)["outcomes"] == ["miss"] * 2
    assert run("at exit", cache, service.environment) == {"outcomes": ["hit"] * 2, "fallbacks": {}}
    assert run("at exit", cache, service.environment) == {"outcomes": ["disk_hit"] * 2, "fallbacks": {}}
    nowhere = {"TORCHRELAY_URL": "http://127.0.0.1:1", "TORCHRELAY_STATE_DIR": str(tmp_path / "state")}
    nowhere["TORCHINDUCTOR_CACHE_DIR"] = str(
        tmp_path / "inductor"
    )  # empty, so that Inductor would start threads
    found = run("at exit", tmp_path / "none", nowhere)
    assert found == {"outcomes": ["fallback", "eager"], "fallbacks": {"gateway_unreachable": 2}}
