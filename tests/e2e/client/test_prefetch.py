"""A script's next start, on a machine that has nothing, finds its artifacts there before its graph asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = """
import torchrelay
torchrelay.enable()  # from here on, in the background
import torch
import json, os, pathlib, sys, time

class Net(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.mish(x @ x.T).square().mean()

cache = pathlib.Path(os.environ["TORCHRELAY_CACHE_DIR"])
until = time.monotonic() + float(sys.argv[2])  # what building a large model takes
while time.monotonic() < until and not [path for path in cache.rglob("*") if len(path.name) == 64]:
    time.sleep(0.02)
x = torch.linspace(-1, 1, 42).reshape(6, 7).requires_grad_()
loss = torch.compile(Net(), backend="torchrelay")(x)
loss.backward()
torch.testing.assert_close(loss, Net()(x))
report = torchrelay.report()
names = ("hits", "disk_hits", "misses", "prefetched", "prefetch_failures", "fallbacks")
print(json.dumps({name: getattr(report, name) for name in names}))
"""


def start(service: PrivateService, script: Path, machine: Path, builds_for: int) -> dict[str, Any]:
    environment = {
        **os.environ,
        **service.environment,
        "TORCHRELAY_CACHE_DIR": str(machine),
        "XDG_STATE_HOME": str(machine / "state"),
        "TORCHINDUCTOR_CACHE_DIR": str(machine / "inductor"),
    }
    command = [sys.executable, str(script), "--seconds", str(builds_for)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_the_second_start_waits_for_nothing_and_counts_as_a_hit(
    service: PrivateService, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    none = {"hits": 0, "disk_hits": 0, "misses": 0, "prefetched": 0, "prefetch_failures": 0, "fallbacks": {}}
    assert start(service, script, tmp_path / "one", 0) == {**none, "misses": 1}
    before = service.stats()
    assert start(service, script, tmp_path / "two", 120) == {**none, "hits": 1, "prefetched": 1}
    after = service.stats()
    gained = {name: after[name] - before[name] for name in ("requests", "hits", "misses", "fetches")}
    assert gained == {"requests": 1, "hits": 1, "misses": 0, "fetches": 1}
    assert after["seconds_saved"] > before["seconds_saved"]
