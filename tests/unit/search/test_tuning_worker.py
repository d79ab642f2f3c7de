"""A search worker's loop: what is measured next, what is built meanwhile, and what it skips."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

from torchrelay.compiler.errors import CompileFailed
from torchrelay.compiler.search import ranking
from torchrelay.compiler.search.device_turn import DeviceTurn
from torchrelay.compiler.search.search_worker import SearchWorker, TaskExecutor
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
    UnsupportedTask,
)
from torchrelay.compiler.tuning.records import DeviceEnvironment, Timing, TuningEntry

PLACE = DeviceEnvironment("GPU", "9.0", "1", "2.13", "3.7", "13.0")


def task(name: str) -> TuningTask:
    return TuningTask(id=name, problem=records.parse_problem("mm(f32[4,4], f32[4,4]) -> f32[4,4]"))


CANDIDATE = "triton_mm BLOCK_K=32, BLOCK_M=64, BLOCK_N=64, GROUP_M=8, num_stages=3, num_warps=4"


class Executor:
    """A TaskExecutor that builds and measures nothing. slow: tasks whose candidates are built only while it waits,
    after `vain_waits` waits in which none is built."""

    def __init__(self, *, slow: Collection[str] = (), vain_waits: int = 0) -> None:
        self.environment = PLACE
        self.did: list[tuple[str, str]] = []
        self._slow = slow
        self._vain_waits = vain_waits
        self._left: list[Future[Any]] = []

    def warm_up(self) -> None: ...

    def candidates(self, task: TuningTask) -> Candidates:
        self.did.append((task.id, "new"))
        found: Any = SimpleNamespace(problem=task.problem, candidates=[CANDIDATE])
        return cast(Candidates, found)

    def build(self, task: TuningTask, selection: Candidates) -> CandidateBuilds:
        future: Future[Any] = Future()
        if task.id in self._slow:
            self._left.append(future)
        else:
            future.set_result(None)
        return CandidateBuilds([future])

    def wait_for_build(self, builds: Sequence[CandidateBuilds], seconds: float) -> None:
        self.did.append(("", "wait"))
        if self._vain_waits:
            self._vain_waits -= 1
            time.sleep(seconds)
        else:
            self._left.pop(0).set_result(None)

    def measure(
        self,
        task: TuningTask,
        selection: Candidates,
        builds: CandidateBuilds,
        *,
        started: float,
        before_first_run: Callable[[str], None],
    ) -> SearchResult:
        before_first_run(selection.candidates[0])
        self.did.append((task.id, "measure"))
        timing = Timing(selection.candidates[0], 1.0, 1.0, 1.0, 10)
        entry = TuningEntry(problem=task.problem, place=PLACE, winner=timing, candidates=1)
        return SearchResult(entry, timings=[timing])

    def check_device(self, task: TuningTask) -> None: ...

    def measured(self) -> list[str]:
        return [task for task, what in self.did if what == "measure"]


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


def run(service: Service, executor: Executor, max_held: int = 4) -> None:
    worker = SearchWorker(
        service, cast(TaskExecutor, executor), max_held=max_held, progress=lambda stage, detail: None
    )
    worker.run()


def test_what_is_built_is_measured_while_the_first_ones_compilers_work() -> None:
    service, executor = Service(*map(task, "abc")), Executor(slow=["a"])
    run(service, executor)
    assert executor.measured() == ["b", "c", "a"]
    assert service.found() == ["b", "c", "a"]
    assert executor.did.index(("", "wait")) > executor.did.index(("c", "measure")), (
        "it waits when nothing else is left"
    )


def test_a_search_worker_holds_no_more_than_it_may_and_requests_again_after_a_measurement() -> None:
    service, executor = Service(*map(task, "abcdef")), Executor(slow="abcdef")
    run(service, executor, max_held=3)
    assert max(question.holding for question in service.asked if isinstance(question, TaskRequest)) == 2
    assert executor.measured() == list("abcdef")
    in_vain = [question.holding for question in service.asked if isinstance(question, TaskRequest)][6:]
    assert in_vain == [2, 1, 0], "not at every candidate that is built"


def test_while_compilers_work_it_requests_more_tasks_now_and_then() -> None:
    """A compile reports its problems one after the other: later ones are built beside the first."""
    service = Service(task("a"), None, task("b"), None, task("c"))
    executor = Executor(slow="abc", vain_waits=2)
    run(service, executor)
    assert [what for _, what in executor.did][:6] == ["new", "wait", "new", "wait", "new", "wait"]
    assert executor.measured() == ["a", "b", "c"]


def test_a_task_that_was_given_to_another_worker_is_skipped() -> None:
    service, executor = Service(*map(task, "abc"), taken="b"), Executor()
    run(service, executor)
    assert executor.measured() == service.found() == ["a", "c"]
    assert [
        type(question).__name__ for question in service.asked if getattr(question, "task", "") == "b"
    ] == ["CandidateAttempt"]


def test_each_candidate_is_reported_before_it_runs_and_then_the_result() -> None:
    service = Service(task("a"))
    run(service, Executor())
    sent = [question for question in service.asked if not isinstance(question, TaskRequest)]
    assert [question.candidate for question in sent if isinstance(question, CandidateAttempt)] == [CANDIDATE]
    assert isinstance(sent[-1], SearchResult)


def test_a_search_that_fails_is_reported_and_the_next_one_begins() -> None:
    class Failing(Executor):
        def measure(self, task: TuningTask, *given: Any, **named: Any) -> SearchResult:
            if task.id == "a":
                raise CompileFailed("no candidate works")
            return super().measure(task, *given, **named)

    service = Service(*map(task, "ab"))
    run(service, Failing())
    assert [question.task for question in service.asked if isinstance(question, UnsupportedTask)] == ["a"]
    assert service.found() == ["b"]


def test_a_wait_ends_with_the_next_candidate_that_is_built_or_whose_compiler_is_gone() -> None:
    executor = TaskExecutor("cpu", PLACE, threads=1, turn=DeviceTurn("cpu"), settings=ranking.DEFAULTS)
    gone, built, slow = Future[Any](), Future[Any](), Future[Any]()
    gone.cancel()
    builds = CandidateBuilds([gone, built, slow])
    assert builds.left() == 2
    threading.Timer(0.05, lambda: built.set_result(None)).start()
    executor.wait_for_build([builds], 60.0)
    assert builds.left() == 1
    threading.Timer(0.05, slow.cancel).start()
    executor.wait_for_build([builds], 60.0)
    assert builds.left() == 0
    executor.wait_for_build([builds], 60.0)
    executor.wait_for_build([CandidateBuilds([Future()])], 0.05)  # and when its time is up
