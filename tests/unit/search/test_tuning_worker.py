"""A searcher's loop: what is measured next, what is built meanwhile, and what it leaves to others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
from torchrelay.compiler.errors import CompileFailed
from torchrelay.compiler.search import compare_candidates, ranking
from torchrelay.compiler.search.function_candidates import FunctionCandidates
from torchrelay.compiler.search.search_worker import SearchWorker
from torchrelay.compiler.search.task_executor import TaskExecutor
from torchrelay.compiler.tuning import queries, records
from torchrelay.compiler.tuning.candidates import CandidateBuilds, Candidates
from torchrelay.compiler.tuning.queries import (
    CandidateAttempt,
    KnownEntries,
    SearchResult,
    TaskBatch,
    TaskReassigned,
    TaskRequest,
    TuningTask,
)
from torchrelay.compiler.tuning.records import DeviceEnvironment, Timing, TuningEntry
from torchrelay.compiler.tuning.tile_config import TileConfig

PLACE = DeviceEnvironment("GPU", "9.0", "1", "2.13", "3.7", "13.0")


def task(name: str) -> TuningTask:
    return TuningTask(id=name, problem=records.parse_problem("mm(f32[4,4], f32[4,4]) -> f32[4,4]"))


def text(warps: int) -> str:
    return f"triton_mm BLOCK_K=32, BLOCK_M=64, BLOCK_N=64, GROUP_M=8, num_stages=3, num_warps={warps}"


class Bench:
    """slow: tasks whose first candidates are not built before it rests, patience: so often in vain. faster: by how much
    each round's best is."""

    def __init__(
        self, *, slow: Collection[str] = (), patience: int = 0, rounds: int = 0, faster: float = 0.5
    ) -> None:
        self.place, self.ties = PLACE, 0.01
        self.did: list[tuple[str, str]] = []
        self._slow = slow
        self._patience = patience
        self._rounds = rounds
        self._faster = faster
        self._left: list[Future[Any]] = []
        self._best = 1.0

    def warm_up(self) -> None: ...

    def rounds(self, task: TuningTask) -> int:
        return self._rounds

    def candidates(self, task: TuningTask, around: Sequence[TileConfig] = ()) -> Candidates:
        self.did.append((task.id, "around" if around else "new"))
        return FunctionCandidates(task.problem, "cpu", {text(4): lambda operands: operands[0]}, aten=[])

    def build(self, task: TuningTask, selection: Candidates) -> CandidateBuilds:
        future: Future[Any] = Future()
        if task.id in self._slow:
            self._left.append(future)
        else:
            future.set_result(None)
        return CandidateBuilds([future])

    def rest(self, buildings: Sequence[CandidateBuilds], seconds: float) -> None:
        self.did.append(("", "rest"))
        if self._patience:
            self._patience -= 1
            time.sleep(seconds)
        else:
            self._left.pop(0).set_result(None)

    def contest(
        self,
        task: TuningTask,
        selection: Candidates,
        building: CandidateBuilds,
        *,
        begun: float,
        first: Collection[str],
        before: Callable[[str], None],
    ) -> compare_candidates.SearchOutcome:
        before(selection.candidates[0])
        self.did.append((task.id, "contest"))
        self._best *= self._faster
        timing = Timing(selection.candidates[0], self._best, self._best, self._best, 10)
        entry = TuningEntry(problem=task.problem, place=PLACE, winner=timing, candidates=1)
        return compare_candidates.SearchOutcome(entry, [timing], [], frozenset())

    def check(self, task: TuningTask) -> None: ...

    def contests(self) -> list[str]:
        return [task for task, what in self.did if what == "contest"]


class Service:
    """Gives out tasks, one each time; None: none for once. taken: those that were given to others meanwhile."""

    def __init__(self, *tasks: TuningTask | None, taken: Collection[str] = ()) -> None:
        self.left = list(tasks)
        self.taken = taken
        self.asked: list[queries.TuningQuery] = []

    def __call__(self, question: queries.TuningQuery) -> queries.TuningReply:
        self.asked.append(question)
        if isinstance(question, TaskRequest):
            if not self.left:
                return TaskBatch([], over=question.holding == 0)
            given = self.left.pop(0)
            return TaskBatch([] if given is None else [given])
        if isinstance(question, CandidateAttempt) and question.task in self.taken:
            return TaskReassigned()
        return KnownEntries([])

    def found(self) -> list[str]:
        return [question.task for question in self.asked if isinstance(question, SearchResult)]


