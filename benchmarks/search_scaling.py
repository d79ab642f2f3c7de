"""Simulates how a graph's searches spread over more GPUs than the host has, from recorded durations.

    python benchmarks/search_scaling.py                            # a GPT-2 of 12 layers
    python benchmarks/search_scaling.py --gpus 1,2,4,8 --processors 16

The scheduler of searches, its queue in Redis, a compile's wait (compiler/search/in_compile.py) and the search workers'
loop (compiler/search/search_worker.py) are the service's own. What they wait for is simulated (simulated_time.py):
each configuration takes as long to build as was recorded (recorded/gpt2_search.json), on --processors processors;
samples are as long as PyTorch's kernel was on an H200, times a factor drawn for each configuration, and measure.rank
decides on them. So the seconds are not those of a GPU; two simulations differ only by the scheduling. Writes
search_scaling.json and search_scaling.png.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import logging
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import structlog
from redis.asyncio import Redis
from support.local_redis import redis_server
from support.simulated_time import Pool, Processors, SimulatedLoop, simulated_loop
from torchrelay.compiler import decoding
from torchrelay.compiler.api import compiles
from torchrelay.compiler.errors import NoWorker
from torchrelay.compiler.request import schema
from torchrelay.compiler.search import ranking as search_ranking
from torchrelay.compiler.search.in_compile import CompileSearch
from torchrelay.compiler.search.search_worker import TASKS_HELD, SearchWorker, TaskExecutor
from torchrelay.compiler.torch_internals.triton import compile_workers
from torchrelay.compiler.tuning import queries, records
from torchrelay.compiler.tuning.candidates import CandidateBuilds, Candidates
from torchrelay.compiler.tuning.queries import TuningTask
from torchrelay.compiler.tuning.records import DeviceEnvironment, Problem, TuningEntry
from torchrelay.compiler.tuning.tile_config import TileConfig, parse_tile_config, slowest_first
from torchrelay.examples.harness.table import print_table
from torchrelay.service.admission.compile_request import CompileRequest
from torchrelay.service.base.async_tasks import TaskSupervisor
from torchrelay.service.base.metrics import GatewayMetrics
from torchrelay.service.compile.search.compile_queries import CompileQueries
from torchrelay.service.compile.search.database import TuningDatabase
from torchrelay.service.compile.search.scheduler import SearchScheduler
from torchrelay.service.compile.search.task import SearchTarget
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts
from torchrelay.workers.pool import SearchDevice

RECORDED = Path(__file__).parent / "recorded" / "gpt2_search.json"
QUESTION_SECONDS = 0.01
"""On its way from a job to the gateway and back."""
LOAD_SECONDS = 0.02
"""To load what was built, run it once and compare what it computed."""
SAMPLE_SECONDS = 8e-5
"""A write that empties the L2, and the events around it."""
NOISE = 0.01
"""Of a sample."""
AOT_SECONDS, FORWARD_SECONDS, BACKWARD_SECONDS = 4.0, 2.5, 3.5
"""Of a dry run: when the first problem that wants padding is met, and how long each half is lowered."""
LAYERS = 12
"""Each meets a layer's problems again, and what is new may be told then."""


class Recorded(msgspec.Struct):
    """milliseconds: PyTorch's own kernel's. rebuild: seconds to make the candidates. builds: seconds of a processor,
    by configuration_name; the first `offered` of them are Inductor's own. half: in which the problem is met, and when,
    as a share of it."""

    problem: str
    milliseconds: float
    rebuild: float
    offered: int
    builds: dict[str, float]
    half: str
    when: float


class Recording(msgspec.Struct):
    """about: where and how it was taken."""

    about: str
    problems: list[Recorded]


def configuration_name(c: TileConfig) -> str:
    return f"{c.block_m}x{c.block_n}x{c.block_k}/{c.stages}/{c.warps}/{c.group_m}"


def configuration_from(name: str) -> TileConfig:
    tile, stages, warps, group = name.split("/")
    m, n, k = map(int, tile.split("x"))
    return TileConfig("mm", m, n, k, int(stages), int(warps), int(group))


def text_of(c: TileConfig) -> str:
    return (
        f"triton_mm BLOCK_K={c.block_k}, BLOCK_M={c.block_m}, BLOCK_N={c.block_n}, GROUP_M={c.group_m}, "
        f"num_stages={c.stages}, num_warps={c.warps}"
    )


