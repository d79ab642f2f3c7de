"""A model for GPUs leaves Python: compiled for cuda, held against eager there, and run by the C++ example."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension
from torchrelay.clients.exporting.export import export
from torchrelay.clients.exporting.options import ExportOptions, read_dynamic

CPP = Path(__file__).resolve().parents[3] / "examples" / "cpp_inference" / "infer.cpp"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def test_a_package_for_cuda_agrees_with_eager_in_python_and_cpp(tmp_path: Path) -> None:
    told = export(
        ExportOptions(
            function="exporting:net",
            targets=["cpu", "cuda"],
            format="both",
            dynamic=read_dynamic(["batch=1:64"]),
        ),
        tmp_path,
        say=print,
    )
    assert [(file.format, file.target) for file in told.files] == [
        ("aoti", "cpu"),
        ("torchscript", "cpu"),
        ("aoti", "cuda"),
        ("torchscript", "cuda"),
    ]
    assert torch.cuda.get_device_name() in told.files[2].device
    if shutil.which("g++") is None:
        pytest.skip("needs g++ for the example")
    library = Path(torch.__file__).parent / "lib"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"]
    command = ["g++", "-std=c++20", "-O1", str(CPP), "-o", str(tmp_path / "infer"), *includes]
    command += [f"-L{library}", f"-Wl,-rpath,{library}", *libraries]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
    for name in ("model-cuda.pt2", "model-cuda.torchscript.pt"):
        done = subprocess.run(
            [tmp_path / "infer", tmp_path / name, tmp_path / "example.pt", "cuda"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        print(name, done.stdout)
        assert done.returncode == 0 and "agrees with eager" in done.stdout, done.stdout + done.stderr