def run(service: Service, bench: Bench, ahead: int = 4) -> None:
    SearchWorker(service, bench, ahead=ahead, progress=lambda stage, detail: None).run()


def test_what_is_built_is_measured_while_the_first_ones_compilers_work() -> None:
    service, bench = Service(*map(task, "abc")), Bench(slow=["a"])
    run(service, bench)
    assert bench.contests() == ["b", "c", "a"]
    assert service.found() == ["b", "c", "a"]
    assert bench.did.index(("", "rest")) > bench.did.index(("c", "contest")), (
        "it waits when nothing else is left"
    )


def test_who_has_more_rounds_before_him_comes_first() -> None:
    """Else the rounds of the last task would be built and measured with nothing beside them."""
    service, bench = Service(*map(task, "abcd")), Bench(rounds=1)
    run(service, bench, ahead=2)
    assert bench.contests() == ["a", "b", "a", "c", "b", "d", "c", "d"]
    assert service.found() == ["a", "b", "c", "d"]


def test_a_searcher_holds_no_more_than_it_may_and_asks_again_when_something_is_measured() -> None:
    service, bench = Service(*map(task, "abcdef")), Bench(slow="abcdef")
    run(service, bench, ahead=3)
    assert max(question.holding for question in service.asked if isinstance(question, TaskRequest)) == 2
    assert bench.contests() == list("abcdef")
    in_vain = [question.holding for question in service.asked if isinstance(question, TaskRequest)][6:]
    assert in_vain == [2, 1, 0], "not at every candidate that is built"


def test_while_compilers_work_it_asks_for_more_now_and_then() -> None:
    """A compile tells its problems one after the other: those told later are built beside the first."""
    service, bench = Service(task("a"), None, task("b"), None, task("c")), Bench(slow="abc", patience=2)
    run(service, bench)
    assert [what for _, what in bench.did][:6] == ["new", "rest", "new", "rest", "new", "rest"]
    assert bench.contests() == ["a", "b", "c"]


def test_what_was_given_to_another_is_left_to_him() -> None:
    service, bench = Service(*map(task, "abc"), taken="b"), Bench()
    run(service, bench)
    assert bench.contests() == service.found() == ["a", "c"]
    assert [
        type(question).__name__ for question in service.asked if getattr(question, "task", "") == "b"
    ] == ["CandidateAttempt"]


def test_between_two_rounds_nothing_is_tried() -> None:
    service, bench = Service(task("a")), Bench(rounds=1)
    run(service, bench)
    told = [question for question in service.asked if not isinstance(question, TaskRequest)]
    assert [question.candidate for question in told if isinstance(question, CandidateAttempt)] == [
        text(4),
        "",
        text(4),
    ]
    assert isinstance(told[-1], SearchResult)


def test_a_round_that_fails_leaves_what_was_found_before() -> None:
    class Failing(Bench):
        def contest(self, *given: Any, **named: Any) -> compare_candidates.SearchOutcome:
            if self.contests():
                raise CompileFailed("no candidate works")
            return super().contest(*given, **named)

    service = Service(task("a"))
    run(service, Failing(rounds=2))
    assert service.found() == ["a"]


def test_a_rest_ends_with_the_next_candidate_that_is_built_or_whose_compiler_is_gone() -> None:
    bench = TaskExecutor("cpu", PLACE, threads=1, beside=lambda: None, settings=ranking.DEFAULTS)
    gone, built, slow = Future[Any](), Future[Any](), Future[Any]()
    gone.cancel()
    building = CandidateBuilds([gone, built, slow])
    assert building.left() == 2
    threading.Timer(0.05, lambda: built.set_result(None)).start()
    bench.rest([building], 60.0)
    assert building.left() == 1
    threading.Timer(0.05, slow.cancel).start()
    bench.rest([building], 60.0)
    assert building.left() == 0
    bench.rest([building], 60.0)
    bench.rest([CandidateBuilds([Future()])], 0.05)  # and when its time is up


def test_what_the_default_space_tries_does_not_follow_from_what_was_measured() -> None:
    gpu, cpu = (
        TaskExecutor(device, PLACE, threads=1, beside=lambda: None, settings=ranking.DEFAULTS)
        for device in ("cuda", "cpu")
    )
    default, exhaustive = task("a"), msgspec.structs.replace(task("a"), space="exhaustive")
    assert [gpu.rounds(each) for each in (default, exhaustive)] == [0, 4]
    assert cpu.rounds(exhaustive) == 0
