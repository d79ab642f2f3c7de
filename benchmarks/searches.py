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
import os
import statistics
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchrelay.compiler import artifact, wire
from torchrelay.compiler.tuning import Entry
from torchrelay.examples.machines import FreshMachine
from torchrelay.examples.private_service import PrivateService
from variants import HERE, ChildFailed, run_child
from winners import administration, entries

MODE = "max-autotune-no-cudagraphs"
MODEL = {"cpu": "gpt2-4x256", "cuda": "gpt2-12x768"}
OF_UPSTREAM, OF_ONE, OF_DEFAULT = 0.6, 0.55, 1.10

Say = Callable[[str], None]
Bar = Callable[[bool, str], None]
Run = Callable[[str, PrivateService | None, str], dict[str, Any]]


@dataclass
class Searched:
    """found: for people and JSON. winners: of each service from nothing. service: with all GPUs, if one was started; it
    goes on until the caller's stack ends."""

    found: dict[str, Any]
    winners: list[list[Entry]] = field(default_factory=list)
    service: PrivateService | None = None


def search(
    root: Path,
    args: argparse.Namespace,
    say: Say,
    bar: Bar,
    *,
    parts: Collection[str],
    stack: contextlib.ExitStack,
) -> Searched:
    """Parts: `search`: upstream's beside the service's on one GPU, and on more where there are. `known`: the same
    compile again, its artifacts deleted and all its winners known, beside mode default's, by turns."""
    root.mkdir(exist_ok=True)
    runs: dict[str, dict[str, Any]] = {}

    def run(name: str, service: PrivateService | None, mode: str) -> dict[str, Any]:
        try:
            runs[name] = train(root / name.replace(" ", "-"), service, args, mode)
        except ChildFailed:
            print("" if service is None else service.log_tail(), flush=True)
            raise
        say(f"{name}: {told(runs[name])}")
        return runs[name]

    def serving(gpus: int) -> PrivateService:
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))} if gpus else {}
        return PrivateService(root / f"service-{gpus}", environment=visible)

    counts = _counts(args)
    one = counts[0]
    found: dict[str, Any] = {"runs": runs}
    result = Searched(found)
    alone: Future[tuple[float, float]] | None = None
    if "search" in parts and not args.upstream:
        alone = stack.enter_context(ThreadPoolExecutor(1)).submit(_upstream, run)
        if len(counts) < 2:
            alone.result()
    with _share_of_processors(one), serving(one) as service:
        run(f"torchrelay {one}", service, MODE)
        # after the search: it may find kernels, which makes searches look longer
        run("default", service, "default")
        if "known" in parts:
            found["known"] = _known(service, run, args.repeats, bar)
    if "search" not in parts:
        return result
    upstream, plain = alone.result() if alone is not None else args.upstream
    for gpus in counts[1:]:
        with contextlib.ExitStack() as ends, _share_of_processors(gpus):
            service = (stack if gpus == counts[-1] else ends).enter_context(serving(gpus))
            run(f"torchrelay {gpus}", service, MODE)
            result.winners.append(entries(service))
            result.service = service
    took = {gpus: runs[f"torchrelay {gpus}"]["first_step"] for gpus in counts}
    own = {gpus: took[gpus] - runs["default"]["first_step"] for gpus in counts}
    waits = {gpus: runs[f"torchrelay {gpus}"]["stages"].get("search", 0.0) for gpus in counts}
    say(
        f"max-autotune beyond default: upstream {upstream - plain:.1f} s; "
        + "; ".join(f"{n}: {own[n]:.1f} s" for n in counts)
    )
    say("waited for searches: " + "; ".join(f"{n}: {waits[n]:.1f} s" for n in counts))
    ratio, whole = own[one] / (upstream - plain), took[one] / upstream
    text = "a GPT-2's search through the service / max-autotune's own"
    bar(ratio <= OF_UPSTREAM, f"{ratio:.3f} (<= {OF_UPSTREAM})  {text} (the whole first step: {whole:.3f})")
    if 2 in own:
        ratio, whole = waits[2] / waits[one], own[2] / own[one]
        text = f"the same search on two GPUs / on one (all that max-autotune adds: {whole:.3f})"
        bar(ratio <= OF_ONE, f"{ratio:.3f} (<= {OF_ONE})  {text}")
        if importlib.util.find_spec("matplotlib") is not None:
            _draw(own, waits, upstream - plain, args.out / "autotune_gpus.png")
    found |= {"upstream": {"tuned": upstream, "default": plain}, "seconds": own, "waits": waits}
    return result


