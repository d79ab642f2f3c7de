"""What verification costs: graphs of the zoo's models, compiled as a worker does, with and without it by turns.

    python benchmarks/verification.py --models timm/resnet50,transformers/BertForMaskedLM --amp
    python benchmarks/verification.py --device cuda --size real --amp --rounds 3

Each compile is a process of its own, with empty caches. Prints a line of JSON for each model: median seconds of the
compiles of all of its graphs, the ratio, by turns, the seconds of the stage `verify`, and those of the runs that it
makes: `facts` (how inputs are drawn), `eager`, `compiled` (with what is waited for the C++ compiler, and on a GPU with
what measures kernels, both of which are other stages'), `float64` and `rounded`. The first run of a process on a GPU
loads CUDA's libraries, whoever makes it: without verification, it is the run in which kernels are measured."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent / "measured"))

from torchrelay.compiler.artifact import container, manifest
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.pipeline import pipeline, warm_up
from torchrelay.compiler.pipeline.verification import verify
from torchrelay.compiler.request import schema
from zoo_models import registry
from zoo_once import Trained

MODELS = (
    "torchbench/resnet50,timm/tf_efficientnet_b0,transformers/BertForMaskedLM,transformers/OPTForCausalLM"
)


def requests_of(name: str, device: str, *, small: bool, amp: bool) -> list[schema.GraphRequest]:
    """The graphs of a model's training step, as the client sends them."""
    requests: list[schema.GraphRequest] = []

    def backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        requests.append(capture(gm, examples, mode="default", options={}).request)
        return gm

    torch.manual_seed(0)
    model = registry.model(name)
    assert model.build is not None, model.missing
    with torch.device(device):
        built = model.build(small)
    trained = Trained(built, torch.device(device), amp=amp and not model.float32_only)
    trained.step(torch.compile(built.model, backend=backend))
    return requests


@contextlib.contextmanager
def timing(seconds: Counter[str]) -> Iterator[None]:
    """Inside the block, adds up the seconds of each kind of run."""
    facts, run = verify.input_facts, verify._run

    def timed(name: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **named)
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            seconds[name] += time.perf_counter() - began

    def run_timed(request: Any, function: Any, *args: Any, **named: Any) -> Any:
        eager = isinstance(function, torch.fx.GraphModule)
        name = "float64" if named.get("exact") else "rounded" if named.get("rounded") else "eager"
        return timed(name if eager else "compiled", run, request, function, *args, **named)

    verify.input_facts = lambda *args: timed("facts", facts, *args)
    verify._run = run_timed
    try:
        yield
    finally:
        verify.input_facts, verify._run = facts, run


def compile_all(requests: list[schema.GraphRequest], checked: bool) -> dict[str, Any]:
    seconds: Counter[str] = Counter()
    said = []
    if not checked:
        pipeline._verified = lambda *_: manifest.Verification("skipped", "", 0.0, 0.0)
    with tempfile.TemporaryDirectory() as folder, timing(seconds):
        warm_up.warm_up(Path(folder))
        began = time.perf_counter()
        for number, request in enumerate(requests):
            workdir = Path(folder) / str(number)
            workdir.mkdir()
            artifact = pipeline.compile_request(
                request, key=str(number), worker="w", workdir=workdir, progress=lambda stage, detail: None
            )
            about = container.read_manifest(artifact)
            found = about.verification
            seconds["verify"] += dict(about.stages).get("verify", 0.0)
            said.append(f"{found.status} {found.reason}".strip())
        total = time.perf_counter() - began
    return {"total": total, "said": said, **seconds}


def in_a_process(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    # Not of multiprocessing.Pool: its processes may have no children, and Inductor compiles Triton kernels in some.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **named).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=MODELS, help="suite/name, separated by commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=("small", "real"), default="small")
    parser.add_argument("--amp", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as fork servers have it
    for name in chosen.models.split(","):
        requests = in_a_process(
            requests_of, name, chosen.device, small=chosen.size == "small", amp=chosen.amp
        )
        rounds = [
            [in_a_process(compile_all, requests, checked) for checked in (True, False)]
            for _ in range(chosen.rounds)
        ]
        with_it = [each[0] for each in rounds]
        parts = ("verify", "facts", "eager", "compiled", "float64", "rounded")
        median = {
            part: round(statistics.median(each.get(part, 0.0) for each in with_it), 2) for part in parts
        }
        print(
            json.dumps(
                {
                    "model": name,
                    "torch": torch.__version__,
                    "device": chosen.device,
                    "amp": chosen.amp,
                    "graphs": len(requests),
                    "verified seconds": round(statistics.median(each["total"] for each in with_it), 2),
                    "unverified seconds": round(statistics.median(each[1]["total"] for each in rounds), 2),
                    "ratio": round(statistics.median(a["total"] / b["total"] for a, b in rounds), 3),
                    **median,
                    "said": with_it[0]["said"],
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