class PlayedCandidates(msgspec.Struct):
    """As much of candidates.Candidates as a searcher's loop looks at."""

    problem: Problem
    candidates: list[str]
    aten: list[int]
    device: str = "cuda"


class PlayedBench:
    """A TaskExecutor on which nothing runs."""

    def __init__(
        self,
        loop: SimulatedLoop,
        place: DeviceEnvironment,
        recorded: Mapping[Problem, Recorded],
        pool: Pool,
        *,
        scale: float,
        start: float,
    ) -> None:
        self.environment = place
        self.busy = 0.0
        """Seconds in which something was measured."""
        self._loop = loop
        self._recorded = recorded
        self._pool = pool
        self._scale = scale
        self._start = start

    def warm_up(self) -> None:
        self._loop.sleep(self._start)

    def candidates(self, task: TuningTask) -> Candidates:
        known = self._recorded[task.problem]
        self._loop.sleep(known.rebuild)
        offered = list(map(configuration_from, list(known.builds)[: known.offered]))
        own = ["aten mm"] if known.builds else ["aten mm", "aten padded mm"]
        texts = [*own, *map(text_of, offered)]
        return cast(Candidates, PlayedCandidates(task.problem, texts, list(range(len(own)))))

    def build(self, task: TuningTask, selection: Candidates) -> CandidateBuilds:
        futures = [
            self._pool.submit(self._scale * self._build_seconds(task.problem, configuration))
            for i in slowest_first(selection.candidates)
            if (configuration := parse_tile_config(selection.candidates[i])) is not None
        ]

        return CandidateBuilds(futures)

    def wait_for_build(self, builds: Sequence[CandidateBuilds], seconds: float) -> None:
        left = [future for each in builds for future in each.futures if not future.done()]

        def arrange(wake: Callable[[], None]) -> None:
            self._loop.call_later(seconds, wake)
            for future in left:
                future.add_done_callback(lambda _: wake())

        self._loop.rest(arrange)

    def _build_seconds(self, problem: Problem, wanted: TileConfig) -> float:
        """What was recorded for it; else of configurations of the same tile, else of all."""
        builds = self._recorded[problem].builds
        tile = f"{wanted.block_m}x{wanted.block_n}x"
        alike = [seconds for name, seconds in builds.items() if name.startswith(tile)]
        return builds.get(configuration_name(wanted)) or statistics.mean(alike or builds.values())

    def measure(
        self,
        task: TuningTask,
        selection: Candidates,
        builds: CandidateBuilds,
        *,
        started: float,
        before_first_run: Callable[[str], None],
    ) -> queries.SearchResult:
        since = self._loop.now
        for text in selection.candidates:
            before_first_run(text)
            self._loop.sleep(LOAD_SECONDS)
        milliseconds = [self._milliseconds(task.problem, text) for text in selection.candidates]
        draws = random.Random(f"{task.problem.text()} {selection.candidates}")

        def take(order: Sequence[int]) -> list[float | None]:
            taken = [milliseconds[candidate] * draws.gauss(1.0, NOISE) for candidate in order]
            self._loop.sleep(sum(taken) / 1e3 + SAMPLE_SECONDS * len(taken))
            return list(taken)

        preferred = sorted(range(len(milliseconds)), key=lambda i: (i not in selection.aten, i))
        ranking = search_ranking.rank(take, preferred, name=task.problem.text())
        self.busy += self._loop.now - since
        timings = [
            records.Timing(selection.candidates[i], told.median, told.low, told.high, told.samples)
            for i, told in ranking.timed.items()
        ]
        timings.sort(key=lambda timing: timing.milliseconds)
        winner = selection.candidates[ranking.winner or 0]
        entry = TuningEntry(
            problem=task.problem,
            place=self.environment,
            winner=next(timing for timing in timings if timing.candidate == winner),
            candidates=len(timings),
            seconds=self._loop.now - started,
        )
        return queries.SearchResult(entry, timings=timings)

    def _milliseconds(self, problem: Problem, text: str) -> float:
        """PyTorch's own kernel takes what was recorded; others, drawn, up to three times that: none came near."""
        drawn = (
            int.from_bytes(hashlib.sha256(f"{problem.text()} {text}".encode()).digest()[:4], "little") / 2**32
        )
        own = self._recorded[problem].milliseconds
        return own if text == "aten mm" else own * (1.06 + 2.0 * drawn * drawn)

    def check_device(self, task: TuningTask) -> None: ...


