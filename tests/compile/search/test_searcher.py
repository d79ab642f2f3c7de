"""A searcher: problems rebuilt from their texts alone and measured; what cannot be rebuilt is said to be unfit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from torchrelay.compiler.graph.toolchain import local_target, local_toolchain
from torchrelay.compiler.search import lower_problem, search_worker
from torchrelay.compiler.torch_internals.algorithm_selection import operator_candidates
from torchrelay.compiler.tuning.queries import TuningTask
from torchrelay.compiler.tuning.records import parse_problem

sys.path.insert(0, str(Path(__file__).parent))
from searching import Told, search
from test_autotune import requested
from tuned import Worker


def described(name: str, shape: str, **settings: str) -> TuningTask:
    """A task for an operator that somebody has described."""
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return TuningTask(id=name, problem=parse_problem(shape, tuple(sorted(named.items()))), exact=False)


FLEX = "f32[2,4,256,64]"
SEARCHED = [
    described("bmm", "bmm(f32[4,48,32], f32[4,32,64]) -> f32[4,48,64]"),
    described("constant", "mm(f32[64,32], f32[32,64]) -> f32[64,64]", constants="1", precision="high"),
    described("bias", "addmm(bf16[64], bf16[64,32], bf16[32,64]) -> bf16[64,64]", constants="2"),
    described("single", "mm(f32[64,32], f32[32,64]) -> f32[64,64]"),
    described("sum", "mm_plus_mm(f32[32,48], f32[48,64], f32[32,48], f32[48,64]) -> f32[32,64]"),
    described("conv", "convolution(f32[2,8,16,16], f32[8,8,3,3]) -> f32[2,8,14,14]", arg__stride="(1, 1)"),
    described("copy", "copy(f32[1024,1024]) -> f32[1024,1024]"),
    described("integers", "int_mm(i8[64,32], i8[32,64]) -> i32[64,64]"),
]
MM, ADDMM, BMM = (
    "mm(f32[4,4], f32[4,4]) -> f32[4,4]",
    "addmm(f32[4], f32[4,4], f32[4,4]) -> f32[4,4]",
    "bmm(f32[4,48,32], f32[4,32,64]) -> f32[4,48,64]",
)
IMPORT = "__import__('os')"
UNFIT = [
    (described("shapes", "mm(f32[64,32], f32[31,64]) -> f32[64,64]"), "must have same reduction dim"),
    (described("operator", "system(f32[2,2]) -> f32[2,2]"), "system cannot be rebuilt"),
    (described("code", ADDMM, arg__alpha=IMPORT), "no literal"),
    (described("large", ADDMM, arg__alpha="'a'*9"), "no literal"),
    (described("text", ADDMM, arg__alpha="'a'"), "no argument of an operator"),
    (described("argument", MM, arg__out="1"), "no argument out"),
    (described("setting", MM, cudnn__benchmark="True"), "cannot be applied"),
    (described("dynamic", MM, dynamic="0.0"), "cannot be applied"),
    (described("space", MM, max_autotune_gemm_backends=IMPORT), "no search space"),
    (described("flex", f"flex_attention({FLEX}, {FLEX}, {FLEX}) -> {FLEX}", mask="causal"), "one candidate"),
    (described("mask", f"flex_attention({FLEX}, {FLEX}, {FLEX}) -> {FLEX}", mask=IMPORT), "no mask of none"),
    (described("precision", MM, precision="low"), "is none of high, highest, medium"),
    (
        TuningTask(id="another", problem=parse_problem(BMM, (("precision", "high"), ("sources", "0")))),
        "it is another problem: bmm",
    ),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    store = tmp_path_factory.mktemp("store")
    tasks = [*SEARCHED, *(task for task, _ in UNFIT)]
    return search(tasks, local_target("cpu"), local_toolchain(), store)


def test_every_task_gets_an_answer_and_the_searcher_ends(told: Told) -> None:
    assert told.status == 0, told.log
    assert told.found().keys() == {task.id for task in SEARCHED}, told.unfit()
    assert told.unfit().keys() == {task.id for task, _ in UNFIT}


@pytest.mark.parametrize("task, why", UNFIT, ids=[task.id for task, _ in UNFIT])
def test_what_cannot_be_rebuilt_is_said_to_be_unfit(told: Told, task: TuningTask, why: str) -> None:
    assert why in told.unfit()[task.id]


@pytest.mark.parametrize("task", SEARCHED, ids=lambda task: task.id)
def test_a_described_operator_is_completed_and_measured(told: Told, task: TuningTask) -> None:
    found = told.found()[task.id]
    entry = found.entry
    assert entry.problem.op == task.problem.op
    assert set(task.problem.settings) <= set(entry.problem.settings)
    assert [timing.candidate for timing in found.timings][:1]
    assert sorted(told.tried(task.id)) == sorted(
        [timing.candidate for timing in found.timings] + [failure.candidate for failure in found.failures]
    )
    assert entry.winner in found.timings
    assert found.timings == sorted(found.timings, key=lambda timing: timing.milliseconds)
    assert len(found.timings) == entry.candidates - entry.failed
    assert entry.default is not None and entry.default.candidate.startswith("aten ")
    assert entry.aten is not None and entry.aten.milliseconds <= entry.default.milliseconds
    if task.id in ("bmm", "constant", "bias"):
        assert entry.candidates > 1 and entry.error is not None


def test_a_candidate_is_named_before_it_runs(told: Told) -> None:
    kinds = [type(q).__name__ for q in told.asked if getattr(q, "task", "") == "bmm"]
    assert kinds == ["CandidateAttempt", "CandidateAttempt", "SearchResult"]


def test_what_is_known_is_not_measured_again(told: Told, tmp_path: Path) -> None:
    entry = told.found()["bmm"].entry
    again = search([SEARCHED[0]], local_target("cpu"), local_toolchain(), tmp_path, known=[entry])
    assert again.status == 0, again.log
    assert [(q.entry, q.timings) for q in again.found().values()] == [(entry, [])]
    assert again.tried("bmm") == []


def test_what_ended_a_process_is_not_tried_again(told: Told, tmp_path: Path) -> None:
    """Nor does a search with a budget take longer than that."""
    bmm = SEARCHED[0]
    avoided = TuningTask(
        id="b", problem=bmm.problem, exact=False, avoid=("aten bmm",), seconds=0.2, samples=12
    )
    again = search([avoided], local_target("cpu"), local_toolchain(), tmp_path)
    found = again.found()["b"]
    assert "aten bmm" not in again.tried("b")
    assert [f.candidate for f in found.failures] == ["aten bmm"]
    assert (found.entry.aten, found.entry.failed) == (None, 1)
    assert max(timing.samples for timing in found.timings) <= 12


def test_an_only_candidate_is_tried_again_though_its_process_was_killed(told: Told, tmp_path: Path) -> None:
    """It was hardly its fault, and there is no other."""
    copy = next(task for task in SEARCHED if task.id == "copy")
    (only,) = told.tried("copy")
    killed = TuningTask(id="copy", problem=copy.problem, exact=False, avoid=(only,))
    again = search([killed], local_target("cpu"), local_toolchain(), tmp_path)
    assert again.tried("copy") == [only], again.unfit()
    assert again.found()["copy"].entry.winner.candidate == only


def test_a_compiles_problem_is_rebuilt_exactly_and_its_winner_taken(tmp_path: Path) -> None:
    """What a searcher finds for the problem of a compile is what that compile would have measured."""
    with Worker(tmp_path / "store") as worker:
        request = requested()
        cold = worker.compile(request)
        problems = [entry.problem for entry in cold.found()]
        tasks = [TuningTask(id=str(i), problem=problem) for i, problem in enumerate(problems)]
        told = search(
            tasks, request.target, request.toolchain, tmp_path / "store", threads=request.ambient.threads
        )
        assert told.status == 0 and told.unfit() == {}, told.log
        entries = [told.found()[task.id].entry for task in tasks]
        assert [(e.problem, e.place, e.candidates) for e in entries] == [
            (e.problem, e.place, e.candidates) for e in cold.found()
        ]
        warm = worker.compile(request, entries)
    assert warm.manifest is not None, warm.error
    assert (warm.manifest.searched, warm.manifest.recalled, warm.measured) == (0, len(entries), 0)


def test_a_small_budget_builds_few_of_many_candidates_and_the_same_ones_each_time() -> None:
    """An exhaustive space has thousands for a GPU."""
    selection = operator_candidates.OperatorCandidates.__new__(operator_candidates.OperatorCandidates)
    selection.choices = [f"choice {i}" for i in range(100)]
    selection.candidates = ["aten mm", *(f"triton_mm {i}" for i in range(98)), "aten bias_addmm"]
    selection.aten = [0, 99]
    selection.thin(5)
    assert [selection.candidates[i] for i in selection.aten] == ["aten mm", "aten bias_addmm"]
    assert len(selection.candidates) == len(selection.choices) == 7
    numbers = [int(text.split()[1]) + 1 for text in selection.candidates if text.startswith("triton_")]
    assert selection.choices[1:-1] == [f"choice {number}" for number in numbers]
    kept = list(selection.candidates)
    selection.thin(5)
    assert selection.candidates == kept
    whole = TuningTask(id="w", problem=parse_problem(MM), exact=False)
    assert search_worker.max_built(whole) == search_worker.MAX_BUILT
    assert search_worker.max_built(replace(whole, seconds=0.1)) == 32
    assert search_worker.max_built(replace(whole, seconds=1e6)) == search_worker.MAX_BUILT


def test_moved_inputs_are_the_same_numbers_in_other_memory_and_share_it_as_before():
    task = described(
        "addmm", "addmm(f32[48], f32[32,64], f32[64,48]:1,64) -> f32[32,48]", precision="highest"
    )
    with lower_problem.in_force(task):
        selection = lower_problem.lower_problem(task, "cpu")
        selection.begin_building().wait()
        selection.prepare(seed=3)
        results, addresses = [], []
        for place in (0, 1, 2, 1, 0):
            assert selection.move(place)
            results.append(selection.run(0, lambda once: once()).clone())
            given = selection._arguments
            tensors = [*given.triton.input_tensors, *given.extern.input_tensors, given.extern.output_tensor]
            addresses.append([tensor.data_ptr() for tensor in tensors])
        assert all(result.equal(results[0]) for result in results)
        assert addresses[0] == addresses[4] and addresses[1] == addresses[3]
        assert not {*addresses[0]} & {*addresses[1]} and not {*addresses[1]} & {*addresses[2]}
        shared = [[each.index(address) for address in each] for each in addresses]
        assert shared[0] == shared[1] == shared[2]
        selection.close()
