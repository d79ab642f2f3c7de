"""A graph on a GPU at the levels of its kernels, from a real service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = """
import torch

def loss(rows):
    return torch.nn.functional.softplus(rows).mean()

torch.compile(loss, backend="torchrelay")(torch.ones(64, 64, device="cuda"))
"""

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def test_kernels_are_shown_as_triton_ptx_and_sass_with_the_programs_line(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    levels = [f"--level={level}" for level in ("captured", "code", "ptx", "sass", "assembly")]
    command = [
        sys.executable,
        "-m",
        "torchrelay.clients.cli",
        "lower",
        str(script),
        *levels,
        "--format",
        "json",
    ]
    with PrivateService(tmp_path_factory.mktemp("s")) as service:
        environment = {**os.environ, **service.environment, "TORCHRELAY_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stderr
    (graph,) = json.loads(done.stdout)
    texts = {level["name"]: "\n".join(part["text"] for part in level["parts"]) for level in graph["levels"]}
    line = f"{script}:5 in loss, code: return torch.nn.functional.softplus(rows).mean()"
    for level in ("captured", "code", "ptx", "sass"):
        assert line in texts[level], level
    assert "@triton.jit" in texts["code"] and ".visible .entry" in texts["ptx"]
    assert "EXIT" in texts["sass"] and texts["assembly"] == ""
