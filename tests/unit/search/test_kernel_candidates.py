"""A user-written kernel's arguments are in several copies in turn while it is measured on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torchrelay.compiler.api.tuning.kernels import KernelSpec
from torchrelay.compiler.request import schema, triton_source
from torchrelay.compiler.search import benchmark, ranking
from torchrelay.compiler.search.user_kernel_benchmark import KernelBenchmark, KernelBenchmarkOrder
from torchrelay.compiler.tuning.records import Operand

pytest.importorskip("triton", reason="needs Triton, not a GPU")

TEXT = "def nothing(x_ptr, BLOCK: tl.constexpr):\n    pass\n"


class Runner(benchmark.GpuRunner):
    """Without events and streams."""

    def __enter__(self) -> Runner:
        self._rotation = benchmark.BufferRotation()
        self._flushed = torch.empty(0)
        return self

    def _synchronize(self) -> None: ...

    def _take_group(self, copy: int, group: Sequence[int]) -> list[float | None]:
        return [1.0 if self._launch(copy, candidate) else None for candidate in group]


def test_each_take_has_the_arguments_elsewhere_and_launches_are_ready_before_the_first_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    kernel = KernelSpec(
        source=schema.KernelSource(
            "nothing",
            triton_source.module_text([], [], {"nothing": TEXT}),
            [schema.KernelConfig([("BLOCK", block)], 4, 3, 1, None) for block in (1, 2, 4)],
        ),
        grids=[(1, 1, 1)] * 3,
        tensors=[("x_ptr", Operand("float32", (4, 3), (8, 1)))],
        constants=[],
    )
    order = KernelBenchmarkOrder(kernel, "cpu", ranking.DEFAULTS)
    measured: Any = KernelBenchmark(order, lambda message: None)
    measured.make_arguments()
    inputs = measured.inputs["x_ptr"].clone()
    did: list[tuple[str, int, int]] = []

    def launcher(candidate: int) -> Callable[[], Any]:
        x = measured.arguments["x_ptr"]
        assert x.stride() == (8, 1)
        if candidate == 2:
            raise RuntimeError("does not compile")
        did.append(("bound", candidate, x.data_ptr()))
        return lambda: did.append(("launched", candidate, x.add_(1.0).data_ptr()))

    measured.launcher = launcher
    copies = []
    with Runner(measured) as runner:
        assert [runner.start(candidate) for candidate in (0, 1)] == [None, None]
        with pytest.raises(benchmark.CandidateFailed, match="does not compile"):
            runner.start(2)
        for number in range(benchmark.BufferRotation.MAX + 1):
            did.clear()
            assert runner.take([0, 1, 2, 1, 0, 2]) == [1.0, 1.0, None, 1.0, 1.0, None]
            new = 0 < number < benchmark.BufferRotation.MAX
            assert [what for what, _, _ in did] == ["bound"] * 2 * new + ["launched"] * 4
            (address,) = {address for _, _, address in did}
            copies.append(address)
    assert len(set(copies)) == benchmark.BufferRotation.MAX and copies[-1] == copies[0]
    assert torch.equal(measured.inputs["x_ptr"], inputs), "samples do not write to what is copied"
