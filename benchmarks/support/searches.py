"""Training compiles with max-autotune: in: a folder and flags; out: what they took, alone and through a service.

Every run is a fresh process on a machine with empty caches that trains one step; `first_step` counts as in
train_once.py. What a search costs is the difference to the same with mode default: both have the same imports,
captures, pointwise kernels and checks. Of that, operators' searches on the service's devices are what its manifest
calls `search`: what the compile waited for them. The rest is lowering twice and Inductor's tuning of its own kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from support.variants import MEASURED, ChildFailed, run_child
from support.winners import administration, entries
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest
from torchrelay.compiler.tuning.records import TuningEntry
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

MODE = "max-autotune-no-cudagraphs"
MODEL = {"cpu": "gpt2-4x256", "cuda": "gpt2-12x768"}
OF_UPSTREAM, OF_ONE, OF_DEFAULT = 0.6, 0.55, 1.10

Say = Callable[[str], None]
Bar = Callable[[bool, str], None]


@dataclass
class Searched:
    """found: for people and JSON. winners: of each service from nothing. service: with all GPUs, if one was started; it
    goes on until the caller's stack ends."""

    found: dict[str, Any]
    winners: list[list[TuningEntry]] = field(default_factory=list)
    service: PrivateService | None = None


def search(
    root: Path,
    args: argparse.Namespace,
    say: Say,
    bar: Bar,
    *,
    parts: Collection[str],
    stack: contextlib.ExitStack,
    keep: Callable[[dict[str, Any]], None],
) -> Searched:
    """Parts: `search`: upstream's beside the service's on one GPU, and on more where there are. `known`: the same
    compile again, its artifacts deleted and all its winners known, beside mode default's, by turns. keep: told what is
    known whenever a run has ended."""
    root.mkdir(exist_ok=True)
    runs: dict[str, dict[str, Any]] = {}
    counts = _counts(args)
    one = counts[0]
    found: dict[str, Any] = {"runs": runs, "searched": {}}
    result = Searched(found)
    keeping = threading.Lock()

    def run(name: str, service: PrivateService | None, mode: str, gpus: Sequence[int]) -> dict[str, Any]:
        try:
            record = train(root / name.replace(" ", "-"), service, args, mode, gpus)
        except ChildFailed:
            print("" if service is None else service.log_tail(), flush=True)
            raise
        say(f"{name}: {told(record)}")
        with keeping:
            runs[name] = record
            keep(found)
        return record

    def serving(gpus: Sequence[int], name: str) -> PrivateService:
        logs = {"TORCHRELAY_SERVICE_LOG_LEVEL": "debug", "TORCHRELAY_SERVICE_LOG_FORMAT": "json"}
        return PrivateService(root / f"service-{name}", environment=_visible(gpus) | logs)

    def searched(service: PrivateService, gpus: Sequence[int]) -> list[TuningEntry]:
        run(f"torchrelay {len(gpus)}", service, MODE, gpus)
        winners = entries(service)
        with keeping:
            found["searched"][len(gpus)] = {
                "seconds": [[entry.problem.text(), entry.seconds, entry.candidates] for entry in winners],
                **timeline(service.log.read_text(errors="replace").splitlines()),
            }
            keep(found)
        return winners

    def search_on(gpus: Sequence[int]) -> None:
        with contextlib.ExitStack() as ends:
            last = len(gpus) == counts[-1] > 1
            service = (stack if last else ends).enter_context(serving(gpus, str(len(gpus))))
            winners = searched(service, gpus)
            if len(gpus) > 1:
                result.winners.append(winners)
            if last:
                result.service = service

    def default_on(gpus: Sequence[int]) -> None:
        with serving(gpus, "default") as service:
            run("default", service, "default", gpus)

    def upstream_on(gpus: Sequence[int]) -> None:
        run("upstream", None, MODE, gpus)
        run("upstream default", None, "default", gpus)

    if "known" in parts:
        gpus = range(one)
        with _share_of_processors(gpus), serving(gpus, "known") as service:
            searched(service, gpus)
            run("default", service, "default", gpus)
            found["known"] = _known(
                service, lambda name, mode: run(name, service, mode, gpus), args.repeats, bar
            )
    if "search" not in parts:
        return result
    tasks: list[tuple[int, Callable[[Sequence[int]], None]]] = [
        (n, search_on) for n in counts if f"torchrelay {n}" not in runs
    ]
    tasks += [] if "default" in runs else [(one, default_on)]
    tasks += [] if args.upstream else [(one, upstream_on)]
    # the pool outlives its tasks: a service ends with the thread that has started it
    _side_by_side(tasks, stack.enter_context(ThreadPoolExecutor(max(1, len(tasks)))))
    upstream, plain = args.upstream or (
        runs["upstream"]["first_step"],
        runs["upstream default"]["first_step"],
    )
    took = {gpus: runs[f"torchrelay {gpus}"]["first_step"] for gpus in counts}
    own = {gpus: took[gpus] - runs["default"]["first_step"] for gpus in counts}
    waits = {gpus: runs[f"torchrelay {gpus}"]["stages"].get("search", 0.0) for gpus in counts}
    adds = "; ".join(f"{n}: {own[n]:.1f} s" for n in counts)
    say(f"max-autotune beyond default: upstream {upstream - plain:.1f} s; {adds}")
    say("waited for searches: " + "; ".join(f"{n}: {waits[n]:.1f} s" for n in counts))
    spans = {n: found["searched"][n]["span"] for n in counts}
    say("from the first wish to the last find: " + "; ".join(f"{n}: {spans[n]:.1f} s" for n in counts))
    ratio, whole = own[one] / (upstream - plain), took[one] / upstream
    text = "a GPT-2's search through the service / max-autotune's own"
    bar(
        0 < ratio <= OF_UPSTREAM,
        f"{ratio:.3f} (<= {OF_UPSTREAM})  {text} (the whole first step: {whole:.3f})",
    )
    if 2 in own:
        ratio = waits[2] / max(waits[one], 0.1)
        beside = f"first wish to last find: {spans[2] / max(spans[one], 0.1):.3f}"
        beside += f"; all that max-autotune adds: {own[2] / own[one]:.3f}"
        text = f"the compile's wait for searches on two GPUs / on one ({beside})"
        bar(ratio <= OF_ONE, f"{ratio:.3f} (<= {OF_ONE})  {text}")
        if importlib.util.find_spec("matplotlib") is not None:
            _draw(own, waits, upstream - plain, args.out / "autotune_gpus.png")
    found |= {"upstream": {"tuned": upstream, "default": plain}, "seconds": own, "waits": waits}
    return result


