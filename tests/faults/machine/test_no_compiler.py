"""A machine without a compiler that loses the service: training goes on eagerly, with one warning that says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, warnings
import torch, torchrelay

def step(x):
    x = x.sin() * 1.375
    torch._dynamo.graph_break()
    return x.cos().sum()

x = torch.linspace(-1, 1, 8, requires_grad=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step_compiled = torch.compile(step, backend="torchrelay")
    for _ in range(3):
        step_compiled(x).backward()
expected = torch.autograd.grad(step(y := x.detach().requires_grad_()), y)[0]
torch.testing.assert_close(x.grad, 3 * expected)
found = torchrelay.report()
print(json.dumps({
    "told": [(str(w.message), w.filename, w.lineno) for w in caught if w.category is torchrelay.FallbackWarning],
    "fallbacks": found.fallbacks, "eager": found.eager, "outcomes": [g.outcome for g in found.graphs]}))
"""

CALLED = 1 + SCRIPT.splitlines().index("        step_compiled(x).backward()")


def run(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script on a machine without g++ and without a gateway."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    for name in ("sh", "uname", "ldconfig"):
        if (found := shutil.which(name)) and not (tmp_path / "bin" / name).exists():
            (tmp_path / "bin" / name).symlink_to(found)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
    environment |= {
        "PATH": str(tmp_path / "bin"),
        "HOME": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHRELAY_URL": "http://127.0.0.1:1",
        "TORCHRELAY_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHRELAY_STATE_DIR": str(tmp_path / "state"),
    }
    environment.pop("CXX", None)
    return subprocess.run(
        [sys.executable, str(script)],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_graphs_run_eagerly_with_one_warning_and_are_counted(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["fallbacks"] == {"gateway_unreachable": 2}
    assert (found["eager"], found["outcomes"]) == (2, ["eager"] * 2)
    (fallback, *_), (eager, *_) = found["told"]
    assert fallback.startswith("torchrelay: compiled locally: ")
    assert eager.startswith("torchrelay: not compiled, a graph runs eagerly: ")
    assert "InvalidCxxCompiler" in eager and "needs a C++ compiler" in eager
    assert {(file, line) for _, file, line in found["told"]} == {(str(tmp_path / "script.py"), CALLED)}


@pytest.mark.parametrize(
    ("mode", "error"), [("off", "InvalidCxxCompiler"), ("require", "GatewayUnreachable")]
)
def test_modes_off_and_require_raise(tmp_path: Path, mode: str, error: str) -> None:
    """Mode `off` is Inductor, with its errors; mode `require` raises before anything is compiled here."""
    done = run(tmp_path, TORCHRELAY_MODE=mode)
    assert done.returncode == 1 and error in done.stderr.splitlines()[-1] + done.stderr, done.stderr
    assert "eagerly" not in done.stderr
