"""Whether operands are padded is a problem like others: known, or measured, and the same the next time."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._inductor.fx_passes import pad_mm
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrelay.compiler.search import compare_candidates, lower_problem, ranking
from torchrelay.compiler.search.device_turn import DeviceTurn
from torchrelay.compiler.torch_internals.algorithm_selection import padding_candidates
from torchrelay.compiler.torch_internals.algorithm_selection.padding_candidates import PaddingCandidates
from torchrelay.compiler.torch_internals.dynamo.tensors import fake_tensors
from torchrelay.compiler.torch_internals.inductor import config
from torchrelay.compiler.tuning import queries, records
from torchrelay.compiler.tuning.candidates import Candidates

PLACE = records.DeviceEnvironment("a CPU", "avx2", "", "2.13.0", "", "", threads=1)
CASES: dict[str, Any] = {
    "mm": [(64, 33), (33, 70)],
    "addmm": [(70,), (64, 33), (33, 70)],
    "bmm": [(3, 64, 33), (3, 33, 70)],
}


@pytest.fixture(autouse=True)
def padded_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor pads for GPUs alone, and where it would pay; the way to the decision is the same."""
    for name in ("check_device", "has_triton", "is_mm_compute_bound"):
        monkeypatch.setattr(pad_mm, name, lambda *args: True)
    monkeypatch.setattr(pad_mm, "get_alignment_size", lambda x: 8)


def asked(op: str, choose: Any, *, tunes: bool = True, inner: Sequence[str] = ()) -> bool:
    """What Inductor decides for a product whose operands named `inner` are computed, and not inputs."""
    graph = torch.fx.Graph()
    names = ["input", "mat1", "mat2"][-len(CASES[op]) :]
    nodes = {}
    with FakeTensorMode():
        for name, size in zip(names, CASES[op], strict=True):
            node = graph.placeholder(name)
            if name in inner:
                node = graph.call_function(torch.ops.aten.relu.default, (node,))
            node.meta["val"] = torch.randn(size)
            nodes[name] = node
    tensors = [nodes[name].meta["val"] for name in ("mat1", "mat2")]
    more = {"input": nodes["input"].meta["val"]} if "input" in nodes else {}
    match: Any = types.SimpleNamespace(kwargs=nodes)
    should_pad: Any = pad_mm.should_pad
    with (
        config.inductor_config({"max_autotune_gemm": tunes}),
        padding_candidates.choosing_padding(choose),
    ):
        return bool(should_pad(match, *tensors, getattr(torch.ops.aten, op), **more))


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("choice", [0, 1])
def test_what_is_chosen_is_done_each_time(op: str, choice: int) -> None:
    problems: list[records.Problem] = []

    def choose(padding: PaddingCandidates) -> int:
        problems.append(padding.problem)
        return choice

    assert [asked(op, choose) for _ in range(2)] == [bool(choice)] * 2
    assert problems[0] == problems[1]
    assert problems[0].op == f"pad_mm.{op}"
    assert [operand.size for operand in problems[0].operands] == CASES[op]
    assert dict(problems[0].settings) == {"precision": "highest"}
    assert asked(op, lambda padding: 1 - choice) == (not choice)  # nothing was remembered


def test_what_costs_nothing_in_its_graph_is_another_problem() -> None:
    seen: list[records.Problem] = []
    asked("mm", lambda padding: seen.append(padding.problem) or 0, inner=["mat2"])
    assert dict(seen[0].settings)["excluded"] == "mat2"


def test_a_compile_that_does_not_tune_is_left_alone() -> None:
    seen: list[PaddingCandidates] = []
    with pytest.raises(Exception, match=r"CUDA|driver"):  # Inductor goes on to measure, which needs a GPU
        asked("mm", lambda padding: seen.append(padding) or 0, tunes=False)
    assert seen == []


def measured(padding: Candidates) -> queries.SearchResult:
    return compare_candidates.compare_candidates(
        padding,
        environment=PLACE,
        settings=ranking.RankingSettings(seconds=0.1),
        threads=1,
        turn=DeviceTurn("cpu"),
        failures=padding.begin_building().wait(),
        started=0.0,
    )


@pytest.mark.parametrize("op", ["mm", "bmm"])  # pad_mm pads a bias on GPUs alone
def test_both_ways_are_measured_inside_a_compile(op: str) -> None:
    found: list[queries.SearchResult] = []
    asked(op, lambda padding: found.append(measured(padding)) or 0)
    assert {timing.candidate for timing in found[0].timings} == {f"aten {op}", f"aten padded {op}"}


@pytest.mark.parametrize("op", ["mm", "bmm"])  # pad_mm pads a bias on GPUs alone
def test_a_problem_is_rebuilt_and_both_ways_are_measured(op: str) -> None:
    problems: list[records.Problem] = []
    asked(op, lambda padding: problems.append(padding.problem) or 0, inner=["mat2"])
    task = queries.TuningTask(id="t", problem=problems[0])
    with lower_problem.in_force(task):
        padding = lower_problem.lower_problem(task, "cpu")
        found = measured(padding)
    assert found.entry.problem == problems[0]
    assert {timing.candidate for timing in found.timings} == {f"aten {op}", f"aten padded {op}"}
    assert found.failures == []


def test_a_little_faster_is_not_worth_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[float] = []
    monkeypatch.setattr(ranking, "rank", lambda *args, settings, **rest: kept.append(settings.ties))
    padding = PaddingCandidates(
        "mm",
        fake_tensors.fake_operands(
            [records.parse_operand("f32[64,33]"), records.parse_operand("f32[33,70]")], "cpu"
        ),
        [],
    )
    with pytest.raises(AttributeError):  # what follows the ranking
        compare_candidates.compare_candidates(
            padding,
            environment=PLACE,
            settings=ranking.DEFAULTS,
            threads=1,
            turn=DeviceTurn("cpu"),
            failures={},
            started=0.0,
        )
    assert kept == [0.1]
