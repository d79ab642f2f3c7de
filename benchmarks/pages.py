"""What the gateway's pages cost: in: how many runs there are, out: a table of milliseconds at the server, and how long
hits take while people look at pages, beside hits alone.

    python benchmarks/pages.py --runs 10000 --artifacts 100000 --viewers 200

Starts a gateway of its own, fills it with made-up runs, artifacts and a year of figures, and asks for each page in
turn. Then hits come at a fixed rate, in rounds without and with viewers, each of whom loads a page every 30 s.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gateway
import httpx2
import msgspec
import redis
from rich.console import Console
from rich.table import Table
from support import http_load
from support.local_redis import redis_server
from torchrelay.compiler.api.runs import GraphRecord, Outcome, RunRecord, TracedFunction
from torchrelay.compiler.request import codec
from torchrelay.compiler.request import key as request_key
from torchrelay.compiler.tuning.records import DeviceEnvironment, Operand, Problem, Timing, TuningEntry
from torchrelay.service.storage.redis.keys import Keys

DAY = 86400
HITS_A_SECOND = 40
OUTCOMES: list[Outcome] = ["hit"] * 6 + ["disk_hit"] * 3 + ["miss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=512, help="of one more run")
    parser.add_argument("--graphs", type=int, default=1000, help="of one more run")
    parser.add_argument("--artifacts", type=int, default=100_000)
    parser.add_argument("--viewers", type=int, default=200)
    parser.add_argument("--hit-rounds", type=int, default=5, help="of 10 s without and 10 s with viewers")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    random.seed(0)
    headers = {"Authorization": f"Bearer {gateway.TOKEN}"}
    with (
        tempfile.TemporaryDirectory(prefix="tr-") as folder,
        redis_server(Path(folder)) as redis_port,
        gateway.running_gateway(Path(folder), redis_port) as running,
        httpx2.Client(base_url=running.url, headers=headers, timeout=60, trust_env=False) as client,
        redis.Redis(port=redis_port) as direct,
    ):
        request = gateway.graph(50_000)
        body = codec.pack_request(request)
        artifact = gateway.fill(client, request_key.key_of(request), body)
        fill_figures(direct)
        fill_artifacts(direct, args.artifacts)
        fill_winners(client)
        pages = measure(client, args, request_key.key_of(request))
        hits = http_load.Load(running.port, gateway.request_for(body), len(artifact))
        watch(hits, list(pages.values()), args)


def fill_figures(direct: redis.Redis) -> None:
    """A year in which each hour was busy."""
    keys, today = Keys("torchrelay:"), int(time.time()) // DAY
    names = [
        "requests",
        "hits",
        "misses",
        "compiles",
        "seconds_saved",
        "seconds_spent",
        "bytes_served",
        "runs",
    ]
    names += [*(f"ready:{each}" for each in range(2, 16)), *(f"rate:{each}" for each in range(3, 11))]
    for day in range(today - 365, today + 1):
        for name, intervals, at in ((keys.hours(day), 24, 0), (keys.days(day // 32), 1, day % 32)):
            figures = {
                f"{at + n}:{figure}": random.randint(1, 500) for n in range(intervals) for figure in names
            }
            direct.hset(name, mapping=figures)


def fill_artifacts(direct: redis.Redis, artifacts: int) -> None:
    """Entries of the index, without bytes."""
    keys = Keys("torchrelay:")
    with direct.pipeline(transaction=False) as pipe:
        for number in range(artifacts):
            name = f"{number:064x}"
            pipe.hset(
                keys.index(name),
                mapping={
                    "digest": name,
                    "size": 1000,
                    "place": "store",
                    "seconds": 20,
                    "created": number,
                },
            )
            pipe.zadd(keys.lru, {name: number})
            pipe.hset(keys.sizes, name, 1000)
            if number % 1000 == 999:
                pipe.execute()
        pipe.execute()


def watch(hits: http_load.Load, pages: list[str], args: argparse.Namespace) -> None:
    """Rounds of hits without and with viewers, by turns."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    looked = multiprocessing.Value("i", 0)
    for _ in range(args.hit_rounds):
        for viewed in (False, True):
            looking = multiprocessing.Process(target=view, args=(hits.port, pages, args.viewers / 30, looked))
            if viewed:
                looking.start()
                time.sleep(0.5)
            taken[viewed] += http_load.at_rate(hits, rate=HITS_A_SECOND, connections=8, seconds=10)
            if viewed:
                looking.terminate()
                looking.join()
    table = Table("hits", "median, ms", "90th, ms", "99th, ms", title=f"{HITS_A_SECOND} hits a second")
    for viewed, values in taken.items():
        ordered = sorted(1e3 * each for each in values)
        shown = [f"{ordered[int(len(ordered) * share)]:.2f}" for share in (0.5, 0.9, 0.99)]
        table.add_row(f"beside {args.viewers} viewers, {looked.value} pages" if viewed else "alone", *shown)
    medians = [statistics.median(taken[viewed]) for viewed in (True, False)]
    table.add_row("ratio of medians", f"{medians[0] / medians[1]:.3f}", "", "")
    Console().print(table)


