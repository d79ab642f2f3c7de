"""Max-autotune: each problem measured once, known winners taken as they are, and no candidate that does harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from comparison import run, same
from torchrelay.clients.backend import RelayBackend
from torchrelay.compiler import decoding
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.request import cpu_isa, schema
from torchrelay.compiler.torch_internals import counters
from torchrelay.compiler.tuning import queries
from torchrelay.compiler.tuning.records import TuningEntry
from tuned import Outcome, Worker

FIRST = "bmm(f32[4,48,32], f32[4,32,64]) -> f32[4,48,64] {precision=highest}"
SECOND = "bmm(f32[4,48,64], f32[4,64,32]) -> f32[4,48,32] {precision=highest}"


def products(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Two problems, the first of them twice."""
    return torch.bmm(torch.bmm(x, w).relu() + torch.bmm(x * 2, w).tanh(), v)


def operands(*, requires_grad: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(3)
    sizes = (4, 48, 32), (4, 32, 64), (4, 64, 32)
    return [torch.randn(size, requires_grad=requires_grad) for size in sizes]


def requested(
    program: Callable[..., Any] = products,
    inputs: list[torch.Tensor] | None = None,
    mode: str = "max-autotune",
    **changes: Any,
) -> schema.GraphRequest:
    """What a client would send."""
    requests: list[schema.GraphRequest] = []

    def backend(gm: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        requests.append(capture(gm, examples, mode=mode, options={}).request)  # type: ignore[arg-type]
        return gm.forward

    torch.compiler.reset()
    torch.compile(program, backend=backend, fullgraph=True)(*(inputs or operands()))
    return msgspec.structs.replace(requests[0], **changes)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(tmp_path_factory.mktemp("worker") / "store") as running:
        yield running


@pytest.fixture(scope="module")
def cold(worker: Worker) -> Outcome:
    """A compile that nobody knows anything for."""
    return worker.compile(requested())


def template(cold: Outcome) -> str:
    """The candidate that Inductor generates; what it is called depends on the CPU."""
    entry = cold.found()[0]
    assert entry.runner_up is not None
    (text,) = {entry.winner.candidate, entry.runner_up.candidate} - {"aten bmm"}
    assert text.startswith("cpp_")
    return text


def elected(cold: Outcome, candidate: str) -> list[TuningEntry]:
    """What was found, with `candidate` as the winner; `template`: the generated one."""
    candidate = template(cold) if candidate == "template" else candidate
    return [
        msgspec.structs.replace(entry, winner=msgspec.structs.replace(entry.winner, candidate=candidate))
        for entry in cold.found()
    ]


def counted(outcome: Outcome) -> tuple[int, int, int]:
    """(measured here, known, measured as Inductor counts it)"""
    assert outcome.manifest is not None, outcome.error
    return outcome.manifest.searched, outcome.manifest.recalled, outcome.measured


def test_each_problem_is_measured_once_and_told(cold: Outcome) -> None:
    assert counted(cold) == (2, 0, 2)
    manifest = cold.manifest
    assert manifest is not None and manifest.verification.status == "passed"
    asked = [type(question) for question in cold.asked]
    wanted = [
        n for n, kind in enumerate(asked) if kind is queries.SearchRequest
    ]  # told as they are met, if that takes time
    assert 1 <= len(wanted) <= 3 and wanted[-1] == len(asked) - 3
    assert [kind for kind in asked if kind is not queries.SearchRequest] == [
        *[queries.EntryLookup] * 2,
        *[queries.SearchResult] * 2,
    ]
    assert [entry.problem.text() for entry in cold.found()] == [FIRST, SECOND]
    assert [m.problem for m in manifest.tuning] == [FIRST, SECOND]
    for entry, measurement in zip(cold.found(), manifest.tuning, strict=True):
        assert entry.candidates == measurement.candidates == 2
        assert entry.failed == 0
        assert entry.aten is not None and entry.runner_up is not None
        assert {entry.winner.candidate, entry.runner_up.candidate} == {"aten bmm", template(cold)}
        assert entry.aten in (entry.winner, entry.runner_up)
        assert entry.winner.candidate == measurement.winner
        assert entry.winner.low <= entry.winner.milliseconds == measurement.milliseconds <= entry.winner.high
        assert entry.winner.samples >= 10
        assert entry.error is not None and entry.error < 1e-5
        assert entry.seconds > 0
        assert decoding.convert(msgspec.to_builtins(entry), type=TuningEntry) == entry  # the limits hold


def test_where_it_was_measured_is_told(cold: Outcome) -> None:
    request, place = requested(), cold.found()[0].place
    made = request.toolchain
    assert place.device and place.driver == ""
    assert place.capability == cpu_isa.capability(request.target.cpu)
    assert (place.torch, place.triton, place.cuda) == (str(torch.__version__), made.triton, made.cuda)
    assert place.threads == request.ambient.threads > 0


def test_a_search_is_a_stage_of_its_own(cold: Outcome) -> None:
    inside = [stage for stage in cold.stages if stage[0] in ("inductor", "autotune")]
    assert ("autotune", FIRST) in inside and ("autotune", SECOND) in inside
    assert inside[inside.index(("autotune", FIRST)) + 1][0] == "inductor"
    assert cold.manifest is not None
    seconds = dict(cold.manifest.stages)
    assert seconds["autotune"] >= sum(entry.seconds for entry in cold.found()) - 0.01


def test_a_compile_whose_problems_are_known_measures_nothing_and_makes_the_same_code(
    worker: Worker, cold: Outcome
) -> None:
    warm = worker.compile(requested(), cold.found())
    assert counted(warm) == (0, 2, 0)
    assert [type(question) for question in warm.asked] == [queries.EntryLookup] * 2
    assert warm.benchmarks == 0
    assert warm.code == cold.code
    assert warm.manifest is not None and cold.manifest is not None
    assert warm.manifest.tuning == cold.manifest.tuning
    assert (cold.manifest.benchmarks, warm.manifest.benchmarks) == (0, 0), "a search's samples are its own"


def step(mode: str = "max-autotune") -> schema.GraphRequest:
    """A training step with a problem in each half."""

    def program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.bmm(x, w).relu(), v.transpose(1, 2))

    x, w, v = operands(requires_grad=True)
    return requested(program, [x, w, v.detach().transpose(1, 2).contiguous().requires_grad_()], mode)


@pytest.fixture(scope="module")
def trained(worker: Worker) -> Outcome:
    """A compile of it that nobody knows anything for."""
    return worker.compile(step())


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
def test_a_step_whose_winners_are_known_measures_nothing(worker: Worker, trained: Outcome, mode: str) -> None:
    warm = worker.compile(step(mode), trained.found())
    assert counted(warm) == (0, 2, 0)
    assert len(warm.code) == 2
    if mode == step().mode:
        assert warm.code == trained.code
    assert warm.manifest is not None and warm.manifest.verification.status == "passed"


def test_a_step_of_which_one_half_is_known_measures_the_other(worker: Worker, trained: Outcome) -> None:
    forward = [entry for entry in trained.found() if entry.problem.text() == FIRST]
    assert (len(forward), len(trained.found())) == (1, 2)
    outcome = worker.compile(step(), forward)
    assert counted(outcome) == (1, 1, 1)
    assert outcome.manifest is not None and trained.manifest is not None
    assert [(m.problem, m.uses) for m in outcome.manifest.tuning] == [
        (m.problem, m.uses) for m in trained.manifest.tuning
    ]


def test_what_inductor_times_itself_is_counted() -> None:
    from torch._inductor.runtime.benchmarking import benchmarker

    before = counters.benchmarks_run()
    benchmarker.benchmark_cpu(lambda: None, warmup=1, rep=1)
    assert counters.benchmarks_run() == before + 1


def test_the_known_winner_is_what_is_compiled_and_rendered(worker: Worker, cold: Outcome) -> None:
    known = {name: worker.compile(requested(), elected(cold, name)) for name in ("aten bmm", "template")}
    assert known["aten bmm"].code[0].count("extern_kernels.bmm(") == 3
    assert "extern_kernels.bmm(" not in known["template"].code[0]
    assert (known["aten bmm"].rendered, known["template"].rendered) == (0, 3)


def test_templates_are_rendered_as_pytorch_renders_them(worker: Worker, cold: Outcome) -> None:
    spared, whole = (
        worker.compile(requested(), elected(cold, "template"), fault=each)
        for each in ("", "is spared nothing")
    )
    assert (spared.rendered, whole.rendered) == (3, 3)
    assert spared.code == whole.code and "kernel_micro_gemm(" in spared.code[0]


@pytest.mark.parametrize("slow, winner", [("aten is slow", "template"), ("cpp is slow", "aten bmm")])
def test_the_faster_candidate_wins(worker: Worker, cold: Outcome, slow: str, winner: str) -> None:
    outcome = worker.compile(requested(), fault=slow)
    found = {entry.winner.candidate for entry in outcome.found()}
    assert found == {template(cold) if winner == "template" else winner}
    assert outcome.code == worker.compile(requested(), elected(cold, winner)).code


def test_a_winner_that_is_no_candidate_is_measured_again(worker: Worker, cold: Outcome) -> None:
    outcome = worker.compile(requested(), elected(cold, "triton_bmm BLOCK_K=32"))
    assert counted(outcome) == (2, 0, 2)


@pytest.mark.parametrize(
    "changed", [{"device": "another CPU"}, {"torch": "2.10.0"}, {"threads": 99}, {"capability": "vsx"}]
)
def test_what_was_found_elsewhere_does_not_apply(
    worker: Worker, cold: Outcome, changed: dict[str, Any]
) -> None:
    elsewhere = [
        msgspec.structs.replace(entry, place=msgspec.structs.replace(entry.place, **changed))
        for entry in cold.found()
    ]
    assert counted(worker.compile(requested(), elsewhere)) == (2, 0, 2)


def test_the_entry_that_stands_wins_over_the_one_just_found(worker: Worker, cold: Outcome) -> None:
    """Two compiles that search at once end with one winner: the first that was kept."""
    outcome = worker.compile(requested(), elected(cold, "template"), late=True)
    assert counted(outcome) == (2, 0, 2)
    assert outcome.code == worker.compile(requested(), elected(cold, "template")).code
    assert outcome.manifest is not None
    assert {measurement.winner for measurement in outcome.manifest.tuning} == {template(cold)}


def test_an_entry_whose_winner_just_failed_here_is_not_taken(worker: Worker, cold: Outcome) -> None:
    outcome = worker.compile(requested(), elected(cold, "template"), late=True, fault="cpp is wrong")
    assert outcome.manifest is not None
    assert {measurement.winner for measurement in outcome.manifest.tuning} == {"aten bmm"}


def test_a_database_that_does_not_answer_stops_no_search_and_is_told_the_next_one(worker: Worker) -> None:
    """It may be back by then; that nobody waits for it each time is the concern of whoever passes questions on."""
    outcome = worker.compile(requested(), None)
    assert counted(outcome) == (2, 0, 2)
    assert len(outcome.found()) == 2


# --- the lock ----------------------------------------------------------------------------------------------


def test_a_lock_wins_over_the_database(worker: Worker, cold: Outcome) -> None:
    locked = requested(tuning_lock=schema.TuningLock(strict=True, entries=elected(cold, "template")))
    outcome = worker.compile(locked, elected(cold, "aten bmm"))
    assert counted(outcome) == (0, 2, 0)
    assert outcome.asked == []
    assert outcome.code == worker.compile(requested(), elected(cold, "template")).code


def test_a_strict_lock_refuses_a_problem_that_it_does_not_have(worker: Worker, cold: Outcome) -> None:
    lock = schema.TuningLock(strict=True, entries=cold.found()[:1])
    outcome = worker.compile(requested(tuning_lock=lock), cold.found())
    assert outcome.error.startswith(f"tuning_unknown: the tuning lock has no winner for {SECOND} on ")
    assert outcome.asked == []


def test_a_strict_lock_refuses_a_winner_that_is_no_candidate(worker: Worker, cold: Outcome) -> None:
    lock = schema.TuningLock(strict=True, entries=elected(cold, "triton_bmm"))
    outcome = worker.compile(requested(tuning_lock=lock))
    assert outcome.error == (
        f"tuning_unknown: the tuning lock's winner for {FIRST}, triton_bmm, is no candidate here"
    )


def test_a_loose_lock_leaves_the_rest_to_the_database_and_to_a_search(worker: Worker, cold: Outcome) -> None:
    lock = schema.TuningLock(strict=False, entries=cold.found()[:1])
    assert counted(worker.compile(requested(tuning_lock=lock), cold.found())) == (0, 2, 0)
    outcome = worker.compile(requested(tuning_lock=lock))
    assert counted(outcome) == (1, 1, 1)
    assert [entry.problem.text() for entry in outcome.found()] == [SECOND]


# --- candidates that do harm -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", ["cpp crashes", "cpp hangs", "cpp raises", "cpp is wrong", "cpp computes nothing"]
)
def test_a_candidate_that_does_not_work_loses_and_harms_nobody(worker: Worker, fault: str) -> None:
    outcome = worker.compile(requested(), fault=fault)
    assert counted(outcome) == (2, 0, 2)
    for entry in outcome.found():
        assert (entry.candidates, entry.failed) == (2, 1)
        assert entry.winner.candidate == "aten bmm"
        assert entry.runner_up is None
    assert outcome.manifest is not None and outcome.manifest.verification.status == "passed"


