"""A service at twice its capacity, whose Redis dies twice: what each namespace gets, what is turned away and how, and
what stays flat.

Three gateways behind one port, two dispatchers, two Redis and three sentinels, in processes of their own on this
machine. Workers are simulated: compiling takes a fixed time on a fixed number of slots, so that the capacity is known.
Three namespaces ask for graphs that nobody has compiled, at 1.2, 0.5 and 0.3 times that capacity, and for one that is
cached; every fourth compile is followed to its end and fetched. Shares are compared with the max-min fair ones:
nobody gets less than an equal part unless it asks for less.

After a third of the time and after two thirds, the primary Redis is killed; it starts again as the replica of the other
one. Until all is well again, a graph that nobody has compiled may be answered 503 with Retry-After, and is asked for
again after that time. Hits are answered 200 all the while. Redis replicates asynchronously, so what was written in the
last moment may be lost: who follows a compile that Redis no longer knows asks for it again, as a client does, and a
graph whose compile began about that time may be compiled twice. Both are counted.

    python benchmarks/overload.py [--seconds 1800] [--check] [--out out/overload.json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
from support.failover_redis import Failover, FailoverRedis
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
DOWN_AFTER_MS = 3000
"""The sentinels give a primary so long. With less, a busy machine keeps one waiting until it is replaced alive."""
LOST_SECONDS = 2.0
"""A compile that began within so long of a kill may have lost its lease or its result by it: it runs for
COMPILE_SECONDS, and what Redis had not replicated was written in the last moment."""
PATIENCE_SECONDS = 60.0
"""Of a client for one graph."""
SUBMISSIONS = 3
"""As often a client asks for one graph that the service forgets (clients/gateway/compile_client.py)."""
GROWTH = 1.1
SLACK_BYTES = 16 << 20
SLACK_FILES = 32
"""Memory and files are flat if the median of the last third is at most this far above the most of the second."""
MISSES = ("200", "202", "429", "503")


@dataclass
class Seen:
    """What one namespace met. `misses`, `hits`: answers by status. `early`: 429 and 503 without a Retry-After.
    `unavailable`: when each miss that got 503 was asked, and answered. `given_up`: graphs that got nothing else.
    `forgotten`: how often a compile that was followed was not known any more, or its artifact."""

    misses: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    early: int = 0
    unavailable: list[tuple[float, float]] = field(default_factory=list)
    given_up: int = 0
    followed: Counter[str] = field(default_factory=Counter)
    forgotten: int = 0
    milliseconds: list[float] = field(default_factory=list)


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
        body = body_of(number)
        answer = await self._accepted(body, again=(503,))
        self.seen.given_up += answer.status_code == 503
        if answer.status_code == 202 and number % FOLLOWED == 0:
            self.seen.followed[await self._fetched(body, answer)] += 1

    async def _accepted(self, body: bytes, again: Sequence[int]) -> httpx2.Response:
        """The first answer that has none of the statuses `again`, or the last one of PATIENCE_SECONDS."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            asked = time.monotonic()
            answer = await self._post(body)
            answered = time.monotonic()
            self.seen.milliseconds.append((answered - asked) * 1000)
            self._count(self.seen.misses, answer)
            if answer.status_code == 503:
                self.seen.unavailable.append((asked, answered))
            if answer.status_code not in again or answered > until:
                return answer
            await self._pause(answer)

    async def _hit(self) -> None:
        self._count(self.seen.hits, await self._post(self._known))

    def _count(self, counter: Counter[str], answer: httpx2.Response) -> None:
        counter[str(answer.status_code)] += 1
        if answer.status_code in (429, 503) and not answer.headers.get("Retry-After", "").isdecimal():
            self.seen.early += 1

    async def _post(self, body: bytes) -> httpx2.Response:
        return await self._http.post("/v1/compile", content=body, headers=gateway.HEADERS)

    async def _pause(self, answer: httpx2.Response) -> None:
        await asyncio.sleep(float(answer.headers.get("Retry-After", "1")))

    async def _fetched(self, body: bytes, answer: httpx2.Response) -> str:
        """`fetched`, or what came instead."""
        for _ in range(SUBMISSIONS):
            if answer.status_code == 200:
                return "fetched"
            if answer.status_code != 202:
                return str(answer.status_code)
            status = answer.json()
            stage = await self._followed(status["events"])
            if stage == "done":
                answer = await self._got(status["artifact"])
                stage = "fetched" if answer.status_code == 200 else str(answer.status_code)
            if stage != "404":
                return stage
            self.seen.forgotten += 1
            answer = await self._accepted(body, again=(429, 503))
        return "forgotten"

    async def _followed(self, events: str) -> str:
        """The last stage, or the status of an answer that has none."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            stage = "nothing"
            async with self._http.stream("GET", events) as answer:
                if answer.status_code == 200:
                    async for line in answer.aiter_lines():
                        if line.startswith("event: "):
                            stage = line.removeprefix("event: ")
            if answer.status_code != 503 or time.monotonic() > until:
                return stage if answer.status_code == 200 else str(answer.status_code)
            await self._pause(answer)

    async def _got(self, artifact: str) -> httpx2.Response:
        until = time.monotonic() + PATIENCE_SECONDS
        while (answer := await self._http.get(artifact)).status_code == 503 and time.monotonic() < until:
            await self._pause(answer)
        return answer


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


async def kill(redis: FailoverRedis, seconds: float) -> list[Failover]:
    """The primary, after a third of the time and after two; the second one once the first is back."""
    began, failovers = time.monotonic(), []
    for part in (1, 2):
        await asyncio.sleep(max(0.0, began + part * seconds / 3 - time.monotonic()))
        failovers.append(await asyncio.to_thread(redis.fail_over))
    return failovers


def compiled_again(service: Service, failovers: Sequence[Failover]) -> tuple[int, int]:
    """How many compiles were not the first of their graph; and how many of them no failover explains."""
    explained = unexplained = 0
    for begun in service.begun().values():
        for before in sorted(begun)[:-1]:
            if any(abs(before - each.killed) <= LOST_SECONDS for each in failovers):
                explained += 1
            else:
                unexplained += 1
    return explained + unexplained, unexplained


def strays(seen: Seen, failovers: Sequence[Failover]) -> int:
    """How many 503 a failover does not explain: answered before the kill, or asked for when all was well again."""
    return sum(
        not any(each.killed <= answered and asked <= each.ready for each in failovers)
        for asked, answered in seen.unavailable
    )


async def load(service: Service, redis: FailoverRedis, seconds: float) -> dict[str, Any]:
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
        samples, failovers, *_ = await asyncio.gather(
            watch(service.gateways + service.dispatchers, seconds),
            kill(redis, seconds),
            *(team.run(seconds) for team in teams.values()),
        )
        took = time.monotonic() - began
        after = (await owner.get("/v1/stats")).json()["namespaces"]
    compiled = {name: (after[name]["compiles"] - before[name]["compiles"]) / took for name in teams}
    again, unexplained = compiled_again(service, failovers)
    fair = max_min({name: part * capacity for name, part in DEMAND.items()}, sum(compiled.values()))
    return {
        "seconds": round(took, 1),
        "capacity": capacity,
        "gateways": len(service.gateways),
        "dispatchers": len(service.dispatchers),
        "kills": [{name: round(at - began, 1) for name, at in each._asdict().items()} for each in failovers],
        "failovers": redis.failovers(),
        "compiled_again": again,
        "compiled_again_unexplained": unexplained,
        "namespaces": {
            name: {
                "offered": round(DEMAND[name] * capacity, 2),
                "compiled": round(compiled[name], 2),
                "fair": round(fair[name], 2),
                "misses": dict(team.seen.misses),
                "hits": dict(team.seen.hits),
                "without_retry_after": team.seen.early,
                "stray_503": strays(team.seen, failovers),
                "given_up": team.seen.given_up,
                "followed": dict(team.seen.followed),
                "forgotten": team.seen.forgotten,
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
        judged.append((missing == 0, f"{name}: {missing} of its 429 and 503 without a Retry-After"))
        stray, given_up = seen["stray_503"], seen["given_up"]
        judged.append((stray == 0, f"{name}: {stray} of its 503 are of no failover"))
        judged.append((given_up == 0, f"{name}: {given_up} graphs got 503 for {PATIENCE_SECONDS:g} s"))
    kills, failovers = len(found["kills"]), found["failovers"]
    judged.append((failovers == kills, f"{failovers} failovers of {kills} kills"))
    again, unexplained = found["compiled_again"], found["compiled_again_unexplained"]
    judged.append((unexplained == 0, f"{again} compiled again, {unexplained} of them far from a kill"))
    forgotten = sum(seen["forgotten"] for seen in found["namespaces"].values())
    most = int(kills * LOST_SECONDS * found["capacity"])
    judged.append((forgotten <= most, f"{forgotten} followed compiles asked for again (at most {most})"))
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
        f"{'namespace':10} {'asks/s':>7} {'gets/s':>7} {'fair/s':>7} "
        f"{' '.join(f'{status:>7}' for status in MISSES)} {'p99 ms':>7}"
    )
    for name, seen in found["namespaces"].items():
        statuses = Counter(seen["misses"]) + Counter(seen["hits"])
        counts = " ".join(f"{statuses[status]:7}" for status in MISSES)
        rates = f"{seen['offered']:7.1f} {seen['compiled']:7.2f} {seen['fair']:7.2f}"
        print(f"{name:10} {rates} {counts} {seen['p99_ms']:7.1f}")
    for each in found["kills"]:
        print(f"primary killed at {each['killed']:g} s, back as the other's replica at {each['ready']:g} s")
    print(f"{'second':>10} {'resident MB':>12} {'open files':>11}")
    for sample in found["samples"][:: SAMPLES // 10]:
        print(f"{sample['second']:10.0f} {sample['resident'] / 1e6:12.1f} {sample['files']:11}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--out", type=Path, default=Path("out/overload.json"))
    verdicts.add_check(parser)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Setting] = {
        "log_level": "error",
        "max_queued": QUEUE,
        "cache_limit_bytes": CACHE_BYTES,
        "retry_after_seconds": 1,
        "progress_ttl_seconds": 30,
    }
    with (
        tempfile.TemporaryDirectory(prefix="tr-") as name,
        contextlib.closing(FailoverRedis(Path(name), DOWN_AFTER_MS)) as redis,
    ):
        redis.start()
        with running_service(
            Path(name),
            gateways=GATEWAYS,
            dispatchers=DISPATCHERS,
            slots=SLOTS,
            compile_seconds=COMPILE_SECONDS,
            changes=settings,
            failover=redis,
            log=arguments.out.with_suffix(".log"),
        ) as service:
            found = asyncio.run(load(service, redis, arguments.seconds))
    show(found)
    status = verdicts.conclude(judge(found), check=arguments.check)
    record = {"python": platform.python_version(), "cpus": os.cpu_count(), **found}
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {arguments.out}; what the service logged is beside it")
    return status


if __name__ == "__main__":
    sys.exit(main())
