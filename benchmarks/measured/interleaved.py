"""Several ways to compute the same, timed by turns: calls in; milliseconds of each, round by round, out.

A round takes one sample of each in an order of its own, with cold caches before each sample. On a GPU the write that
empties the L2 also keeps the device busy while the host enqueues the call, so that the events stand around nothing
but kernels: it is written so often that it takes three times as long as the host.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Calls = Mapping[str, Callable[[], Any]]
Times = dict[str, list[float]]

_WARM_UPS = 3
_COVERED = 3.0
_MOST_WRITES = 16


def interleaved(calls: Calls, device: str, *, rounds: int, seconds: float) -> Times:
    """Of each call, one sample a round. `seconds`: after these no round is begun; at least ten are."""
    for call in calls.values():
        for _ in range(_WARM_UPS):
            call()
    take = _on_gpu(calls) if device == "cuda" else _on_cpu(calls)
    orders = random.Random(",".join(calls))
    times: Times = {name: [] for name in calls}
    begun = time.monotonic()
    for number in range(rounds):
        if number >= 10 and time.monotonic() - begun > seconds:
            break
        order = orders.sample(list(calls), len(calls))
        for name, milliseconds in zip(order, take(order), strict=True):
            times[name].append(milliseconds)
    return times


def _on_gpu(calls: Calls) -> Callable[[list[str]], list[float]]:
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    others = torch.empty(max(4 * size, 256 << 20), dtype=torch.uint8, device="cuda")
    event: Any = torch.cuda.Event

    def elapsed(body: Callable[[], Any]) -> float:
        begin, end = (event(enable_timing=True) for _ in range(2))
        begin.record()
        body()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end))

    def host(body: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        body()
        took = (time.perf_counter() - begin) * 1e3
        torch.cuda.synchronize()
        return took

    write = min(elapsed(others.zero_) for _ in range(5))
    enqueued = max(sorted(host(call) for _ in range(9))[4] for call in calls.values())
    writes = min(max(int(_COVERED * enqueued / write) + 1, 1), _MOST_WRITES)

    def take(order: list[str]) -> list[float]:
        pairs = []
        for name in order:
            begin, end = (event(enable_timing=True) for _ in range(2))
            for _ in range(writes):
                others.zero_()
            begin.record()
            calls[name]()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [max(float(begin.elapsed_time(end)), 1e-6) for begin, end in pairs]

    return take


def _on_cpu(calls: Calls) -> Callable[[list[str]], list[float]]:
    others = torch.zeros(32 << 20, dtype=torch.uint8)

    def take(order: list[str]) -> list[float]:
        taken = []
        for name in order:
            others.add_(1)
            begin = time.perf_counter()
            calls[name]()
            taken.append((time.perf_counter() - begin) * 1e3)
        return taken

    return take
