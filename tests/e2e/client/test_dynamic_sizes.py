"""A graph with symbolic sizes is compiled once for all sizes, and again only for those that the guards exclude."""

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
import json, sys
import torch, torchrelay

program, sizes = sys.argv[1], list(map(int, sys.argv[2:]))

def batched(x):
    return torch.nn.functional.silu(x @ x.mT).square().mean() * 1.3125

def pooled(x):
    return torch.nn.functional.adaptive_avg_pool2d(x.unsqueeze(0), 3).square().sum() * 1.3125

compiled = torch.compile(globals()[program], backend="torchrelay", dynamic=True)
right = True
for size in sizes:
    shape = (size, 5, 6) if program == "batched" else (2, size, size)
    found = torch.linspace(-1, 1, 2 * size * size * 30)[: torch.Size(shape).numel()].reshape(shape).requires_grad_()
    wanted = found.detach().clone().requires_grad_()
    compiled(found).backward()
    globals()[program](wanted).backward()
    right = right and torch.allclose(found.grad, wanted.grad, rtol=1e-5, atol=1e-7)
run = torchrelay.report()
print(json.dumps({"right": right, "misses": run.misses, "hits": run.hits + run.disk_hits, "fallbacks": run.fallbacks}))
"""


def trained(service: PrivateService, cache: Path, program: str, *sizes: int) -> dict[str, Any]:
    environment = {**os.environ, **service.environment, "TORCHRELAY_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, program, *map(str, sizes)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_first_size_does_not_matter(service: PrivateService, tmp_path: Path) -> None:
    first = trained(service, tmp_path / "a", "batched", 8, 30)
    assert first == {"right": True, "misses": 1, "hits": 0, "fallbacks": {}}
    for size in (12, 2, 100):
        found = trained(service, tmp_path / str(size), "batched", size, 8, 17)
        assert found == {"right": True, "misses": 0, "hits": 1, "fallbacks": {}}


@pytest.mark.parametrize("again", ["on another machine", "on the same machine"])
def test_a_size_that_the_first_compile_excludes_gets_code_of_its_own(
    service: PrivateService, tmp_path: Path, again: str
) -> None:
    first = 12 if again == "on another machine" else 13
    assert trained(service, tmp_path / "a", "pooled", first)["misses"] == 1
    folder = tmp_path / ("a" if again == "on the same machine" else "b")
    other = trained(service, folder, "pooled", first + 6)
    assert other == {"right": True, "misses": 1, "hits": 0, "fallbacks": {}}
    known = trained(service, tmp_path / "c", "pooled", first + 6)
    assert known == {"right": True, "misses": 0, "hits": 1, "fallbacks": {}}