def _side_by_side(tasks: list[tuple[int, Callable[[Sequence[int]], None]]], pool: ThreadPoolExecutor) -> None:
    """Run tasks, each on as many GPUs as it says and on the same share of the processors: as many at once as the host
    has GPUs for; on a CPU one after the other. Raises what the first that failed raised, when all have ended."""
    there = torch.cuda.device_count()
    left = list(tasks)
    failed: list[BaseException] = []
    while left:
        wave: list[tuple[range, Callable[[Sequence[int]], None]]] = []
        free = 0
        for count, task in list(left):
            if free + count <= max(there, 1) and (count or not wave):
                wave.append((range(free, free + count), task))
                free += count or 1
                left.remove((count, task))

        def alone(gpus: range, task: Callable[[Sequence[int]], None]) -> None:
            with _share_of_processors(gpus):
                task(gpus)

        begun = [pool.submit(alone, gpus, task) for gpus, task in wave]
        failed += [error for each in begun if (error := each.exception()) is not None]
    if failed:
        raise failed[0]


def _known(
    service: PrivateService, run: Callable[[str, str], dict[str, Any]], repeats: int, bar: Bar
) -> dict[str, Any]:
    pairs = []
    for number in range(repeats):
        pair = []
        for mode in ("default", MODE):
            with administration(service) as asked:
                for entry in asked.cache_entries():
                    asked.remove(entry.key)
            pair.append(run(f"{mode} again {number}", mode))
        pairs.append(pair)
    ratio = statistics.median(tuned["first_step"] / plain["first_step"] for plain, tuned in pairs)
    text = "first step with all problems known / mode default's"
    bar(ratio <= OF_DEFAULT, f"{ratio:.3f} (<= {OF_DEFAULT})  {text}")
    searched = sum(tuned["searched"] + tuned["benchmarks"] for _, tuned in pairs)
    recalled = min(tuned["recalled"] for _, tuned in pairs)
    text = f"searches and benchmarks of a compile of which all {recalled} problems are known"
    bar(searched == 0 < recalled, f"{searched} (0)  {text}")
    return {"ratio": ratio, "searched": searched, "recalled": recalled}


def train(
    root: Path, service: PrivateService | None, args: argparse.Namespace, mode: str, gpus: Sequence[int]
) -> dict[str, Any]:
    """One process on a new machine, on the first of these GPUs; without a service PyTorch compiles."""
    machine = FreshMachine(root)
    command = [sys.executable, str(MEASURED / "train_once.py"), "--model", MODEL[args.device], "--steps", "0"]
    command += ["--device", args.device, "--mode", mode, "--precision", "high"]
    command += ["--backend", "inductor" if service is None else "torchrelay"]
    client = _visible(gpus[:1])
    if service is not None:  # without prefetch: it would fetch what other modes compiled
        client |= {**service.environment, "TORCHRELAY_MODE": "require", "TORCHRELAY_PREFETCH": "0"}
    record = run_child(command, machine.environment(**client), args.child_timeout)
    made = [container.read_manifest(path.read_bytes()) for path in _artifacts(root)]
    return record | {
        "stages": _by_stage(made),
        "searched": sum(manifest.searched for manifest in made),
        "recalled": sum(manifest.recalled for manifest in made),
        "benchmarks": sum(manifest.benchmarks for manifest in made),
        "winners": [[each.problem, each.winner, each.milliseconds] for m in made for each in m.tuning],
    }


