"""Step time and guards of local compilation and torchrelay, paired in one process: in: flags, out: one line of JSON.

Two copies of one model, compiled each way, take turns in blocks of steps; which goes first alternates, so
that drift of clock and temperature falls on both alike. With a disk that has torchrelay's programs its copy starts from
them, without tracing.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time

import torch
import torchrelay
from guard_times import GuardedCalls
from workloads import WORKLOADS, Workload, build, wait_for

BACKENDS = ("inductor", "torchrelay")
GUARD_ROUNDS, CHECKS = 101, 100
"""Checks of all guards in a row, and how often the two ways take turns in that."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, choices=WORKLOADS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--block-steps", type=int, default=10)
    args = parser.parse_args()

    device = torch.device(args.device)
    compiled, guards = {}, {}
    for backend in BACKENDS:
        workload = build(args.model, device)
        step = torch.compile(workload.model, backend=backend)
        compiled[backend] = (workload, step)
        block(workload, step, 5, device)  # compiles and warms up
        guards[backend] = GuardedCalls(functools.partial(workload.step, step), backend)
    counts = {guards[backend].functions for backend in BACKENDS}
    if len(counts) > 1:
        raise SystemExit(f"the two ways have guards in different numbers of functions: {sorted(counts)}")

    times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    ratios: list[float] = []
    checks: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for index in range(args.blocks):
        order = BACKENDS if index % 2 == 0 else BACKENDS[::-1]
        medians = {}
        for backend in order:
            spent = block(*compiled[backend], args.block_steps, device)
            times[backend] += spent
            medians[backend] = statistics.median(spent)
        ratios.append(medians["torchrelay"] / medians["inductor"])
    for index in range(GUARD_ROUNDS):
        for backend in BACKENDS if index % 2 == 0 else BACKENDS[::-1]:
            checks[backend].append(guards[backend].microseconds(CHECKS))
    report = torchrelay.report()
    record = {
        "model": args.model,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "steps": args.blocks * args.block_steps,
        "milliseconds": {backend: statistics.median(spent) * 1e3 for backend, spent in times.items()},
        "ratio": statistics.median(ratios),
        "block_ratios": ratios,
        "programs": report.programs,
        "traced": [str(each) for each in report.traced],
        "guard_microseconds": {backend: statistics.median(spent) for backend, spent in checks.items()},
        "guard_ratio": statistics.median(
            ours / own for ours, own in zip(checks["torchrelay"], checks["inductor"], strict=True)
        ),
    }
    print(json.dumps(record))


def block(workload: Workload, step: torch.nn.Module, steps: int, device: torch.device) -> list[float]:
    """Seconds of each step."""
    spent = []
    for _ in range(steps):
        before = time.perf_counter()
        workload.step(step)
        wait_for(device)
        spent.append(time.perf_counter() - before)
    return spent


if __name__ == "__main__":
    main()
