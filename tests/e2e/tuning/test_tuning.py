"""What one script's compile measured, another's takes from the team's database: through a whole service."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = """
import sys
import torch
import torchrelay

torch.manual_seed(1)
x, w, v = (torch.randn(size) for size in ((4, 48, 32), (4, 32, 64), (4, 64, 32)))
between = {"relu": torch.relu, "tanh": torch.tanh}[sys.argv[1]]

def products(x, w, v):
    return torch.bmm(between(torch.bmm(x, w)), v)

out = torch.compile(products, backend="torchrelay", mode="max-autotune")(x, w, v)
torch.testing.assert_close(out, products(x, w, v), rtol=1e-4, atol=1e-4)
"""


def compiled(service: PrivateService, script: Path, between: str, **more: str) -> artifact_manifest.Manifest:
    """The manifest of the one artifact that the script's run made, on a machine of its own."""
    machine = script.parent / between
    environment = {
        **os.environ,
        **service.environment,
        "TORCHRELAY_MODE": "require",
        "TORCHRELAY_PREFETCH": "0",
        "TORCHRELAY_CACHE_DIR": str(machine),
        "XDG_STATE_HOME": str(machine / "state"),
        **more,
    }
    command = [sys.executable, str(script), between]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    (file,) = [path for path in (machine / "artifacts").rglob("*") if len(path.stem) == 64]
    return container.read_manifest(file.read_bytes())


def winners(manifest: artifact_manifest.Manifest) -> dict[str, str]:
    return {each.problem: each.winner for each in manifest.tuning}


def test_another_graph_with_the_same_problems_measures_nothing(
    service: PrivateService, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    first = compiled(service, script, "relu")
    assert (first.searched, first.recalled) == (2, 0)
    second = compiled(service, script, "tanh")
    assert (second.searched, second.recalled) == (0, 2)
    assert second.key != first.key
    assert winners(second) == winners(first)
    assert len(winners(first)) == 2