class PlayedLanes:
    """A pool's search lanes, each with a GPU."""

    queued = 0

    def __init__(
        self,
        loop: SimulatedLoop,
        benches: Mapping[str, PlayedBench],
        toolchain: schema.Toolchain,
    ) -> None:
        self._loop = loop
        self._benches = benches
        self._toolchain = toolchain
        self._busy = dict.fromkeys(benches, False)

    def search_devices(self, toolchain: schema.Toolchain, target: schema.Target) -> list[SearchDevice]:
        if toolchain != self._toolchain:
            raise NoWorker("no worker for that toolchain")
        return [SearchDevice(name, busy, False) for name, busy in self._busy.items()]

    async def search(
        self, order: bytes, *, worker: str, on_query: Callable[[bytes], Awaitable[bytes]], **_: Any
    ) -> None:
        self._busy[worker] = True
        searcher = SearchWorker(
            asker(self._loop, on_query),
            cast(TaskExecutor, self._benches[worker]),
            max_held=TASKS_HELD,
            progress=lambda stage, detail: None,
        )
        try:
            await self._loop.simulate(searcher.run)
        finally:
            self._busy[worker] = False


class OutsideTunings(TuningDatabase):
    """Redis takes no time."""

    def __init__(self, loop: SimulatedLoop, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._loop = loop

    async def known(self, place: DeviceEnvironment, problems: Sequence[Problem]) -> list[TuningEntry]:
        with self._loop.outside():
            return await super().known(place, problems)

    async def store(self, entries: Sequence[TuningEntry]) -> list[Any]:
        with self._loop.outside():
            return list(await super().store(entries))


def asker(loop: SimulatedLoop, answer: Callable[[bytes], Awaitable[bytes]]) -> queries.SendQuery:
    def ask(question: queries.TuningQuery) -> queries.TuningReply:
        loop.sleep(QUESTION_SECONDS)
        told: queries.TuningReply = decoding.from_msgpack(
            loop.result(lambda: answer(msgspec.msgpack.encode(question))), type=queries.TuningReply
        )
        return told

    return ask


class Simulation(msgspec.Struct):
    """What a compile waited for its searches, how long it took, and what share of that each GPU measured and each
    processor built."""

    wait: float
    whole: float
    measuring: float
    building: float


def simulate(recording: Recording, gpus: int, args: argparse.Namespace) -> Simulation:
    recorded = {cast(Problem, records.parse_problem_text(each.problem)): each for each in recording.problems}
    toolchain = schema.Toolchain("cp312", "2.11", "3.6", "13.0", "linux-x86_64")
    target = schema.Target("cuda", "NVIDIA H200", "9.0", 1, [])
    ambient = SimpleNamespace(threads=0)
    request = SimpleNamespace(toolchain=toolchain, target=target, ambient=ambient, tuning_lock=None)
    with (
        tempfile.TemporaryDirectory(prefix="relay-") as folder,
        redis_server(Path(folder)) as port,
        simulated_loop() as loop,
    ):
        processors = Processors(loop, args.processors * gpus)
        ask = CompileRequest("key", b"", toolchain, target, {}, [])
        redis = Redis.from_url(f"redis://127.0.0.1:{port}")
        tunings = OutsideTunings(loop, redis, Keys("torchrelay:", "default"), Scripts(redis), limit=10_000)
        clock = PlayedClock(loop)
        search = CompileSearch(
            cast(Any, request),
            ask=None,
            settings=search_ranking.DEFAULTS,
            cannot_run="",
            turns={},
            clock=clock,
        )
        place = search.environment("cuda")
        most = min(compile_workers.MAX_COMPILE_WORKERS, args.processors * gpus)
        benches = {
            f"gpu{n}": PlayedBench(
                loop, place, recorded, Pool(processors, most), scale=args.scale, start=args.start
            )
            for n in range(gpus)
        }

        async def whole() -> Simulation:
            metrics = GatewayMetrics()
            scheduler = SearchScheduler(
                PlayedLanes(loop, benches, toolchain), metrics, TaskSupervisor(lambda task: None)
            )
            queue = scheduler.open("default", tunings)
            queue.expect(SearchTarget(toolchain, target))
            search._ask = search._known._ask = asker(loop, CompileQueries(tunings, queue, ask).answer)
            search._known.reachable = True
            search._dry_runs_left = 1
            try:
                await loop.simulate(lambda: compiled(loop, search, recording))
                known = {entry.problem for entry in await queue.known(place, list(recorded))}
                assert known == set(recorded), "some problem is not known in the end"
                return Simulation(
                    clock.waited,
                    loop.now,
                    sum(bench.busy for bench in benches.values()) / gpus / loop.now,
                    processors.used / loop.now,
                )
            finally:
                await scheduler.close()
                await redis.aclose()

        return loop.run_until_complete(whole())


class PlayedClock:
    """Of a compile: how long it waits for its searches."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.waited = 0.0
        self._loop = loop

    def enter(self, stage: compiles.Stage, detail: str) -> None:
        assert stage == "search"

    @contextlib.contextmanager
    def during(self, stage: compiles.Stage, detail: str) -> Iterator[None]:
        since = self._loop.now
        yield
        if stage == "search":
            self.waited += self._loop.now - since


def compiled(loop: SimulatedLoop, search: CompileSearch, recording: Recording) -> None:
    """A compile that meets each problem in its time, and again when it has begun again."""
    lowered(loop, search, recording)
    search.finish_dry_run()
    lowered(loop, search, recording)


def lowered(loop: SimulatedLoop, search: CompileSearch, recording: Recording) -> None:
    """Seconds that this waits come on top of what lowering takes."""
    halves = {"aot": AOT_SECONDS, "forward": FORWARD_SECONDS, "backward": BACKWARD_SECONDS}
    for half, seconds in halves.items():
        met = [
            ((each.when + 0.9 * layer / LAYERS) * seconds, each.problem)
            for each in recording.problems
            if each.half == half
            for layer in range(LAYERS if each.when < 0.5 else 1)
        ]
        lowered_until = 0.0
        for at, text in [*sorted(met), (seconds, "")]:
            if at > lowered_until:
                loop.sleep(at - lowered_until)
                lowered_until = at
            if text:
                problem = records.parse_problem_text(text)
                assert problem is not None
                search.expected_candidate(problem, "cuda")
        if half == "forward":
            search.report_problems()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recording", type=Path, default=RECORDED)
    parser.add_argument("--gpus", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--processors", type=int, default=16, help="for each GPU")
    parser.add_argument("--scale", type=float, default=2.0, help="of what building took, as recorded")
    parser.add_argument("--start", type=float, default=2.0, help="seconds until a searcher asks")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    recording = decoding.from_json(args.recording.read_bytes(), type=Recording)
    simulations = {count: simulate(recording, count, args) for count in args.gpus}
    first = simulations[min(simulations)]
    building = args.scale * sum(sum(each.builds.values()) for each in recording.problems)
    print_table(
        f"{len(recording.problems)} problems; to build what was recorded of them takes {building:.0f} s of a processor",
        ["GPUs", "wait, s", f"of {min(simulations)}'s", "whole, s", "measuring", "building"],
        [
            [
                str(n),
                f"{told.wait:.1f}",
                f"{told.wait / first.wait:.3f}",
                f"{told.whole:.1f}",
                f"{told.measuring:.2f}",
                f"{told.building:.2f}",
            ]
            for n, told in simulations.items()
        ],
    )
    args.out.mkdir(parents=True, exist_ok=True)
    record = {
        "processors": args.processors,
        "scale": args.scale,
        "simulations": msgspec.to_builtins(simulations),
    }
    (args.out / "search_scaling.json").write_text(json.dumps(record, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is not None:
        _draw({n: told.wait for n, told in simulations.items()}, args.out / "search_scaling.png")
    return 0


def _draw(waits: dict[int, float], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), dpi=150)
    axes.plot(list(waits), list(waits.values()), "o-", color="#dd8452", label="wait for searches, simulated")
    even = [waits[min(waits)] * min(waits) / n for n in waits]
    axes.plot(list(waits), even, ":", color="#888888", label="one GPU's wait, divided by the number")
    axes.set_xlabel("GPUs (simulated, with recorded durations)")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.set_xticks(list(waits))
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
