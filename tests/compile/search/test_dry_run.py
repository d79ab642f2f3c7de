"""A compile that finds out what must be searched, has others search all of it at once, and then knows everything."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torchrelay.compiler.request import schema
from torchrelay.compiler.tuning import queries, records

sys.path.insert(0, str(Path(__file__).parent))
from test_autotune import counted, operands, requested
from tuned import Outcome, Worker

PROBLEMS, FORWARD = 4, 2
"""Two of the forward and two of the backward; for its other two products Inductor has no template."""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(tmp_path_factory.mktemp("worker") / "store") as running:
        yield running


@pytest.fixture(scope="module")
def request_() -> schema.GraphRequest:
    """A training step's. Nothing is fused into a product: Inductor cannot always generate that (decision 17)."""
    return requested(lambda x, w, v: torch.bmm(torch.bmm(x, w), v), operands(requires_grad=True))


@pytest.fixture(scope="module")
def alone(worker: Worker, request_: schema.GraphRequest) -> Outcome:
    """Nobody searches for it."""
    return worker.compile(request_)


@pytest.fixture(scope="module")
def helped(worker: Worker, request_: schema.GraphRequest, alone: Outcome) -> Outcome:
    """Others find everything, one problem at a time."""
    return worker.compile(request_, found_elsewhere=alone.found())


def wanted(outcome: Outcome) -> list[list[records.Problem]]:
    return [question.problems for question in outcome.asked if isinstance(question, queries.SearchRequest)]


def test_what_nobody_searches_is_measured_here(alone: Outcome) -> None:
    assert counted(alone) == (PROBLEMS, 0, PROBLEMS)
    assert len(alone.found()) == PROBLEMS


def test_all_problems_are_told_before_any_is_measured(alone: Outcome) -> None:
    """The first at once, those of the forward when it is lowered at the latest, then all."""
    first, *more, last = wanted(alone)
    assert len(first) == 1
    assert all(
        later[: len(earlier)] == earlier for earlier, later in itertools.pairwise([first, *more, last])
    )
    assert any(len(told) == FORWARD for told in more)
    assert set(last) == {entry.problem for entry in alone.found()} and len(last) == PROBLEMS
    kinds = [type(question) for question in alone.asked]
    assert max(i for i, kind in enumerate(kinds) if kind is queries.SearchRequest) < kinds.index(
        queries.SearchResult
    )


def test_a_compile_waits_for_others_and_measures_nothing(helped: Outcome, alone: Outcome) -> None:
    assert counted(helped) == (PROBLEMS, 0, 0)
    assert helped.found() == []
    told = [detail for stage, detail in helped.stages if "problems searched" in detail]
    assert told[0] == f"0 of {PROBLEMS} problems searched"
    assert len(told) >= 2
    assert helped.manifest is not None and alone.manifest is not None
    assert helped.manifest.tuning == alone.manifest.tuning
    assert all(measured.uses == 1 for measured in helped.manifest.tuning)


def test_a_compile_goes_on_while_others_search(
    worker: Worker, request_: schema.GraphRequest, helped: Outcome, alone: Outcome
) -> None:
    """As on a GPU: it begins again at once, and waits where it comes to what is not known yet."""
    outcome = worker.compile(request_, found_elsewhere=alone.found(), fault="goes on meanwhile")
    assert counted(outcome) == (PROBLEMS, 0, 0)
    assert outcome.code == alone.code
    for told, waits in ((helped, "backward"), (outcome, "forward")):
        stages = [stage for stage, _ in told.stages]
        last = max(index for index, stage in enumerate(stages) if stage == "aot")
        assert (stages.index("search") > last) == (waits == "forward")
    before = outcome.stages[[stage for stage, _ in outcome.stages].index("search") - 1]
    assert before == ("inductor", "forward")
    assert [stage for stage, _ in outcome.stages if stage in ("inductor", "search")][-1] == "inductor"


def test_what_is_found_no_longer_is_measured_by_who_goes_on(
    worker: Worker, request_: schema.GraphRequest, alone: Outcome
) -> None:
    outcome = worker.compile(request_, found_elsewhere=alone.found()[:2], fault="goes on, and nobody finds")
    assert counted(outcome) == (PROBLEMS, 0, PROBLEMS - 2)
    assert len(outcome.found()) == PROBLEMS - 2


def test_what_is_known_is_not_wanted_again(helped: Outcome) -> None:
    asked = wanted(helped)
    asked = asked[next(i for i, told in enumerate(asked) if len(told) == PROBLEMS) :]
    assert all(len(later) <= len(earlier) for earlier, later in itertools.pairwise(asked))
    lookups = [p for q in helped.asked if isinstance(q, queries.EntryLookup) for p in q.problems]
    assert len(lookups) == len(set(lookups)) == PROBLEMS


def test_who_searched_does_not_show_in_the_code(
    worker: Worker, request_: schema.GraphRequest, alone: Outcome, helped: Outcome
) -> None:
    warm = worker.compile(request_, alone.found())
    assert counted(warm) == (0, PROBLEMS, 0)
    assert wanted(warm) == []
    assert alone.code == helped.code == warm.code


def test_a_compile_that_knows_its_forward_has_a_dry_run_of_its_backward(
    worker: Worker, request_: schema.GraphRequest, alone: Outcome
) -> None:
    forward = wanted(alone)[-1][:FORWARD]
    known = [entry for entry in alone.found() if entry.problem in forward]
    rest = [entry for entry in alone.found() if entry.problem not in forward]
    outcome = worker.compile(request_, known, found_elsewhere=rest)
    assert counted(outcome) == (len(rest), len(known), 0)
    assert outcome.code == alone.code


def test_nobody_waits_for_ever(worker: Worker, request_: schema.GraphRequest, alone: Outcome) -> None:
    outcome = worker.compile(request_, found_elsewhere=alone.found()[:2], fault="nobody finds")
    assert counted(outcome) == (PROBLEMS, 0, PROBLEMS - 2)
    assert len(outcome.found()) == PROBLEMS - 2


def test_a_strict_lock_needs_no_dry_run(worker: Worker, alone: Outcome) -> None:
    lock = schema.TuningLock(strict=True, entries=alone.found()[:1])
    outcome = worker.compile(requested(tuning_lock=lock))
    assert outcome.error.startswith("tuning_unknown: ")
    assert outcome.asked == []


def test_a_graph_with_sizes_that_vary_has_a_dry_run_too(worker: Worker) -> None:
    inputs = operands()
    torch._dynamo.mark_dynamic(inputs[0], 1)
    request = requested(inputs=inputs)
    cold = worker.compile(request)
    assert wanted(cold)[-1] == [entry.problem for entry in cold.found()]
    helped = worker.compile(request, found_elsewhere=cold.found())
    assert counted(helped) == (len(cold.found()), 0, 0)
    assert helped.code == cold.code
