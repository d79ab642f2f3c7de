"""A model for GPUs leaves Python: compiled for cuda, held against eager there, and run by the C++ example."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.utils import cpp_extension
from torchrelay.clients.exporting.export import export
from torchrelay.clients.exporting.options import ExportOptions, read_dynamic
from torchrelay.compiler.torch_internals.inductor import aot_inductor

CPP = Path(__file__).resolve().parents[3] / "examples" / "cpp_inference" / "infer.cpp"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture
def pytorchs_own_package(tmp_path: Path) -> None:
    """Skips where a package that PyTorch makes by itself ends the process that loads it."""
    program = torch.export.export(torch.nn.Linear(8, 8).eval(), (torch.ones(4, 8),))
    file = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "pytorch.pt2"))
    if killed := aot_inductor.signal_on_load(Path(file)):
        pytest.skip(f"PyTorch's own AOTInductor package ends with {signal.Signals(killed).name} on this host")


@pytest.mark.usefixtures("pytorchs_own_package")
def test_a_package_for_cuda_agrees_with_eager_in_python_and_cpp(tmp_path: Path) -> None:
    agrees_in_python_and_cpp("aoti", "model-cuda.pt2", tmp_path)


def test_torchscript_for_cuda_agrees_with_eager_in_python_and_cpp(tmp_path: Path) -> None:
    agrees_in_python_and_cpp("torchscript", "model-cuda.torchscript.pt", tmp_path)


def agrees_in_python_and_cpp(kind: Literal["aoti", "torchscript"], name: str, folder: Path) -> None:
    told = export(
        ExportOptions(
            function="exporting:net",
            targets=["cpu", "cuda"],
            format=kind,
            dynamic=read_dynamic(["batch=1:64"]),
        ),
        folder,
        say=print,
    )
    assert [(file.format, file.target) for file in told.files] == [(kind, "cpu"), (kind, "cuda")]
    if kind == "aoti":  # TorchScript's is for no device in particular
        assert torch.cuda.get_device_name() in told.files[1].device
    if shutil.which("g++") is None:
        pytest.skip("needs g++ for the example")
    library = Path(torch.__file__).parent / "lib"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"]
    command = ["g++", "-std=c++20", "-O1", str(CPP), "-o", str(folder / "infer"), *includes]
    command += [f"-L{library}", f"-Wl,-rpath,{library}", *libraries]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
    done = subprocess.run(
        [folder / "infer", folder / name, folder / "example.pt", "cuda"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    print(name, done.stdout)
    assert done.returncode == 0 and "agrees with eager" in done.stdout, done.stdout + done.stderr
