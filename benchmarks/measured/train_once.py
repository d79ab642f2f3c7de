"""One process, one model, one back end: in: flags, out: one line of JSON on stdout.

`first_step` runs from just before torch.compile, with torch and the model's library imported, the model and
its batch on the device and the device idle, until forward, backward and optimizer of the first step are done
on the device. Importing Dynamo, Inductor or torchrelay, and loading Mega-Cache artifacts, lie inside. `stages` are its
parts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torchrelay.clients.artifacts.prefetch import start_early
from torchrelay.clients.reports.run_report import process_report
from torchrelay.clients.reports.start_trace import Span, seconds_since_process_start
from workloads import WORKLOADS, build, wait_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, choices=WORKLOADS)
    parser.add_argument("--backend", required=True, help="inductor, torchrelay, or none for plain eager")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=50, help="steps after the first")
    parser.add_argument("--load-artifacts", type=Path, help="Mega-Cache artifacts to start from")
    parser.add_argument("--save-artifacts", type=Path, help="write Mega-Cache artifacts when done")
    parser.add_argument("--change-layer", type=int, help="give this layer of a GPT-2 another activation")
    parser.add_argument("--mode", default="default", help="of torch.compile")
    parser.add_argument(
        "--background",
        action="store_true",
        help="with torchrelay.background, and a key that no other run here has; later steps are compiled",
    )
    parser.add_argument("--precision", help="of float32 products: highest, high or medium")
    args = parser.parse_args()

    if args.precision is not None:
        torch.set_float32_matmul_precision(args.precision)
    device = torch.device(args.device)
    if args.backend == "torchrelay":
        start_early()  # as `torchrelay.enable()` does; what that imports is to lie in the first step
    workload = build(args.model, device)
    if args.change_layer is not None:
        workload.model.transformer.h[args.change_layer].mlp.act = torch.nn.SiLU()
    wait_for(device)

    trace = process_report().begin_trace()
    began = time.perf_counter()
    if args.load_artifacts is not None:
        torch.compiler.load_cache_artifacts(args.load_artifacts.read_bytes())
    mode = None if args.mode == "default" else args.mode
    step = workload.model
    options = {"torchrelay.background": True, "max_pointwise_cat_inputs": 7} if args.background else None
    if args.backend == "torchrelay":
        import torchrelay

        step = torchrelay.compile(workload.model, mode=mode, options=options)
    elif args.backend != "none":
        step = torch.compile(workload.model, backend=args.backend, mode=mode)
    if workload.compiles_update and args.backend != "none":
        update = torch.compile(workload.optimizer.step, backend=args.backend, mode=mode, options=options)
        object.__setattr__(workload, "update", update)
    losses = [workload.step(step)]
    wait_for(device)
    first_step = time.perf_counter() - began
    stages = split(first_step, trace.spans)
    first_in_process = seconds_since_process_start()

    while args.background and relay_reuse()["background"]:
        losses.append(workload.step(step))
    later: list[float] = []
    for _ in range(args.steps):
        before = time.perf_counter()
        losses.append(workload.step(step))
        wait_for(device)
        later.append(time.perf_counter() - before)

    if args.save_artifacts is not None:
        saved = torch.compiler.save_cache_artifacts()
        if saved is None:
            raise SystemExit("torch has no cache artifacts to save")
        args.save_artifacts.write_bytes(saved[0])
    record = {
        "model": args.model,
        "backend": args.backend,
        "device": device_name(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "first_step": first_step,
        "from_process_start": first_in_process,
        "stages": stages,
        "step_milliseconds": statistics.median(later) * 1e3 if later else None,
        "losses": [losses[0].item(), losses[-1].item()],
        "reuse": relay_reuse() if args.backend == "torchrelay" else inductor_reuse(),
    }
    print(json.dumps(record))


STAGES = {
    "import": ("import",),
    "lookup": ("lookup",),
    "guards": ("digests", "guards", "install"),
    "trace": ("function", "trace", "encode", "key"),
    "load": ("graph", "wait", "fetch", "verify", "load"),
}
"""What is shown, and the spans that it sums: stages by their names, others by their kinds."""


def split(first_step: float, spans: list[Span]) -> dict[str, float]:
    """Seconds of the first step by STAGES; "step" is the rest: the step itself, and all that nothing times. An import
    within a stage counts as an import. What a function takes beside its stages is Dynamo's work on it, unless it starts
    without tracing."""
    installs = [span for span in spans if span.name == "install"]

    def name(span: Span) -> str:
        if span.kind == "function" and any(span.began <= each.began <= span.ended for each in installs):
            return "install"
        return span.name if span.kind == "stage" else span.kind

    seconds = dict.fromkeys(STAGES, 0.0)
    shown = {part: stage for stage, parts in STAGES.items() for part in parts}
    around: list[Span] = []
    mine = [span for span in spans if span.thread == threading.get_ident()]
    for span in sorted(mine, key=lambda span: (span.began, -span.ended)):
        while around and around[-1].ended <= span.began:
            around.pop()
        for each, sign in ((span, 1), *((outer, -1) for outer in around[-1:])):
            stage = shown.get(name(each))
            if stage is not None:
                seconds[stage] += sign * (span.ended - span.began)
        around.append(span)
    return seconds | {"step": first_step - sum(seconds.values())}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def inductor_reuse() -> dict[str, int]:
    """How PyTorch's own caches answered, by its counters."""
    from torch._dynamo.utils import counters

    kept = ("autograd_cache_hit", "autograd_cache_miss", "fxgraph_cache_hit", "fxgraph_cache_miss")
    both = counters["aot_autograd"] + counters["inductor"]
    return {name: both[name] for name in kept}


def relay_reuse() -> dict[str, Any]:
    import msgspec
    import torchrelay

    report: dict[str, Any] = msgspec.to_builtins(torchrelay.report())
    report.pop("graphs")
    return report


if __name__ == "__main__":
    main()