def test_where_no_candidate_works_the_compile_says_so(worker: Worker) -> None:
    outcome = worker.compile(requested(), fault="none runs")
    assert outcome.error.startswith(f"compile_failed: no candidate for {FIRST} works: aten bmm ")
    assert "cpp_" in outcome.error


def test_where_candidates_cannot_run_nothing_is_measured_or_told(worker: Worker) -> None:
    """A worker may compile for a CPU that can more than its own."""
    outcome = worker.compile(requested(), fault="unable")
    assert counted(outcome) == (0, 0, 0)
    assert outcome.found() == []
    assert outcome.code[0].count("extern_kernels.bmm(") == 3


def test_a_template_that_does_not_compile_inside_the_graph_is_done_without(worker: Worker) -> None:
    """Inductor (2.11 to 2.13) cannot generate its batched product where both it and what is fused into it are kept."""

    def kept_twice(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = torch.bmm(x, w)
        return product, product.relu()

    request = requested(kept_twice, operands()[:2])
    outcome = worker.compile(request, fault="aten is slow")
    assert counted(outcome)[:2] == (1, 0)
    (entry,) = outcome.found()
    assert entry.winner.candidate.startswith("cpp_")
    assert outcome.manifest is not None and outcome.manifest.verification.status == "passed"
    assert [measurement.winner for measurement in outcome.manifest.tuning] == ["aten bmm"]
    assert outcome.code[0].count("extern_kernels.bmm(") == 1
    pinned = worker.compile(
        requested(
            kept_twice, operands()[:2], tuning_lock=schema.TuningLock(strict=True, entries=outcome.found())
        )
    )
    assert pinned.error.startswith("compile_failed: ")


# --- what is left as it was --------------------------------------------------------------------------------


def test_without_max_autotune_nothing_is_asked(worker: Worker) -> None:
    outcome = worker.compile(requested(mode="default"))
    assert counted(outcome) == (0, 0, 0)
    assert outcome.asked == []


def test_a_size_that_varies_is_another_problem(worker: Worker) -> None:
    inputs = operands()
    torch._dynamo.mark_dynamic(inputs[0], 1)
    outcome = worker.compile(requested(inputs=inputs))
    texts = [entry.problem.text() for entry in outcome.found()]
    assert texts and all("dynamic=0.1" in text for text in texts)


def test_a_training_step_through_the_service_agrees_with_local_compilation(remote: RelayBackend) -> None:
    """One problem forward, two backward."""

    def make() -> Callable[..., torch.Tensor]:
        return lambda x, w: torch.bmm(x, w).tanh()

    def inputs(step: int) -> tuple[torch.Tensor, ...]:
        return tuple(operands(requires_grad=True)[:2])

    local = run(make, inputs, backend="inductor", steps=1)
    tuned = run(make, inputs, backend="torchrelay", mode="max-autotune", steps=1)
    same(local, tuned, 1e-4)
