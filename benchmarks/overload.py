"""A service at twice its capacity: what each namespace gets, what is turned away and how, and what stays flat.

Three gateways behind one port, two dispatchers and a Redis, in processes of their own on this machine. Workers are
simulated: compiling takes a fixed time on a fixed number of slots, so that the capacity is known. Three
namespaces ask for graphs that nobody has compiled, at 1.2, 0.5 and 0.3 times that capacity, and for one that is
cached; every fourth compile is followed to its end and fetched. Shares are compared with the max-min fair ones:
nobody gets less than an equal part unless it asks for less.

    python benchmarks/overload.py [--seconds 1800] [--check] [--out out/overload.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gateway
import httpx2
import msgspec
from support import verdicts
from support.scale_service import Service, Setting, running_service
from torchrelay.compiler.request import codec, schema

GATEWAYS, DISPATCHERS = 3, 2
SLOTS = 2
"""Of each dispatcher."""
COMPILE_SECONDS = 0.2
QUEUE = 48
DEMAND = {"large": 1.2, "middle": 0.5, "small": 0.3}
"""Graphs that nobody has compiled, in parts of the capacity: twice what there is."""
HITS = 5.0
"""Requests a second of each namespace for a cached graph."""
FOLLOWED = 4
"""One of so many compiles is followed and fetched."""
ARTIFACT_BYTES = 20_000
CACHE_BYTES = 32 << 20
SAMPLES = 60
FAIR = 0.8
"""Of its fair share each namespace gets at least so much."""
GROWTH = 1.1
SLACK_BYTES = 16 << 20
SLACK_FILES = 32
"""Memory and files are flat if the median of the last third is at most this far above the most of the second."""
MISSES = ("200", "202", "429")


@dataclass
class Seen:
    """What one namespace met. `misses`, `hits`: answers by status; `early`: 429 without a Retry-After."""

    misses: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    early: int = 0
    followed: Counter[str] = field(default_factory=Counter)
    milliseconds: list[float] = field(default_factory=list)
    offered: float = 0.0


def body_of(number: int) -> bytes:
    """A small request; another number is another key."""
    nodes = [
        schema.Node("placeholder", "", []),
        schema.Node("call_function", "_operator.add", [schema.Ref(0), number]),
        schema.Node("output", "", [schema.TupleArg([schema.Ref(1)])]),
    ]
    request = gateway.graph(ARTIFACT_BYTES)
    return codec.pack_request(msgspec.structs.replace(request, graph=schema.Graph(nodes)))


class Team:
    """One namespace's clients: they ask at a rate, whatever the answers do."""

    def __init__(self, url: str, token: str, place: int, rate: float) -> None:
        limits = httpx2.Limits(max_connections=64)
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx2.AsyncClient(
            base_url=url, headers=headers, timeout=30, trust_env=False, limits=limits
        )
        self._next = place + 1
        self._step = len(DEMAND)
        self._rate = rate
        self._asking: set[asyncio.Task[None]] = set()
        self._known = body_of(-place)
        self.seen = Seen()

    async def prepare(self) -> None:
        """Have the cached graph compiled, and the client warm."""
        until = time.monotonic() + 60
        while (await self._post(self._known)).status_code != 200:
            assert time.monotonic() < until, "the first compile did not end"
            await asyncio.sleep(0.1)

    async def run(self, seconds: float) -> None:
        await asyncio.gather(
            self._at_rate(self._rate, seconds, self._miss), self._at_rate(HITS, seconds, self._hit)
        )
        await asyncio.gather(*self._asking)
        await self._http.aclose()

    async def _at_rate(self, rate: float, seconds: float, ask: Callable[[], Awaitable[None]]) -> None:
        began = time.monotonic()
        for turn in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + turn / rate - time.monotonic()))
            task = asyncio.create_task(self._safely(ask))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _safely(self, ask: Callable[[], Awaitable[None]]) -> None:
        """A request that came to nothing is counted by what it met."""
        try:
            await ask()
        except httpx2.HTTPError as error:
            self.seen.misses[type(error).__name__] += 1

    async def _miss(self) -> None:
        self._next += self._step
        number = self._next
        began = time.perf_counter()
        answer = await self._post(body_of(number))
        self.seen.milliseconds.append((time.perf_counter() - began) * 1000)
        self._count(self.seen.misses, answer)
        if answer.status_code == 202 and number % FOLLOWED == 0:
            self.seen.followed[await self._follow(answer.json())] += 1

    async def _hit(self) -> None:
        self._count(self.seen.hits, await self._post(self._known))

    def _count(self, counter: Counter[str], answer: httpx2.Response) -> None:
        counter[str(answer.status_code)] += 1
        if answer.status_code == 429 and not answer.headers.get("Retry-After", "").isdecimal():
            self.seen.early += 1

    async def _post(self, body: bytes) -> httpx2.Response:
        return await self._http.post("/v1/compile?finish=1", content=body, headers=gateway.HEADERS)

    async def _follow(self, status: dict[str, Any]) -> str:
        """`fetched`, or what came instead."""
        stage = "nothing"
        async with self._http.stream("GET", status["events"]) as events:
            async for line in events.aiter_lines():
                if line.startswith("event: "):
                    stage = line.removeprefix("event: ")
        if stage != "done":
            return stage
        answer = await self._http.get(status["artifact"])
        return "fetched" if answer.status_code == 200 else str(answer.status_code)


