"""A trained model becomes a program for phones: ExecuTorch's own runtime agrees with eager, or there is no file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrelay.clients.exporting.export import export
from torchrelay.clients.exporting.options import ExportOptions
from torchrelay.compiler.errors import ExportFailed

EXPORTING = Path(__file__).parent / "parts" / "exporting.py"
PACKAGES = Path(sys.prefix) / "executorch"
"""`make test-slow` puts it there: an installation would change this environment's torch."""

needs_executorch = pytest.mark.skipif(
    not (PACKAGES / "executorch").exists() or not torch.__version__.startswith("2.13."),
    reason="there is no ExecuTorch for this torch beside the environment",
)

LOADER = """\
import sys, torch
from executorch.runtime import Runtime
from exporting import net
program = Runtime.get().load_program(sys.argv[1])
forward = program.load_method("forward")
model = net()[0].eval()
for rows in (1, 7, 64):
    inputs = torch.randn(rows, 8)
    torch.testing.assert_close(forward.execute((inputs,))[0], model(inputs))
print("agrees with eager")
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(EXPORTING, folder)
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def exported(folder: Path, function: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "torchrelay.clients.cli", "export", f"exporting:{function}", "--local", "-o", "out"]
    return run(folder, *command, "--format", "pte", *flags)


@pytest.mark.slow
@needs_executorch
def test_the_program_computes_what_eager_does_at_every_size(tmp_path: Path) -> None:
    done = exported(tmp_path, "net", "--dynamic", "batch=1:64", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = json.loads(done.stdout)["files"]
    assert (file["name"], file["format"], file["how"]) == ("model.pte", "pte", "XNNPACK")
    assert {check["shapes"][0][0] for check in file["checks"]} == {1, 4, 32, 64}
    assert all(check["difference"] <= check["tolerance"] for check in file["checks"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.pte", "export.json", "example.pt"}
    done = run(tmp_path, "-c", LOADER, "out/model.pte")
    assert done.returncode == 0 and "agrees with eager" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@needs_executorch
def test_operators_that_xnnpack_lacks_are_named(tmp_path: Path) -> None:
    done = exported(tmp_path, "two_inputs", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = json.loads(done.stdout)["files"]
    assert file["how"].startswith("XNNPACK; portable kernels:") and "cumsum" in file["how"]


@pytest.mark.slow
@needs_executorch
def test_a_program_that_differs_from_eager_is_not_handed_out(tmp_path: Path) -> None:
    done = exported(tmp_path, "worse")
    assert done.returncode == 1 and "model.pte" in done.stderr and "differs from eager" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_without_executorch_an_export_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "executorch", None)
    with pytest.raises(ExportFailed, match=r"needs ExecuTorch: .*pip install executorch, in"):
        export(ExportOptions(function="exporting:net", format="pte"), tmp_path, say=print)
    assert list(tmp_path.iterdir()) == []


def test_a_target_of_a_program_for_phones_is_wrong_use(tmp_path: Path) -> None:
    done = exported(tmp_path, "net", "--target", "cuda")
    assert done.returncode == 2 and "a .pte has no target" in done.stderr, done.stderr
