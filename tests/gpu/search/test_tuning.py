"""Max-autotune on a GPU: Triton's templates and cuBLAS are measured once, and a compile that knows measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.request import schema
from tuned import Worker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(tmp_path_factory.mktemp("worker") / "store") as running:
        yield running


def requested(program: Callable[..., Any], *inputs: torch.Tensor) -> schema.GraphRequest:
    requests: list[schema.GraphRequest] = []

    def backend(gm: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        requests.append(capture(gm, examples, mode="max-autotune-no-cudagraphs", options={}).request)
        return gm.forward

    torch.compiler.reset()
    torch.compile(program, backend=backend, fullgraph=True)(*inputs)
    return requests[0]


def matrix(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, dtype=dtype, device="cuda")


PROGRAMS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], torch.dtype]] = {
    "mm": (torch.mm, [(512, 256), (256, 384)], torch.bfloat16),
    "mm of float32": (torch.mm, [(512, 256), (256, 384)], torch.float32),
    "bmm": (torch.bmm, [(8, 128, 64), (8, 64, 128)], torch.float16),
    "addmm with an epilogue": (
        lambda b, x, w: torch.addmm(b, x, w).relu(),
        [(384,), (512, 256), (256, 384)],
        torch.bfloat16,
    ),
    "convolution": (
        lambda x, w: torch.nn.functional.conv2d(x, w, padding=1),
        [(8, 64, 28, 28), (64, 64, 3, 3)],
        torch.float16,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_problem_is_measured_once_and_then_known(worker: Worker, name: str) -> None:
    program, sizes, dtype = PROGRAMS[name]
    request = requested(program, *(matrix(*size, dtype=dtype) for size in sizes))
    cold = worker.compile(request)
    assert cold.manifest is not None, cold.error
    assert cold.manifest.verification.status == "passed"
    found = cold.found()
    assert cold.manifest.searched == len(found) == cold.measured > 0
    for entry in found:
        print(entry.problem.text(), entry)
        assert entry.candidates > 3
        assert entry.failed < entry.candidates
        assert entry.aten is not None
        assert entry.winner.milliseconds <= entry.aten.milliseconds * 1.05
        assert entry.error is not None and entry.error < 0.05
        assert (entry.place.device, entry.place.threads) == (torch.cuda.get_device_name(), 0)
        assert entry.winner.candidate.startswith(("aten ", "triton_"))
    warm = worker.compile(request, found)
    assert warm.manifest is not None, warm.error
    assert (warm.manifest.searched, warm.manifest.recalled, warm.measured) == (0, len(found), 0)
    assert warm.code == cold.code


def test_a_compile_that_knows_everything_benchmarks_nothing(worker: Worker) -> None:
    """Not whether operands are padded (5003 is odd), nor the loops that are generated beside the products."""

    def program(b: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softmax(torch.addmm(b, x, w).relu(), dim=-1).sum(0)

    request = requested(program, matrix(5003), matrix(4096, 1024), matrix(1024, 5003))
    cold = worker.compile(request)
    assert cold.manifest is not None, cold.error
    print(cold.manifest.tuning, cold.benchmarks)
    padding = [entry for entry in cold.found() if entry.problem.op == "pad_mm.addmm"]
    assert len(padding) == 1
    assert {t.candidate for t in (padding[0].winner, padding[0].runner_up) if t} == {
        "aten addmm",
        "aten padded addmm",
    }
    assert cold.benchmarks > 0  # of generated loops
    warm = worker.compile(request, cold.found())
    assert warm.manifest is not None, warm.error
    assert (warm.manifest.searched, warm.measured, warm.benchmarks) == (0, 0, 0)
    assert warm.code == cold.code


def test_two_searches_agree(worker: Worker) -> None:
    def products(*matrices: torch.Tensor) -> list[torch.Tensor]:
        return [x @ w for x, w in zip(matrices[::2], matrices[1::2], strict=True)]

    sizes = [(m, k, n) for m in (64, 500, 2048) for k in (256, 1000) for n in (256, 3072)]
    inputs = [tensor for m, k, n in sizes for tensor in (matrix(m, k), matrix(k, n))]
    request = requested(products, *inputs)
    first, second = (
        {e.problem.text(): e.winner.candidate for e in worker.compile(request).found()} for _ in range(2)
    )
    asked = [problem for problem in first if not problem.startswith("pad_mm.")]  # 500 rows may be padded
    assert first.keys() == second.keys() and len(asked) == len(sizes)
    equal = sum(first[problem] == second[problem] for problem in first)
    assert equal >= len(first) - 1, [(p, first[p], second[p]) for p in first if first[p] != second[p]]
