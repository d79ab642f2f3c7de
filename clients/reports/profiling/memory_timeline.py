"""Memory over time by category, from a trace's allocations and its rank's tensors. Needs no torch.

Parameters, gradients and optimizer state are known by address: the rank looks them up in its optimizer at the end of
each step. Activations are other blocks that are still allocated when the next backward pass begins. The rest is
temporary. Other blocks from before the profile are counted as `before` if the device's allocator reports its total
(CUDA); otherwise they are not counted.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from msgspec import Struct

from .kineto_trace import TraceEvent

MemoryCategory = Literal["parameters", "optimizer", "gradients", "activations", "temporary", "before"]
CATEGORIES: tuple[MemoryCategory, ...] = get_args(MemoryCategory)
_ACTIVATIONS = CATEGORIES.index("activations")
_PARTS = 300


class _Allocation(Struct, frozen=True):
    size: int
    category: MemoryCategory


class TensorSnapshot(Struct, frozen=True):
    """A rank's tensors at the end of a step: [address, bytes] of their storages."""

    parameters: list[tuple[int, int]] = []
    optimizer: list[tuple[int, int]] = []
    gradients: list[tuple[int, int]] = []

    def blocks(self) -> dict[int, _Allocation]:
        """By address."""
        found = {address: _Allocation(size, "gradients") for address, size in self.gradients}
        found |= {address: _Allocation(size, "optimizer") for address, size in self.optimizer}
        return found | {address: _Allocation(size, "parameters") for address, size in self.parameters}


class MemoryPoint(Struct, frozen=True):
    """at: microseconds since the first step's start. bytes: of CATEGORIES, in their order."""

    at: float
    bytes: list[int]


class MemoryTimeline(Struct, frozen=True):
    """device: `cpu` or `cuda:0`. peak: bytes. peak_at: microseconds since the first step's start. at_peak: bytes by
    category. limit: of the device, 0 where it is not known."""

    device: str
    points: list[MemoryPoint]
    peak: int
    peak_at: float
    at_peak: dict[str, int]
    limit: int = 0


def timelines(
    memory: Sequence[TraceEvent],
    *,
    boundaries: Sequence[float],
    snapshots: Mapping[str, Sequence[TensorSnapshot]],
    backwards: Sequence[float],
    clears: Sequence[float] = (),
    limits: Mapping[str, int] = {},
) -> list[MemoryTimeline]:
    """One for each device. memory: the trace's [memory] events. boundaries: when each step begins, and when the last
    one ends. snapshots: at each boundary, by device. backwards: when backward passes begin. clears: when gradients are
    freed."""
    by_device: dict[str, list[TraceEvent]] = {}
    for event in sorted(memory, key=lambda each: each.ts):
        if boundaries[0] <= event.ts <= boundaries[-1]:
            device = "cpu" if event.args.kind == 0 else f"cuda:{event.args.number}"
            by_device.setdefault(device, []).append(event)
    return [
        _timeline(
            device,
            events,
            boundaries,
            snapshots.get(device, ()),
            sorted(backwards),
            sorted(at for at in clears if boundaries[0] <= at),
            limits.get(device, 0),
        )
        for device, events in sorted(by_device.items())
    ]


def _timeline(
    device: str,
    events: Sequence[TraceEvent],
    boundaries: Sequence[float],
    snapshots: Sequence[TensorSnapshot],
    backwards: Sequence[float],
    clears: Sequence[float],
    limit: int,
) -> MemoryTimeline:
    begin = boundaries[0]
    known = [snapshot.blocks() for snapshot in snapshots]
    before = dict(known[0]) if known else {}  # blocks from before the profile, by address
    blocks: dict[int, _Allocation] = {}
    totals: dict[MemoryCategory, int] = dict.fromkeys(CATEGORIES, 0)
    for block in before.values():
        totals[block.category] += block.size
    if known and device != "cpu":
        total = events[0].args.allocated - events[0].args.size
        totals["before"] = max(total - sum(totals.values()), 0)

    def free(address: int, *owners: dict[int, _Allocation]) -> bool:
        """False: no owner has the address."""
        for owner in owners:
            block = owner.pop(address, None)
            if block is not None:
                totals[block.category] -= block.size
                return True
        return False

    history = [(begin, list(totals.values()))]
    next_clear = 0
    for event, freed_at in zip(events, _freed_at(events), strict=True):
        if next_clear < len(clears) and clears[next_clear] <= event.ts:
            next_clear = bisect.bisect_right(clears, event.ts)
            # a CPU's allocator does not report that blocks from before the profile are freed
            for address in [address for address, block in before.items() if block.category == "gradients"]:
                free(address, before)
        address, size = event.args.address, event.args.size
        if size > 0:
            free(address, before)  # that it was freed was not reported
            step = bisect.bisect_left(boundaries, event.ts)  # the boundary that ends this step
            at_end = known[step].get(address) if step < len(known) else None
            passes = bisect.bisect_left(backwards, event.ts)
            category: MemoryCategory = "temporary"
            if at_end is not None and freed_at >= boundaries[step]:
                category = at_end.category
            elif passes < len(backwards) and freed_at > backwards[passes]:
                category = "activations"
            blocks[address] = _Allocation(size, category)
            totals[category] += size
        elif not free(address, blocks, before) and device != "cpu":
            totals["before"] = max(totals["before"] + size, 0)
        history.append((event.ts, list(totals.values())))
    peak_at, at_peak = max(history, key=lambda each: sum(each[1]))
    return MemoryTimeline(
        device=device,
        points=[MemoryPoint(at - begin, sizes) for at, sizes in _thinned(history, boundaries[-1])],
        peak=sum(at_peak),
        peak_at=peak_at - begin,
        at_peak={name: size for name, size in zip(CATEGORIES, at_peak, strict=True) if size},
        limit=limit,
    )


def _freed_at(events: Sequence[TraceEvent]) -> list[float]:
    """When each allocation is freed; infinity: never."""
    found = [math.inf] * len(events)
    allocated: dict[int, int] = {}
    for number, event in enumerate(events):
        if event.args.size > 0:
            allocated[event.args.address] = number
        elif event.args.address in allocated:
            found[allocated.pop(event.args.address)] = event.ts
    return found


def _thinned(history: list[tuple[float, list[int]]], end: float) -> list[tuple[float, list[int]]]:
    """The points with the largest sum and the most activations in each of _PARTS equal parts of the time."""
    if len(history) <= _PARTS:
        return history
    begin = history[0][0]
    width = max((end - begin) / _PARTS, 1e-9)

    def part_of(number: int) -> int:
        return min(int((history[number][0] - begin) / width), _PARTS - 1)

    largest: set[int] = set()
    for _, part in itertools.groupby(range(len(history)), key=part_of):
        numbers = list(part)
        largest.add(max(numbers, key=lambda number: sum(history[number][1])))
        largest.add(max(numbers, key=lambda number: history[number][1][_ACTIVATIONS]))
    return [history[number] for number in sorted(largest)]