def timeline(log: Sequence[str]) -> dict[str, Any]:
    """Of a service's log: after how many seconds each searcher was ready, and when each problem was wanted, given out,
    measured first and found, in seconds since the first was wanted. span: until the last was found."""
    searchers: list[float] = []
    problems: dict[str, dict[str, Any]] = {}
    first: datetime | None = None
    for line in log:
        try:
            event = json.loads(line)
            name = event["event"]
        except (ValueError, KeyError, TypeError):  # of another program
            continue
        if name == "searcher_ready":
            searchers.append(event["seconds"])
        elif name in _EVENTS:
            at = datetime.fromisoformat(event["timestamp"])
            first = at if first is None else first
            told = problems.setdefault(event["task"], {})
            told |= {key: event[key] for key in ("problem", "worker") if key in event}
            told[_EVENTS[name]] = round((at - first).total_seconds(), 2)
    told_of = list(problems.values())
    span = max((each["found"] for each in told_of if "found" in each), default=0.0)
    return {"searchers": searchers, "span": span, "timeline": told_of}


_EVENTS = {
    "search_wanted": "wanted",
    "search_given_out": "given",
    "search_begun": "begun",
    "search_found": "found",
}


def told(record: dict[str, Any]) -> str:
    text = f"first step {record['first_step']:.1f} s"
    if record["stages"]:
        parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in record["stages"].items())
        text += f"; on the worker: {parts}; {record['searched']} searched, {record['recalled']} known, "
        text += f"{record['benchmarks']} benchmarks; in the client: "
        text += ", ".join(
            f"{part} {seconds:.1f}" for part, seconds in record["reuse"]["seconds"].items() if seconds > 0.05
        )
    return text


def _artifacts(root: Path) -> list[Path]:
    return [path for path in root.rglob("torchrelay/artifacts/**/*") if len(path.stem) == 64]


def _by_stage(manifests: list[artifact_manifest.Manifest]) -> dict[str, float]:
    stages: dict[str, float] = {}
    for manifest in manifests:
        for stage, seconds in manifest.stages:
            stages[stage] = round(stages.get(stage, 0.0) + seconds, 3)
    return stages


def _counts(args: argparse.Namespace) -> list[int]:
    """How many GPUs are tried; 0: a CPU."""
    if args.device == "cpu":
        return [0]
    there = torch.cuda.device_count()
    return [n for n in (1, 2, 4, 8) if n <= min(there, args.gpus or there)]


def _visible(gpus: Sequence[int]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}


@contextlib.contextmanager
def _share_of_processors(gpus: Sequence[int]) -> Iterator[None]:
    """Inside the block, what this thread starts has as large a share of the host's processors as of its GPUs, apart
    from that of other GPUs."""
    there = torch.cuda.device_count() if gpus else 0
    every = sorted(os.sched_getaffinity(0))
    if there > len(gpus):
        each = max(1, len(every) // there)
        first, count = gpus[0] * each, each * len(gpus)
        os.sched_setaffinity(0, [every[i % len(every)] for i in range(first, first + count)])
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


def _draw(own: dict[int, float], waits: dict[int, float], upstream: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (whole, waited) = plt.subplots(1, 2, figsize=(8, 3.4), dpi=150)
    names = ["without\nthe service", *(f"{n} GPU{'s' * (n > 1)}" for n in own)]
    bars = whole.bar(names, [upstream, *own.values()], color=["#b8bcc4", *["#dd8452"] * len(own)])
    whole.bar_label(bars, fmt="%.1f", padding=2)
    whole.margins(y=0.12)
    whole.set_title("max-autotune adds to a first step", loc="left", fontsize=10)
    waited.plot(list(own), list(waits.values()), "s-", color="#4c72b0", label="waited for searches")
    waited.plot(list(own), [waits[1] / n for n in own], ":", color="#888888", label="one GPU's wait, divided")
    waited.set_xlabel("GPUs")
    waited.set_xticks(list(own))
    waited.set_ylim(bottom=0)
    waited.set_title("of that: a compile waits for searches", loc="left", fontsize=10)
    waited.legend(frameon=False)
    for axes in (whole, waited):
        axes.set_ylabel("seconds")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)
