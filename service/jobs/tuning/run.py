"""Runs one tuning job: searches its operators, compiles its graphs and kernels, and records each result.

Operators go to the search queue. Graphs are compiled one after the other, and only while a worker is idle. A dispatcher
that takes the job over continues with the items that have not ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec

from ....compiler.api import compiles
from ....compiler.api.training.events import StateChanged
from ....compiler.api.tuning import kernels
from ....compiler.api.tuning.jobs import (
    ENDED,
    ItemState,
    KernelTuneItem,
    OperatorTuneItem,
    TuneItem,
    TuneProgress,
    TuneResult,
)
from ....compiler.artifact import manifest as artifact_manifest
from ....compiler.errors import CompileFailed, RelayError
from ....compiler.tuning.queries import SearchRequest, SearchResult, TuningQuery, TuningTask
from ....compiler.tuning.records import DeviceEnvironment, Problem, TuningEntry, parse_problem_text
from ...admission.admit import Admission
from ...base.async_tasks import run_together
from ...cache.artifact_cache import ArtifactCache
from ...compile.search.compile_queries import OnQuery
from ...compile.search.database import TuningDatabase
from ...compile.search.queue import SearchQueue
from ...compile.search.task import SearchTarget, SearchTask
from ...storage.redis.retry import retry_while_down
from ..compiles import JobCompiles
from ..records import FieldValue, JobEvent
from ..run import JobLost, JobRun
from .records import TuningJobRecord, TuningJobs, pack, unpack, waiting

_TIMINGS = 256
LEAST_TIMINGS = 16
ALL_TIMINGS = 1 << 16
"""Timings that all results of a job have together, about. Each result has those of its fastest candidates."""
_FAILURES = 64
_WHY = 300
_BUDGET = "the job's budget was spent before"


@dataclass(frozen=True, kw_only=True)
class TuningJobParts:
    """What runs need of the rest of the service."""

    namespace: str
    jobs: TuningJobs
    queue: SearchQueue
    compiles: JobCompiles
    listening: Callable[[str, OnQuery], AbstractContextManager[None]]
    cache: ArtifactCache
    tunings: TuningDatabase
    admission: Admission


class TuningJobRun(JobRun[TuningJobRecord]):
    def __init__(self, parts: TuningJobParts, loaded: TuningJobRecord, lease: str) -> None:
        super().__init__(parts.jobs, loaded, lease)
        self._parts = parts
        self._items = dict(loaded.item_progress)
        self._results = dict(loaded.results)
        self._target = SearchTarget(loaded.job.toolchain, loaded.job.target, loaded.job.threads)
        self._tasks: dict[int, SearchTask] = {}
        self._devices: dict[DeviceEnvironment, None] = {}
        """Devices that have measured problems of the job."""
        self._devices_known = asyncio.Event()
        """A device is known, or all operators have ended."""
        self._recordings: set[asyncio.Task[None]] = set()
        self._timings = max(LEAST_TIMINGS, min(_TIMINGS, ALL_TIMINGS // len(loaded.items)))

    def snapshot(self) -> TuningJobRecord:
        bodies = {n: body for n, body in self.loaded.bodies.items() if not self._succeeded(n)}
        return msgspec.structs.replace(
            super().snapshot(), bodies=bodies, item_progress=self._items, results=self._results
        )

    def stop(self) -> None:
        """Cancel the searches that have not ended."""
        for task in self._tasks.values():
            task.cancel()
        for recording in self._recordings:
            recording.cancel()

    async def run(self) -> None:
        """End all items, then the job. Raises JobLost."""
        put_back: list[int] = []
        if self._progress.resumes != self.loaded.resumes:
            put_back = [n for n in self._items if not self._succeeded(n)]
            for n in put_back:
                del self._items[n]
            self._progress = msgspec.structs.replace(
                self._progress,
                resumes=self.loaded.resumes,
                spent_before=self._progress.spent,
                trials_before=self._progress.trials,
                ended=self._count_ended(),
            )
        await self._record_job(parts={":progress": dict.fromkeys(put_back, "")}, state="running")
        left = [n for n in range(len(self.loaded.items)) if not self._ended(n)]
        operators = [n for n in left if isinstance(self.loaded.items[n], OperatorTuneItem)]
        operators.sort(key=lambda n: -_ceiling(self.loaded.items[n]))
        for data in self._results.values():
            for result in await asyncio.to_thread(unpack, data):
                self._add_device(result.entry.place)
        if not operators:
            self._devices_known.set()
        try:
            await run_together(
                self._compile_all([n for n in left if n not in set(operators)]),
                *(self._search(n) for n in operators),
            )
        except BaseExceptionGroup as failed:
            if failed.subgroup(JobLost) is not None:
                raise JobLost from None
            raise
        done = StateChanged(state="done", at=time.time())
        await retry_while_down(lambda: self._jobs.end(self.id, self.lease, done))

    # --- operators -----------------------------------------------------------------------------------------

    async def _search(self, n: int) -> None:
        item = self.loaded.items[n]
        assert isinstance(item, OperatorTuneItem)
        if self._check_budget():
            await self._end(n, "skipped", _BUDGET)
            return
        search = TuningTask(
            id=f"{self.id}.{n}",
            problem=item.problem,
            exact=False,
            space=item.space,
            samples=self.loaded.job.budget.samples,
        )
        task = self._parts.queue.submit(search, self._target, functools.partial(self._on_searching, n))
        self._tasks[n] = task
        outcome = await task.outcome()
        del self._tasks[n]
        if isinstance(outcome, SearchResult):
            self._add_device(outcome.entry.place)
            known = not outcome.timings
            result = self._result(n, outcome, known=known)
            await self._end(
                n,
                "known" if known else "done",
                _winner(outcome.entry),
                [result],
                spent=0.0 if known else outcome.entry.seconds,
                trials=0 if known else outcome.entry.candidates,
            )
        elif self._check_budget():
            await self._end(n, "skipped", _BUDGET)
        else:
            await self._end(n, "failed", outcome)

    def _on_searching(self, n: int, worker: str) -> None:
        if not self._ended(n):
            self._items[n] = searching = self._progress_of(n, "searching", worker)
            task = asyncio.create_task(self._record_search(n, searching))
            self._recordings.add(task)
            task.add_done_callback(self._recordings.discard)

    async def _record_search(self, n: int, searching: TuneProgress) -> None:
        if self._items[n] is searching:  # it has not ended meanwhile
            with contextlib.suppress(JobLost):  # the item's end finds it, too
                await self._record_item(n)

    def _check_budget(self) -> bool:
        """Whether the budget is spent. If so, cancel the searches that have not begun."""
        budget, progress = self.loaded.job.budget, self._progress
        spent = bool(
            (budget.seconds and progress.spent - progress.spent_before >= budget.seconds)
            or (budget.trials and progress.trials - progress.trials_before >= budget.trials)
        )
        if spent:
            for task in self._tasks.values():
                if task.state == "queued":
                    task.cancel()
        return spent

    # --- graphs and kernels --------------------------------------------------------------------------------

    async def _compile_all(self, numbers: Sequence[int]) -> None:
        for n in numbers:
            if self._check_budget():
                await self._end(n, "skipped", _BUDGET)
                continue
            try:
                results, detail = await self._compile(n)
            except RelayError as error:
                await self._end(n, "failed", error.message)
            else:
                measured = [r for r in results if not r.known]
                await self._end(
                    n,
                    "done" if measured else "known",
                    detail,
                    results,
                    spent=sum(r.entry.seconds for r in measured),
                    trials=sum(r.entry.candidates for r in measured),
                )

    async def _compile(self, n: int) -> tuple[list[TuneResult], str]:
        """Compile a graph or kernel; its results and a detail for people. Raises the compile's error."""
        parts, item = self._parts, self.loaded.items[n]
        body = self.loaded.bodies[n]
        request = await parts.admission.parse(body, namespace=parts.namespace)
        queries = _QueryLog(parts.queue)
        with parts.listening(request.key, queries):
            found, _ = await parts.compiles.compiled(
                request,
                body,
                source=True,
                on_refused=functools.partial(self._on_refused, n),
                on_progress=functools.partial(self._on_compile_progress, n),
            )
        manifest = await retry_while_down(lambda: parts.cache.manifest(found))
        entries = list(queries.entries.values())
        for entry in entries:
            self._add_device(entry.place)
        uses = {tuned.problem: tuned.uses for tuned in manifest.tuning}
        if isinstance(item, KernelTuneItem):
            uses = {kernels.problem(item.kernel).text(): 1}
        if not uses.keys() <= queries.entries.keys():
            entries += await self._stored(item, manifest)
        results: dict[str, TuneResult] = {}
        for entry in entries:
            text = entry.problem.text()
            if text in uses and text not in results:
                search = queries.searched.get(text)
                if search is not None and search.entry != entry:
                    search = None
                result = self._result(n, search or SearchResult(entry), known=search is None)
                results[text] = msgspec.structs.replace(result, graphs=[(request.key, uses[text])])
        if isinstance(item, KernelTuneItem):
            if not results:
                raise CompileFailed("compiled, and nothing was measured: the worker's log says why")
            return list(results.values()), _winner(next(iter(results.values())).entry)
        return list(results.values()), _count(len(manifest.tuning))

    async def _stored(self, item: TuneItem, manifest: artifact_manifest.Manifest) -> list[TuningEntry]:
        """What the database has for an artifact's problems, on the devices of this job."""
        problems = [
            problem for m in manifest.tuning if (problem := parse_problem_text(m.problem)) is not None
        ]
        if isinstance(item, KernelTuneItem):
            problems = [kernels.problem(item.kernel)]
        await self._devices_known.wait()
        found: list[TuningEntry] = []
        for device in self._devices:
            for start in range(0, len(problems), 256):
                batch = problems[start : start + 256]
                found += await retry_while_down(functools.partial(self._parts.tunings.known, device, batch))
        return found

    async def _on_refused(self, n: int, error: RelayError) -> None:
        self._items[n] = self._progress_of(n, "waiting", error.message)
        await self._record_item(n)

    async def _on_compile_progress(self, n: int, progress: compiles.CompileProgress) -> None:
        detail = "compiles" if progress.stage == "aot" else progress.detail
        if progress.stage in ("aot", "autotune") and detail:
            self._items[n] = self._progress_of(n, "searching", detail)
            await self._record_item(n)

    # --- recording -----------------------------------------------------------------------------------------

    async def _end(
        self,
        n: int,
        state: ItemState,
        detail: str,
        results: Sequence[TuneResult] = (),
        *,
        spent: float = 0.0,
        trials: int = 0,
    ) -> None:
        """Record the end of an item. Raises JobLost."""
        packed = await asyncio.to_thread(pack, results) if results else b""
        self._items[n] = self._progress_of(n, state, detail, spent)
        if packed:
            self._results[n] = packed
        self._progress = msgspec.structs.replace(
            self._progress,
            spent=self._progress.spent + spent,
            trials=self._progress.trials + trials,
            ended=self._count_ended(),
        )
        self._check_budget()
        if all(
            self._ended(m) for m, item in enumerate(self.loaded.items) if isinstance(item, OperatorTuneItem)
        ):
            self._devices_known.set()
        await self._record_item(n)

    async def _record_item(self, n: int) -> None:
        """Record how far an item is, and its results. Raises JobLost."""
        data = msgspec.json.encode(self._items[n])
        parts: dict[str, dict[int, FieldValue]] = {":progress": {n: data}}
        if n in self._results:
            parts[":results"] = {n: self._results[n]}
        if self._succeeded(n):  # it does not run again, even if the job is resumed: its request goes
            parts[":bodies"] = {n: ""}
        await self._record_job([JobEvent("item", data)], parts)

    def _result(self, n: int, outcome: SearchResult, *, known: bool) -> TuneResult:
        item = self.loaded.items[n]
        failures = [
            msgspec.structs.replace(failure, why=failure.why[:_WHY])
            for failure in outcome.failures[:_FAILURES]
        ]
        return TuneResult(
            item=waiting(n, item).text,
            line=item.line,
            entry=outcome.entry,
            timings=[] if known else outcome.timings[: self._timings],
            failures=[] if known else failures,
            known=known,
            ceiling=_ceiling(item),
        )

    def _add_device(self, device: DeviceEnvironment) -> None:
        self._devices[device] = None
        self._devices_known.set()

    def _progress_of(self, n: int, state: ItemState, detail: str, seconds: float = 0.0) -> TuneProgress:
        item = waiting(n, self.loaded.items[n])
        return msgspec.structs.replace(item, state=state, detail=detail[:_WHY], seconds=round(seconds, 3))

    def _ended(self, n: int) -> bool:
        return n in self._items and self._items[n].state in ENDED

    def _succeeded(self, n: int) -> bool:
        return n in self._items and self._items[n].state in ("done", "known")

    def _count_ended(self) -> dict[ItemState, int]:
        return dict(Counter(each.state for each in self._items.values() if each.state in ENDED))