def view(port: int, pages: list[str], rate: float, looked: Any) -> None:
    """Loads pages at a rate until this process is ended."""
    headers = {"Authorization": f"Bearer {gateway.TOKEN}", "Accept": "text/html"}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    due = time.monotonic()
    for page in itertools.cycle(pages):
        time.sleep(max(0.0, due - time.monotonic()))
        due += 1 / rate
        connection.request("GET", page, headers=headers)
        assert connection.getresponse().read()
        looked.value += 1


def fill_winners(http: httpx2.Client) -> None:
    """4,000 winners of searches, of two versions each."""
    for first in range(0, 2000, 500):
        entries = [
            winner(number, torch) for number in range(first, first + 500) for torch in ("2.11.0", "2.13.0")
        ]
        http.post("/v1/tunings", content=msgspec.json.encode({"entries": entries})).raise_for_status()


def winner(number: int, torch: str) -> TuningEntry:
    side = Operand("bfloat16", (number + 1, 64), (64, 1))
    time_of = Timing("triton_mm", 0.25, 0.24, 0.26, 40)
    place = DeviceEnvironment("A GPU", "9.0", "580", torch, "3.6", "13.0")
    return TuningEntry(problem=Problem("mm", (side, side), side), place=place, winner=time_of, candidates=9)


def measure(http: httpx2.Client, args: argparse.Namespace, key: str) -> dict[str, str]:
    """The pages that were measured, by what they are. key: of an artifact that is stored."""
    made = [msgspec.json.encode(run(random.randint(1, 40))) for _ in range(50)]
    bodies = (made * (args.runs // len(made) + 1))[: args.runs]
    told = [seconds(partial(tell, http, body)) for body in bodies]
    large = tell(http, msgspec.json.encode(run(args.graphs)))
    for rank in range(args.ranks):
        job = tell(http, msgspec.json.encode(run(30, rank=rank, launch="job")))
    pages = {
        f"the overview of a week, {args.artifacts:,} artifacts": "/overview?period=week",
        "the overview of a year": "/overview?period=year",
        f"a list, of {args.runs:,} runs": "/runs",
        f"a run of {args.graphs:,} graphs": large,
        "the same, compared": f"{large}?with={job.rpartition('/')[2]}",
        f"a run of {args.ranks:,} ranks": job,
        f"a list, of {args.artifacts:,} artifacts": "/artifacts",
        "an artifact": f"/artifacts/{key}",
        "kernels, 2,000 of 4,000 winners": "/kernels",
        "administration": "/administration",
        "the API": "/docs",
    }
    table = Table(
        "page", "median, ms", "slowest, ms", "KiB", title=f"{args.rounds} requests each, one at a time"
    )
    table.add_row("a process tells of its run", *milliseconds(told), "")
    for name, path in pages.items():
        page = http.get(path, headers={"Accept": "text/html"}).raise_for_status()
        ask = partial(http.get, path, headers={"Accept": "text/html"})
        taken = [seconds(ask) for _ in range(args.rounds)]
        table.add_row(name, *milliseconds(taken), f"{len(page.content) / 1024:.0f}")
    Console().print(table)
    return pages


def milliseconds(taken: list[float]) -> tuple[str, str]:
    return f"{1e3 * statistics.median(taken):.1f}", f"{1e3 * max(taken):.1f}"


def tell(http: httpx2.Client, body: bytes) -> str:
    path: str = http.post("/v1/runs", content=body).raise_for_status().json()["path"]
    return path


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def run(graphs: int, **more: Any) -> RunRecord:
    made = tuple(
        GraphRecord(
            key=f"{random.getrandbits(256):064x}",
            outcome=random.choice(OUTCOMES),
            seconds=random.uniform(0, 3),
            nodes=random.randint(4, 2000),
            ended=1.0 + number,
            stages={"fetch": 0.1, "load": 0.1},
        )
        for number in range(graphs)
    )
    fields: dict[str, Any] = {
        "program": random.choice(["train.py", "finetune.py"]),
        "pid": 1,
        "ended": 1.8e9,
        "torch": "2.13.0",
    }
    traced = (TracedFunction("model.Block.forward", "it had no record"),)
    return RunRecord(**fields | {"graphs": made, "hits": graphs, "traced": traced} | more)


if __name__ == "__main__":
    main()
