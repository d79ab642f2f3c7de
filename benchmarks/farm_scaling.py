"""How well the farm spreads searches over devices that are not at hand: recorded durations in, efficiencies out.

    python benchmarks/farm_scaling.py tuning.lock                # what `torchrelay tune export` wrote
    python benchmarks/farm_scaling.py tuning.lock --start 6 --lanes 1,2,4,8

The farm, its crew and Redis are the service's own. The lanes are played: one takes `--start` seconds until it asks, and
for each problem as long as the lock says that its search took, all of it so many times faster. One compile wants all
problems at once. Whole problems are spread, so the longest one bounds what many devices can do; that is shown too.
Writes farm_scaling.json and farm_scaling.png.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
from local_redis import redis_server
from redis.asyncio import Redis
from torchrelay.compiler import tuning, tuning_lock, wire
from torchrelay.compiler.errors import NoWorker
from torchrelay.compiler.search_order import SearchOrder
from torchrelay.compiler.tuning import Entry, Found, Next, Place, Problem, Trying
from torchrelay.examples.table import print_table
from torchrelay.service.crew import Crew
from torchrelay.service.farm import Farm
from torchrelay.service.intake import Ask
from torchrelay.service.metrics import Metrics
from torchrelay.service.scripts import Keys, Scripts
from torchrelay.service.tunings import Tunings
from torchrelay.workers.pool import Lane

_HELD = 3
"""Tasks that a searcher has: one is measured, the others are built."""
_POLL_SECONDS = 1.0
"""How often a compile asks (workers/questions.py)."""


class PlayedLanes:
    """A pool's search lanes on which nothing runs: each search takes as long as it once took."""

    def __init__(
        self, count: int, entries: Sequence[Entry], toolchain: wire.Toolchain, *, start: float, faster: float
    ) -> None:
        self._entries = {entry.problem: entry for entry in entries}
        self._toolchain = toolchain
        self._start = start
        self._faster = faster
        self._busy: dict[str, bool] = {f"gpu{n}": False for n in range(count)}
        self.searched: dict[str, float] = dict.fromkeys(self._busy, 0.0)
        """Seconds that each lane spent on problems, as they were recorded."""

    def lanes(self, toolchain: wire.Toolchain, target: wire.Target) -> list[Lane]:
        if toolchain != self._toolchain:
            raise NoWorker("no worker for that toolchain")
        return [Lane(name, busy, False) for name, busy in self._busy.items()]

    def waiting(self) -> int:
        return 0

    async def search(
        self,
        order: bytes,
        *,
        worker: str,
        namespace: str,
        toolchain: wire.Toolchain,
        target: wire.Target,
        on_query: Callable[[bytes], Awaitable[bytes]],
        deadline_seconds: float,
    ) -> None:
        msgspec.msgpack.decode(order, type=SearchOrder)
        place = next(iter(self._entries.values())).place

        async def ask(question: tuning.Question) -> tuning.Answer:
            answer: tuning.Answer = msgspec.msgpack.decode(
                await on_query(msgspec.msgpack.encode(question)), type=tuning.Answer
            )
            return answer

        self._busy[worker] = True
        try:
            await asyncio.sleep(self._start / self._faster)
            held: list[tuning.Task] = []
            while True:
                work = await ask(Next(place, len(held)))
                assert isinstance(work, tuning.Work)
                held += work.tasks
                if work.over and not held:
                    return
                if held and (not work.tasks or len(held) >= _HELD):
                    task = held.pop(0)
                    entry = self._entries[task.problem]
                    await ask(Trying(task.id, entry.winner.candidate))
                    await asyncio.sleep(entry.seconds / self._faster)
                    self.searched[worker] += entry.seconds
                    await ask(Found(entry, task.id, [entry.winner]))
        finally:
            self._busy[worker] = False


async def makespan(entries: Sequence[Entry], count: int, args: argparse.Namespace) -> float:
    """Seconds until a compile that wants all problems knows them, in recorded time."""
    place = entries[0].place
    toolchain = wire.Toolchain("cp312", place.torch, place.triton, place.cuda, "linux-x86_64")
    target = wire.Target("cuda", place.device, place.capability, 1, [])
    ask = Ask("key", b"", toolchain, target, {}, [])
    with tempfile.TemporaryDirectory(prefix="relay-") as folder, redis_server(Path(folder)) as port:
        redis = Redis.from_url(f"redis://127.0.0.1:{port}")
        tunings = Tunings(redis, Keys("torchrelay:", "default"), Scripts(redis), limit=10_000)
        metrics = Metrics()
        crew = Crew(PlayedLanes(count, entries, toolchain, start=args.start, faster=args.faster), metrics)
        farm = Farm("default", tunings, crew, metrics)
        try:
            return await _wanted(farm, place, [entry.problem for entry in entries], ask, args.faster)
        finally:
            await farm.close()
            await crew.close()
            await redis.aclose()


async def _wanted(farm: Farm, place: Place, problems: list[Problem], ask: Ask, faster: float) -> float:
    begun = time.monotonic()
    while True:
        known = await farm.want(place, problems, ask)
        if not known.open:
            assert len(known.entries) == len(problems), f"{len(known.given_up)} problems were given up"
            return (time.monotonic() - begun) * faster
        await asyncio.sleep(_POLL_SECONDS / faster)


def bound(seconds: Sequence[float], count: int, start: float) -> float:
    """No way to spread whole problems takes less."""
    return start + max(max(seconds), sum(seconds) / count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("lock", type=Path)
    parser.add_argument("--lanes", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--start", type=float, default=6.0, help="seconds until a searcher asks")
    parser.add_argument("--faster", type=float, default=10.0, help="than recorded")
    parser.add_argument("--problems", type=int, default=1000, help="at most so many")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    every = [entry for entry in tuning_lock.load(args.lock) if not entry.place.threads]
    entries = [entry for entry in every if entry.place == every[0].place][: args.problems] if every else []
    if not entries:
        print(f"{args.lock} has no problem of a GPU", file=sys.stderr)
        return 1
    durations = [entry.seconds for entry in entries]
    took = {count: asyncio.run(makespan(entries, count, args)) for count in args.lanes}
    best = {count: bound(durations, count, args.start) for count in took}
    first = min(took)
    print_table(
        f"{len(entries)} problems, {sum(durations):.0f} s of searching, the longest {max(durations):.1f} s",
        ["devices", "seconds", "the least possible", "of that", f"of {first}'s time"],
        [
            [
                str(n),
                f"{took[n]:.1f}",
                f"{best[n]:.1f}",
                f"{best[n] / took[n]:.2f}",
                f"{took[n] / took[first]:.3f}",
            ]
            for n in took
        ],
    )
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"durations": durations, "start": args.start, "seconds": took, "least": best}
    (args.out / "farm_scaling.json").write_text(json.dumps(record, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is not None:
        _draw(took, best, args.out / "farm_scaling.png")
    return 0


def _draw(took: dict[int, float], best: dict[int, float], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), dpi=150)
    axes.plot(list(took), list(took.values()), "o-", color="#dd8452", label="the farm")
    axes.plot(list(best), list(best.values()), ":", color="#888888", label="the least possible")
    axes.set_xlabel("devices (played: recorded durations)")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.set_xticks(list(took))
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