def _upstream(run: Run) -> tuple[float, float]:
    """PyTorch's own first steps, with max-autotune and mode default: on the second GPU where there are two, with the
    second share of the processors."""
    with _share_of_processors(1 if torch.cuda.device_count() > 1 else 0, number=1):
        tuned, plain = run("upstream", None, MODE), run("upstream default", None, "default")
    return tuned["first_step"], plain["first_step"]


def _known(service: PrivateService, run: Run, repeats: int, bar: Bar) -> dict[str, Any]:
    pairs = []
    for number in range(repeats):
        pair = []
        for mode in ("default", MODE):
            with administration(service) as asked:
                for entry in asked.cache_entries():
                    asked.remove(entry.key)
            pair.append(run(f"{mode} again {number}", service, mode))
        pairs.append(pair)
    ratio = statistics.median(tuned["first_step"] / plain["first_step"] for plain, tuned in pairs)
    text = "first step with all problems known / mode default's"
    bar(ratio <= OF_DEFAULT, f"{ratio:.3f} (<= {OF_DEFAULT})  {text}")
    searched = sum(tuned["searched"] + tuned["benchmarks"] for _, tuned in pairs)
    recalled = min(tuned["recalled"] for _, tuned in pairs)
    text = f"searches and benchmarks of a compile of which all {recalled} problems are known"
    bar(searched == 0 < recalled, f"{searched} (0)  {text}")
    return {"ratio": ratio, "searched": searched, "recalled": recalled}


def train(root: Path, service: PrivateService | None, args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """One process on a new machine; without a service PyTorch compiles, on the second GPU where there are two."""
    machine = FreshMachine(root)
    command = [sys.executable, str(HERE / "train_once.py"), "--model", MODEL[args.device], "--steps", "0"]
    command += ["--device", args.device, "--mode", mode, "--precision", "high"]
    command += ["--backend", "inductor" if service is None else "torchrelay"]
    client = {}
    if service is None and args.device == "cuda" and torch.cuda.device_count() > 1:
        client = {"CUDA_VISIBLE_DEVICES": "1"}
    if service is not None:  # without prefetch: it would fetch what other modes compiled
        client = {**service.environment, "TORCHRELAY_MODE": "require", "TORCHRELAY_PREFETCH": "0"}
    record = run_child(command, machine.environment(**client), args.child_timeout)
    made = [artifact.read_manifest(path.read_bytes()) for path in _artifacts(root)]
    return record | {
        "stages": _by_stage(made),
        "searched": sum(manifest.searched for manifest in made),
        "recalled": sum(manifest.recalled for manifest in made),
        "benchmarks": sum(manifest.benchmarks for manifest in made),
        "winners": [[each.problem, each.winner, each.milliseconds] for m in made for each in m.tuning],
    }


def told(record: dict[str, Any]) -> str:
    text = f"first step {record['first_step']:.1f} s"
    if record["stages"]:
        parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in record["stages"].items())
        text += f"; on the worker: {parts}; {record['searched']} searched, {record['recalled']} known, "
        text += f"{record['benchmarks']} benchmarks"
    return text


def _artifacts(root: Path) -> list[Path]:
    return [path for path in root.rglob("torchrelay/artifacts/**/*") if len(path.stem) == 64]


def _by_stage(manifests: list[wire.Manifest]) -> dict[str, float]:
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


@contextlib.contextmanager
def _share_of_processors(gpus: int, number: int = 0) -> Iterator[None]:
    """Inside the block, what this thread starts has as large a share of the host's processors as of its GPUs; `number`:
    which share, counted from 0."""
    there = torch.cuda.device_count() if gpus else 0
    every = os.sched_getaffinity(0)
    if there > gpus:
        share = max(1, len(every) * gpus // there)
        os.sched_setaffinity(0, sorted(every)[number * share :][:share])
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


def _draw(own: dict[int, float], waits: dict[int, float], upstream: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), dpi=150)
    axes.plot(list(own), list(own.values()), "o-", color="#dd8452", label="all that max-autotune adds")
    axes.plot(list(own), list(waits.values()), "s-", color="#4c72b0", label="of that: operators searched")
    axes.plot(list(own), [waits[1] / n for n in own], ":", color="#888888", label="one GPU's search, divided")
    axes.axhline(upstream, color="#b8bcc4", label="what it adds without the service")
    axes.set_xlabel("GPUs")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.set_xticks(list(own))
    axes.set_title("Search of a GPT-2's training compile", loc="left", fontsize=11)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)
