"""Each rule of advice: said on its side of its threshold, with its number, and not on the other. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kineto import ADD, ALL_REDUCE, GEMM, SGEMM, Trace
from torchrelay.clients.reports.profiling import kineto_trace
from torchrelay.clients.reports.profiling.advice import Advice, advice, of_steps
from torchrelay.clients.reports.profiling.memory_timeline import TensorSnapshot
from torchrelay.clients.reports.profiling.summary import ProfileContext, ProfileSummary, summarize

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def busy(took: float = 1000) -> Trace:
    """One step in which a product on Tensor Cores takes nearly all the time."""
    built = Trace()
    built.step(1, 0, took)
    built.kernel(GEMM, 10, took - 20, op="aten::mm")
    return built


def summary(built: Trace, tmp_path: Path, rank: int = 0, **facts: Any) -> ProfileSummary:
    given = {"world_size": 2, "first": 0, "device": "cuda", "capability": [9, 0], **facts}
    return summarize(
        kineto_trace.read_trace(built.write(tmp_path / "t.json")), ProfileContext(rank=rank, **given)
    )


def said(built: Trace, tmp_path: Path, **facts: Any) -> dict[str, Advice]:
    return {each.rule: each for each in advice([summary(built, tmp_path, **facts)])}


def test_nothing_is_said_of_a_busy_gpu(tmp_path: Path) -> None:
    assert said(busy(), tmp_path) == {}


@pytest.mark.parametrize(("took", "expected"), [(90, False), (110, True)])
def test_a_loader_that_is_waited_for(tmp_path: Path, took: float, expected: bool) -> None:
    built = Trace()
    built.step(1, 0, 1000)
    built.add("user_annotation", LOADER, 0, took)
    built.kernel(GEMM, took, 1000 - took, op="aten::mm")
    found = said(built, tmp_path)
    assert ("loader" in found) is expected
    if expected:
        assert found["loader"].number == pytest.approx(0.11)
        assert "11% of the time (from 10%)" in found["loader"].text


@pytest.mark.parametrize(("slow", "expected"), [(400, False), (600, True), (1000, True)])
def test_products_without_tensor_cores(tmp_path: Path, slow: float, expected: bool) -> None:
    built = Trace()
    built.step(1, 0, 1000)
    built.kernel(SGEMM, 0, slow, op="aten::mm")
    built.kernel(GEMM, slow, 1000 - slow, op="aten::mm")
    found = said(built, tmp_path)
    assert ("tensor_cores" in found) is expected
    if slow == 1000:
        assert found["tensor_cores"].text.startswith("No Tensor Cores are used: 0%")
    if expected:
        assert found["tensor_cores"].number == pytest.approx(1 - slow / 1000)
        assert said(built, tmp_path, capability=[6, 1]) == {}, "a device that has none"


def test_kernels_that_nobody_knows_are_no_reason_to_say_anything_of_tensor_cores(tmp_path: Path) -> None:
    built = Trace()
    built.step(1, 0, 1000)
    built.kernel("triton_tem_fused_mm_0", 0, 1000)
    assert said(built, tmp_path) == {}


@pytest.mark.parametrize(("gap", "expected"), [(250, False), (350, True)])
def test_a_batch_that_is_too_small(tmp_path: Path, gap: float, expected: bool) -> None:
    built = Trace()
    built.step(1, 0, 1000)
    built.kernel(GEMM, gap, 1000 - gap, op="aten::mm")
    built.memory(500, 100, 0x10, 1000)
    found = said(
        built, tmp_path, memory={"cuda:0": 10_000}, snapshots={"cuda:0": [TensorSnapshot(), TensorSnapshot()]}
    )
    assert ("small" in found) is expected
    if expected:
        assert "35% of the time (from 30%), and 10% of its memory is used" in found["small"].text


@pytest.mark.parametrize(("kernels", "took", "expected"), [(400, 2, True), (400, 8, False), (100, 2, False)])
def test_many_tiny_kernels(tmp_path: Path, kernels: int, took: float, expected: bool) -> None:
    built = Trace()
    built.step(1, 0, 10.0 * kernels)
    for number in range(kernels):
        built.kernel(ADD, 10.0 * number, took)
    found = said(built, tmp_path)
    assert ("tiny" in found) is expected
    if expected:
        assert found["tiny"].text.startswith("100% of 400 kernels a step (from 50%) take less than 5 µs")


@pytest.mark.parametrize(("exposed", "expected"), [(120, False), (200, True)])
def test_communication_that_nothing_hides(tmp_path: Path, exposed: float, expected: bool) -> None:
    built = Trace()
    built.step(1, 0, 1000)
    built.kernel(GEMM, 0, 1000 - exposed, op="aten::mm")
    built.kernel(ALL_REDUCE, 1000 - 2 * exposed, 2 * exposed, stream=20)
    found = said(built, tmp_path)
    assert ("communication" in found) is expected
    if expected:
        assert "takes 20% of the time (from 15%); 50% of it is hidden" in found["communication"].text


def test_a_host_that_waits_for_the_gpu_in_every_step(tmp_path: Path) -> None:
    def built(waits: int) -> Trace:
        made = Trace()
        made.step(1, 0, 1000)
        made.kernel(GEMM, 0, 900, op="aten::mm")
        for number in range(waits):
            made.add("cpu_op", "aten::_local_scalar_dense", 200.0 * number, 50)
            made.add("cuda_runtime", "cudaStreamSynchronize", 200.0 * number, 50)
        return made

    assert "waits" not in said(built(1), tmp_path), "a loss is read once a step"
    found = said(built(3), tmp_path)["waits"]
    assert found.number == 3
    assert "3.0 times a step (more than 1;" in found.text


def test_a_number_that_is_on_the_host_is_not_waited_for(tmp_path: Path) -> None:
    """An optimizer reads each parameter's count of steps, a reducer asks for events that are long past."""
    built = Trace()
    built.step(1, 0, 1000)
    built.kernel(GEMM, 0, 900, op="aten::mm")
    for number in range(90):
        built.add("cpu_op", "aten::_local_scalar_dense", 10.0 * number, 4)
        built.add("cuda_runtime", "cudaEventSynchronize", 10.0 * number + 5, 2)
    built.add("cuda_runtime", "cudaStreamSynchronize", 960, 30)
    assert "waits" not in said(built, tmp_path)