def size(pids: Sequence[int]) -> tuple[int, int]:
    """Resident bytes and open files of processes together (Linux)."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE"), sum(
        len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids
    )


async def watch(pids: Sequence[int], seconds: float) -> list[dict[str, float]]:
    began, samples = time.monotonic(), []
    for turn in range(SAMPLES + 1):
        await asyncio.sleep(max(0.0, began + turn * seconds / SAMPLES - time.monotonic()))
        resident, files = size(pids)
        samples.append({"second": round(time.monotonic() - began, 1), "resident": resident, "files": files})
    return samples


async def load(service: Service, seconds: float) -> dict[str, Any]:
    url = f"http://127.0.0.1:{service.port}"
    headers = {"Authorization": f"Bearer {gateway.TOKEN}"}
    capacity = DISPATCHERS * SLOTS / COMPILE_SECONDS
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=30, trust_env=False) as owner:
        teams: dict[str, Team] = {}
        for place, (name, part) in enumerate(DEMAND.items()):
            body = {"name": "benchmark", "roles": ["compile"], "namespace": name}
            made = (await owner.post("/v1/tokens", json=body)).json()
            teams[name] = Team(url, made["token"], place, part * capacity)
            await teams[name].prepare()
        before = (await owner.get("/v1/stats")).json()["namespaces"]
        began = time.monotonic()
        samples, *_ = await asyncio.gather(
            watch(service.gateways + service.dispatchers, seconds),
            *(team.run(seconds) for team in teams.values()),
        )
        took = time.monotonic() - began
        after = (await owner.get("/v1/stats")).json()["namespaces"]
    compiled = {name: (after[name]["compiles"] - before[name]["compiles"]) / took for name in teams}
    fair = max_min({name: part * capacity for name, part in DEMAND.items()}, sum(compiled.values()))
    return {
        "seconds": round(took, 1),
        "capacity": capacity,
        "gateways": len(service.gateways),
        "dispatchers": len(service.dispatchers),
        "most_compiles_of_a_graph": max(service.compiles().values()),
        "namespaces": {
            name: {
                "offered": round(DEMAND[name] * capacity, 2),
                "compiled": round(compiled[name], 2),
                "fair": round(fair[name], 2),
                "misses": dict(team.seen.misses),
                "hits": dict(team.seen.hits),
                "without_retry_after": team.seen.early,
                "followed": dict(team.seen.followed),
                "median_ms": round(statistics.median(team.seen.milliseconds), 2),
                "p99_ms": round(statistics.quantiles(team.seen.milliseconds, n=100)[98], 2),
            }
            for name, team in teams.items()
        },
        "samples": samples,
    }


def max_min(demand: dict[str, float], capacity: float) -> dict[str, float]:
    """Max-min fair shares: the smallest demands are met, the rest is parted equally."""
    shares: dict[str, float] = {}
    for left, (name, wanted) in zip(
        range(len(demand), 0, -1), sorted(demand.items(), key=lambda each: each[1]), strict=True
    ):
        shares[name] = min(wanted, (capacity - sum(shares.values())) / left)
    return shares


def judge(found: dict[str, Any]) -> list[verdicts.Verdict]:
    judged: list[verdicts.Verdict] = []
    for name, seen in found["namespaces"].items():
        ratio = seen["compiled"] / seen["fair"]
        judged.append((ratio >= FAIR, f"{name} gets {ratio:.2f} of its fair share (at least {FAIR})"))
        strange = {status for status in seen["misses"] if status not in MISSES} | (
            set(seen["hits"]) - {"200"}
        )
        judged.append((not strange, f"{name}: misses {seen['misses']}, hits {seen['hits']}"))
        judged.append((set(seen["followed"]) <= {"fetched"}, f"{name}: followed {seen['followed']}"))
        missing = seen["without_retry_after"]
        judged.append((missing == 0, f"{name}: {missing} of its 429 without a Retry-After"))
    most = found["most_compiles_of_a_graph"]
    judged.append((most == 1, f"a graph is compiled {most} times at most"))
    samples = found["samples"]
    third = len(samples) // 3
    for what, slack in (("resident", SLACK_BYTES), ("files", SLACK_FILES)):
        second = max(sample[what] for sample in samples[third : 2 * third])
        last = statistics.median(sample[what] for sample in samples[2 * third :])
        shown = (
            f"{second / 1e6:.1f} MB to {last / 1e6:.1f} MB" if what == "resident" else f"{second} to {last}"
        )
        judged.append(
            (last <= max(second * GROWTH, second + slack), f"{what}: {shown}, second to last third")
        )
    return judged


def show(found: dict[str, Any]) -> None:
    print(f"capacity {found['capacity']:g} compiles a second, for {found['seconds']:g} s")
    print(
        f"{'namespace':10} {'asks/s':>7} {'gets/s':>7} {'fair/s':>7} {'200':>7} {'202':>7} {'429':>7} {'p99 ms':>7}"
    )
    for name, seen in found["namespaces"].items():
        statuses = Counter(seen["misses"]) + Counter(seen["hits"])
        counts = " ".join(f"{statuses[status]:7}" for status in MISSES)
        rates = f"{seen['offered']:7.1f} {seen['compiled']:7.2f} {seen['fair']:7.2f}"
        print(f"{name:10} {rates} {counts} {seen['p99_ms']:7.1f}")
    print(f"{'second':>10} {'resident MB':>12} {'open files':>11}")
    for sample in found["samples"][:: SAMPLES // 10]:
        print(f"{sample['second']:10.0f} {sample['resident'] / 1e6:12.1f} {sample['files']:11}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--out", type=Path, default=Path("out/overload.json"))
    verdicts.add_check(parser)
    arguments = parser.parse_args()
    settings: dict[str, Setting] = {
        "log_level": "error",
        "max_queued": QUEUE,
        "cache_limit_bytes": CACHE_BYTES,
        "retry_after_seconds": 1,
        "progress_ttl_seconds": 30,
    }
    with (
        tempfile.TemporaryDirectory(prefix="tr-") as name,
        running_service(
            Path(name),
            gateways=GATEWAYS,
            dispatchers=DISPATCHERS,
            slots=SLOTS,
            compile_seconds=COMPILE_SECONDS,
            changes=settings,
        ) as service,
    ):
        found = asyncio.run(load(service, arguments.seconds))
    show(found)
    status = verdicts.conclude(judge(found), check=arguments.check)
    record = {"python": platform.python_version(), "cpus": os.cpu_count(), **found}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {arguments.out}")
    return status


if __name__ == "__main__":
    sys.exit(main())
