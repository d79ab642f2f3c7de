"""Gateways whose workers search in this process, for tests of batch jobs.

Run as a script it is one such gateway: `python tune_parts.py <settings JSON> <seconds of a search> <file>`. Sizes of
problems may follow, which each of its compiles waits for.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx2
import msgspec
from search_parts import SearchPool
from service_parts import TARGET, TOOLCHAIN, ArtifactPool, GatewayProcess, Running, server_sent_events
from torchrelay.compiler import decoding
from torchrelay.compiler.api import compiles
from torchrelay.compiler.api.tuning.jobs import (
    OperatorTuneItem,
    TuneItem,
    TuneRequest,
    TuneResult,
    TuneResultsReply,
)
from torchrelay.compiler.request import schema
from torchrelay.compiler.tuning import queries
from torchrelay.compiler.tuning.queries import EntryLookup, SearchResult, TuningTask, UnsupportedTask
from torchrelay.compiler.tuning.records import CandidateFailure, DeviceEnvironment, Timing, TuningEntry
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.gateway.server import create_server
from tuning_parts import PLACE, problem
from waiting import until, wait_until

CEILINGS = 2
"""Items that a job of one dtype has beside its own: a copy and a large product."""


class Searchers(SearchPool):
    """Searches that look their problem up first, as a worker's do, and take `seconds` each.

    unfit: sizes of problems that cannot be searched. file: gets a line for each problem that is measured.
    """

    seconds: float = 0.0
    file: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.measured: Counter[str] = Counter()
        self.unfit: set[int] = set()
        self.spaces: list[str] = []
        self.samples: list[int] = []
        self.go = threading.Event()
        self.go.set()

    async def _search(
        self,
        worker: str,
        place: DeviceEnvironment,
        task: TuningTask,
        ask: Callable[[queries.TuningQuery], Coroutine[Any, Any, queries.TuningReply]],
    ) -> None:
        await until(self.go.is_set, seconds=600)
        await asyncio.sleep(self.seconds)
        if task.problem.operands[0].size[0] in self.unfit:
            await ask(UnsupportedTask(task.id, "it does not fit the device"))
            return
        known = await ask(EntryLookup(place, [task.problem]))
        if entries := queries.entries_of(known):
            await ask(SearchResult(entries[0], task.id))
            return
        self.spaces.append(task.space)
        self.samples.append(task.samples)
        timings = [Timing(name, 1.0 + at, 1.0, 4.0, 10) for at, name in enumerate(("triton_mm", "aten mm"))]
        entry = TuningEntry(
            problem=task.problem, place=place, winner=timings[0], aten=timings[1], candidates=3, seconds=1.5
        )
        self.measured[task.problem.text()] += 1
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(f"{task.problem.text()}\n")
        await ask(
            SearchResult(entry, task.id, timings, [CandidateFailure("triton_mm 2", "too much shared memory")])
        )


UNKNOWN = schema.Toolchain(python="", torch="", triton="", cuda="", platform="")
"""The toolchain of a worker that has not started."""


class SearchingPool(ArtifactPool):
    """Workers a and b, which compile and search. gone: there are none."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.searchers = Searchers()
        self.target = TARGET
        self.gone = False
        self.state: Literal["idle", "busy"] = "idle"
        self.processors = 0
        """How many each worker has; 0: not known."""
        self.starting: list[str] = []
        """Workers of which nothing is known yet, for `starts`."""
        self.starts = TARGET
        self.others: list[schema.Target] = []
        """Targets of further workers, which do nothing."""

    def room(self, toolchain: schema.Toolchain, target: schema.Target) -> int | None:
        return 0 if self.state == "busy" else super().room(toolchain, target)

    def workers(self) -> list[compiles.WorkerInfo]:
        names = [] if self.gone else list(self.searchers.up)
        told = [
            compiles.WorkerInfo(n, TOOLCHAIN, self.target, self.state, 0, processors=self.processors)
            for n in names
        ]
        told += [
            compiles.WorkerInfo(f"other{n}", TOOLCHAIN, of, "idle", 0) for n, of in enumerate(self.others)
        ]
        return told + [compiles.WorkerInfo(n, UNKNOWN, self.starts, "starting", 0) for n in self.starting]

    def search_devices(self, toolchain: schema.Toolchain, target: schema.Target) -> list[Any]:
        return self.searchers.search_devices(toolchain, target)

    async def search(self, order: bytes, *, worker: str, **rest: Any) -> None:
        await self.searchers.search(order, worker=worker, **rest)


class SearchingGateway(GatewayProcess):
    """A gateway in a process of its own, to be killed; its searches take `seconds` and are told in `file`.

    wanted: sizes of problems that each of its compiles waits for.
    """

    script = __file__

    def __init__(
        self,
        settings: dict[str, Any],
        seconds: float,
        file: Path,
        *,
        wanted: Sequence[int] = (),
        port: int = 0,
    ) -> None:
        super().__init__(settings, seconds, str(file), *map(str, wanted), port=port)


def operator(size: int, line: int = 1, **fields: Any) -> OperatorTuneItem:
    return OperatorTuneItem(line, problem(size), **fields)


def job(*items: TuneItem, **fields: Any) -> TuneRequest:
    return TuneRequest(**{"name": "a job", "items": list(items), "threads": 1, "file": "job.yaml", **fields})


def begin(http: httpx2.Client, request: TuneRequest) -> httpx2.Response:
    return http.post("/v1/tunes", content=msgspec.json.encode(request))


def with_workers(gateway: Running) -> Running:
    """Once it knows its workers: a job that comes before has no device to search on."""
    with gateway.http() as client:
        wait_until(lambda: client.get("/v1/workers").json(), 30)
    return gateway


def begun(http: httpx2.Client, *items: TuneItem, **fields: Any) -> str:
    """The id of a job that was taken."""
    answer = begin(http, job(*items, **fields))
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def shown(http: httpx2.Client, job: str) -> dict[str, Any]:
    answer = http.get(f"/v1/tunes/{job}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["job"])


def ended(http: httpx2.Client, job: str, *, seconds: float = 60) -> dict[str, Any]:
    """The job, once it has ended."""
    wait_until(lambda: shown(http, job)["state"] in ("done", "cancelled"), seconds=seconds)
    return shown(http, job)


def states(http: httpx2.Client, job: str) -> list[tuple[str, str]]:
    """Kind and state of each item."""
    return [(item["kind"], item["state"]) for item in http.get(f"/v1/tunes/{job}").json()["progress"]]


def results(http: httpx2.Client, job: str) -> list[TuneResult]:
    found: list[TuneResult] = []
    cursor = ""
    while True:
        answer = http.get(f"/v1/tunes/{job}/results", params={"cursor": cursor})
        assert answer.status_code == 200, answer.text
        page = decoding.from_json(answer.content, type=TuneResultsReply)
        found += page.results
        cursor = page.next
        if not cursor:
            return found


def events(http: httpx2.Client, job: str, after: str = "") -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(id, name, data) of each server-sent event."""
    return server_sent_events(http, f"/v1/tunes/{job}/events", after)


if __name__ == "__main__":
    pool = SearchingPool()
    pool.searchers.seconds = float(sys.argv[2])
    pool.searchers.file = Path(sys.argv[3])
    if wanted := [problem(int(size)) for size in sys.argv[4:]]:
        pool.questions, pool.patient = [msgspec.msgpack.encode(queries.SearchRequest(PLACE, wanted))], True
    create_server(ServiceSettings(**decoding.from_json(sys.argv[1])), pool).run()
