"""The worked examples: their jobs can be sent as they are, and their kernels compute what PyTorch does.

The kernels run in Triton's interpreter, on the CPU, in a process of their own: what triton.jit makes depends on the
environment of the import. tests/gpu/search/test_kernel_jobs.py runs them on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton, not a GPU")

from torchrelay.clients.jobfiles import tune_file
from torchrelay.clients.jobfiles.imported_kernels import resolve_kernel
from torchrelay.compiler.api.tuning import kernels
from torchrelay.compiler.request import codec, schema
from torchrelay.compiler.request.validate import check_request

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "kernels"
NAMES = ["pointwise", "reduction", "softmax", "matmul"]
TOOLCHAIN = schema.Toolchain("cp312", "2.11.0+cu128", "3.6.0", "12.8", "linux-x86_64")
GPU = schema.Target(kind="cuda", name="NVIDIA H200", capability="9.0", units=132, cpu=[])

RUN = """
import torch
from triton.runtime import interpreter
class OfAnInt(type):
    def __instancecheck__(cls, value): return isinstance(value, int)
class Int(metaclass=OfAnInt):  # NumPy 2.4 makes no int of an array with one element, and Triton up to 3.7 asks for it
    def __new__(cls, value): return value.item() if hasattr(value, "item") else int(value)
interpreter.int = Int
from torchrelay.examples.kernels import matmul, pointwise, reduction, softmax
draw = torch.Generator().manual_seed(0)
def random(*shape): return torch.randn(*shape, generator=draw)
x, bias = random(37, 100), random(100)
torch.testing.assert_close(pointwise.bias_gelu(x, bias, 256), pointwise.reference(x, bias), rtol=1e-5, atol=1e-5)
torch.testing.assert_close(reduction.square_sum(x, 64), reduction.reference(x), rtol=1e-5, atol=1e-5)
for rows in (1, 4):
    torch.testing.assert_close(softmax.softmax(x, rows), softmax.reference(x), rtol=1e-5, atol=1e-6)
(m, k), n = (70, 100), 90
a, b = random(m, k), random(k, n)
out = torch.full((m, n), float("nan"))
matmul.matmul_kernel.fn[(3 * 3,)](a, b, out, m, n, k, TILE_M=32, TILE_N=32, TILE_K=32, GROUP=8)
torch.testing.assert_close(out, matmul.reference(a, b), rtol=1e-4, atol=1e-4)
print("all right")
"""


def test_the_kernels_agree_with_their_references() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all right"


@pytest.mark.parametrize("name", NAMES)
def test_a_job_can_be_sent_as_it_is(name: str) -> None:
    spec = tune_file.load(FOLDER / f"{name}.yaml")
    assert spec.kernels
    for item in spec.kernels:
        kernel = resolve_kernel(item, FOLDER)
        assert len(kernel.grids) == len(kernel.source.configs) >= 2
        check_request(kernels.request(kernel, TOOLCHAIN, GPU), codec.Limits())


def test_every_example_has_a_job() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(NAMES)
    assert {path.stem for path in FOLDER.glob("*.py")} == {"__init__", *NAMES}
