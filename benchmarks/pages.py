"""What the gateway's pages cost: in: how many runs there are, out: a table of milliseconds at the server.

    python benchmarks/pages.py --runs 10000

Starts a service of its own, tells it of made-up runs, and asks for each page in turn.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from rich.console import Console
from rich.table import Table
from torchrelay.clients.settings import load_settings
from torchrelay.compiler import decoding
from torchrelay.compiler.api.runs import GraphRecord, Outcome, RunRecord, TracedFunction
from torchrelay.examples.harness.private_service import PrivateService

OUTCOMES: list[Outcome] = ["hit"] * 6 + ["disk_hit"] * 3 + ["miss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=512, help="of one more run")
    parser.add_argument("--graphs", type=int, default=1000, help="of one more run")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder, PrivateService(Path(folder) / "s") as service:
        settings = load_settings(url=service.url, **credentials(service))
        headers = {"Authorization": f"Bearer {settings.token}"}
        with httpx2.Client(base_url=service.url, headers=headers, timeout=60, trust_env=False) as http:
            measure(http, args)


def credentials(service: PrivateService) -> dict[str, str]:
    path = Path(service.environment["XDG_CONFIG_HOME"]) / "torchrelay" / "credentials.json"
    return {"token": decoding.from_json(path.read_bytes())["token"]}


def measure(http: httpx2.Client, args: argparse.Namespace) -> None:
    made = [msgspec.json.encode(run(random.randint(1, 40))) for _ in range(50)]
    bodies = (made * (args.runs // len(made) + 1))[: args.runs]
    told = [seconds(partial(tell, http, body)) for body in bodies]
    large = tell(http, msgspec.json.encode(run(args.graphs)))
    for rank in range(args.ranks):
        job = tell(http, msgspec.json.encode(run(30, rank=rank, launch="job")))
    pages = {
        f"a list, of {args.runs:,} runs": "/runs",
        f"a run of {args.graphs:,} graphs": large,
        "the same, compared": f"{large}?with={job.rpartition('/')[2]}",
        f"a run of {args.ranks:,} ranks": job,
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