class _QueryLog:
    """The tuning queries of one compile, and their answers, by the problem's text.

    entries: all winners. searched: results of searches that the compile made, or waited for in the queue.
    """

    def __init__(self, queue: SearchQueue) -> None:
        self.entries: dict[str, TuningEntry] = {}
        self.searched: dict[str, SearchResult] = {}
        self._queue = queue
        self._awaited: set[Problem] = set()

    def __call__(self, query: TuningQuery, entries: Sequence[TuningEntry]) -> None:
        for entry in entries:
            text = entry.problem.text()
            if entry.problem in self._awaited and text not in self.entries:
                found = self._queue.result(entry.place, entry.problem)
                if found is not None and found.timings:
                    self.searched[text] = found
            self.entries[text] = entry
        match query:
            case SearchResult(entry):
                self.searched[entry.problem.text()] = query
            case SearchRequest(_, problems):
                self._awaited |= set(problems)


def _count(problems: int) -> str:
    if not problems:
        return "nothing to search: no operator has several candidates"
    return f"{problems} problem{'s' * (problems != 1)}"


def _ceiling(item: TuneItem) -> bool:
    return isinstance(item, OperatorTuneItem) and item.ceiling


def _winner(entry: TuningEntry) -> str:
    return f"{entry.winner.candidate[:200]} {entry.winner.milliseconds:.4g} ms"