@pytest.mark.parametrize(("limit", "expected"), [(1050, True), (2000, False)])
def test_memory_that_is_nearly_full(tmp_path: Path, limit: int, expected: bool) -> None:
    built = busy()
    built.memory(500, 100, 0x10, 1000)
    found = said(
        built, tmp_path, memory={"cuda:0": limit}, snapshots={"cuda:0": [TensorSnapshot(), TensorSnapshot()]}
    )
    assert ("memory" in found) is expected
    if expected:
        assert "cuda:0 is 95% full at its peak (from 90%)" in found["memory"].text


def test_copies_from_memory_that_is_not_pinned(tmp_path: Path) -> None:
    built = busy()
    built.add("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 10, 500, bytes=1 << 20, stream=7)
    assert "pageable" not in said(built, tmp_path)
    built.add("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 10, 30, bytes=1 << 20, stream=7)
    assert said(built, tmp_path)["pageable"].number == pytest.approx(0.03)


def test_an_optimizer_that_takes_long(tmp_path: Path) -> None:
    built = Trace()
    built.step(1, 0, 1000)
    built.kernel(GEMM, 0, 900, op="aten::mm")
    built.add("user_annotation", "Optimizer.step#AdamW.step", 700, 250)
    (found,) = said(built, tmp_path).values()
    assert "25% of the host's time (from 20%), and the GPU has nothing to do 10% of the time" in found.text
    assert found.cost == pytest.approx(0.10), "all that the GPU waits"


def test_an_optimizer_that_takes_long_while_the_gpu_is_busy(tmp_path: Path) -> None:
    built = busy()
    built.add("user_annotation", "Optimizer.step#AdamW.step", 700, 250)
    assert said(built, tmp_path) == {}


def test_the_rank_that_the_others_wait_for(tmp_path: Path) -> None:
    def rank(number: int, work: float) -> ProfileSummary:
        built = Trace()
        built.step(1, 0, 1000)
        built.kernel(GEMM, 0, work, op="aten::mm")
        built.kernel(ALL_REDUCE, work, 1000 - work, stream=20)
        return summary(built, tmp_path, rank=number)

    even = advice([rank(0, 900), rank(1, 870)])
    assert "uneven" not in {each.rule for each in even}
    found = {each.rule: each for each in advice([rank(0, 600), rank(1, 600), rank(2, 960)])}
    assert found["uneven"].ranks == [2]
    assert found["uneven"].number == pytest.approx(1.6)
    assert found["communication"].ranks == [0, 1]


def test_what_costs_most_comes_first_and_each_rule_speaks_once(tmp_path: Path) -> None:
    built = Trace()
    built.step(1, 0, 1000)
    built.add("user_annotation", LOADER, 0, 500)
    built.kernel(SGEMM, 500, 150, op="aten::mm")
    one = summary(built, tmp_path)
    found = advice([one, summary(built, tmp_path, rank=1)])
    assert [each.rule for each in found] == ["loader", "small", "tensor_cores"]
    assert all(each.ranks == [0, 1] for each in found)


def test_steps_alone_tell_of_waiting_and_uneven_ranks() -> None:
    assert of_steps({0: [1.0, 1.0]}, {0: [0.0, 0.1]}) == []
    (found,) = of_steps({0: [1.0, 1.0], 1: [1.0, 1.0]}, {0: [0.0, 0.0], 1: [0.5, 0.5]})
    assert (found.rule, found.number, found.ranks) == ("loader", 0.5, [1])
    (found,) = of_steps({0: [1.0], 1: [1.0], 2: [1.5]}, {})
    assert (found.rule, found.ranks) == ("uneven", [2])
    assert of_steps({}, {}) == []
