"""A trace's allocations, and what its rank knew of its tensors, in; memory over time by category out. No torch.

Parameters, gradients and optimizer state are known by address: the rank looks them up in its optimizer at the end of
each step. What is still there when the next backward pass begins was kept for it: activations. The rest is temporary.
What was there before the profile, and is none of the three, is `before` where the device's allocator tells its total
(CUDA), else not counted.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from .kineto_trace import TraceEvent

MemoryCategory = Literal["parameters", "optimizer", "gradients", "activations", "temporary", "before"]
CATEGORIES: tuple[MemoryCategory, ...] = (
    "parameters",
    "optimizer",
    "gradients",
    "activations",
    "temporary",
    "before",
)
_PARTS = 300


class TensorSnapshot(Struct, frozen=True):
    """A rank's tensors at the end of a step: [address, bytes] of their storages."""

    parameters: list[tuple[int, int]] = []
    optimizer: list[tuple[int, int]] = []
    gradients: list[tuple[int, int]] = []

    def categories(self) -> dict[int, MemoryCategory]:
        found: dict[int, MemoryCategory] = {address: "gradients" for address, _ in self.gradients}
        found |= {address: "optimizer" for address, _ in self.optimizer}
        return found | {address: "parameters" for address, _ in self.parameters}

    def sizes(self) -> dict[int, int]:
        return dict([*self.gradients, *self.optimizer, *self.parameters])


class MemoryPoint(Struct, frozen=True):
    """at: microseconds since the first step's start. bytes: of CATEGORIES, in their order."""

    at: float
    bytes: list[int]


class MemoryTimeline(Struct, frozen=True):
    """device: `cpu` or `cuda:0`. peak: bytes, and by category at that moment; before it: microseconds since the start.
    limit: of the device, 0 where it is not known."""

    device: str
    points: list[MemoryPoint]
    peak: int
    peak_at: float
    at_peak: dict[str, int]
    limit: int = 0


class _Block:
    __slots__ = ("category", "size")

    def __init__(self, size: int, category: MemoryCategory) -> None:
        self.size, self.category = size, category


def timelines(
    memory: Sequence[TraceEvent],
    *,
    boundaries: Sequence[float],
    snapshots: Mapping[str, Sequence[TensorSnapshot]],
    backwards: Sequence[float],
    clears: Sequence[float] = (),
    limits: Mapping[str, int] | None = None,
) -> list[MemoryTimeline]:
    """One for each device. memory: the trace's [memory] events. boundaries: where steps begin, and where the last ends.
    snapshots: at each of these, by device. backwards: when backward passes begin. clears: when gradients are
    dropped."""
    by_device: dict[str, list[TraceEvent]] = {}
    for event in memory:
        if boundaries[0] <= event.ts <= boundaries[-1]:
            by_device.setdefault(_device(event), []).append(event)
    return [
        _timeline(
            device,
            sorted(by_device[device], key=lambda each: each.ts),
            boundaries,
            snapshots.get(device, ()),
            sorted(backwards),
            sorted(at for at in clears if boundaries[0] <= at),
            (limits or {}).get(device, 0),
        )
        for device in sorted(by_device)
    ]


def _device(event: TraceEvent) -> str:
    return "cpu" if event.args.kind == 0 else f"cuda:{event.args.number}"


def _timeline(
    device: str,
    events: Sequence[TraceEvent],
    boundaries: Sequence[float],
    snapshots: Sequence[TensorSnapshot],
    backwards: Sequence[float],
    clears: Sequence[float],
    limit: int,
) -> MemoryTimeline:
    begin, end = boundaries[0], boundaries[-1]
    freed = _lives(events)
    known = [snapshot.categories() for snapshot in snapshots]
    totals = dict.fromkeys(CATEGORIES, 0)
    before = _before(device, events, snapshots[0], totals) if snapshots else {}
    blocks: dict[int, _Block] = {}
    taken: list[tuple[float, list[int]]] = [(begin, list(totals.values()))]
    next_clear = 0
    for number, event in enumerate(events):
        if next_clear < len(clears) and clears[next_clear] <= event.ts:
            next_clear = bisect.bisect_right(clears, event.ts)
            _clear(before, totals)
        address, size = event.args.address, event.args.size
        if size > 0:
            gone = before.pop(address, None)
            if gone is not None:  # its end was not told
                totals[gone.category] -= gone.size
            step = bisect.bisect_left(boundaries, event.ts)  # the boundary that ends this step
            known_as = known[step].get(address) if step < len(known) else None
            passes = bisect.bisect_left(backwards, event.ts)
            category: MemoryCategory = "temporary"
            if known_as is not None and freed[number] >= boundaries[step]:
                category = known_as
            elif passes < len(backwards) and freed[number] > backwards[passes]:
                category = "activations"
            block = _Block(size, category)
            blocks[address] = block
            totals[block.category] += size
        else:
            gone = blocks.pop(address, None) or before.pop(address, None)
            if gone is not None:
                totals[gone.category] -= gone.size
            elif device != "cpu":
                totals["before"] = max(totals["before"] + size, 0)
        taken.append((event.ts, list(totals.values())))
    peak_at, at_peak = max(taken, key=lambda each: sum(each[1]))
    return MemoryTimeline(
        device=device,
        points=[MemoryPoint(at - begin, values) for at, values in _thinned(taken, begin, end)],
        peak=sum(at_peak),
        peak_at=peak_at - begin,
        at_peak={name: size for name, size in zip(CATEGORIES, at_peak, strict=True) if size},
        limit=limit,
    )


def _lives(events: Sequence[TraceEvent]) -> list[float]:
    """When each allocation is given back; infinity: it is not."""
    found = [float("inf")] * len(events)
    open_at: dict[int, int] = {}
    for number, event in enumerate(events):
        if event.args.size > 0:
            open_at[event.args.address] = number
        elif event.args.address in open_at:
            found[open_at.pop(event.args.address)] = event.ts
    return found


def _before(
    device: str, events: Sequence[TraceEvent], snapshot: TensorSnapshot, totals: dict[MemoryCategory, int]
) -> dict[int, _Block]:
    """What was there when the profile began."""
    sizes = snapshot.sizes()
    found = {address: _Block(sizes[address], category) for address, category in snapshot.categories().items()}
    for block in found.values():
        totals[block.category] += block.size
    if events and device != "cpu":
        total = events[0].args.allocated - events[0].args.size
        totals["before"] = max(total - sum(block.size for block in found.values()), 0)
    return found


def _clear(before: dict[int, _Block], totals: dict[MemoryCategory, int]) -> None:
    """CPU allocators do not tell the end of what they gave before the profile."""
    for address in [a for a, block in before.items() if block.category == "gradients"]:
        totals["gradients"] -= before.pop(address).size


def _thinned(
    taken: Sequence[tuple[float, list[int]]], begin: float, end: float
) -> list[tuple[float, list[int]]]:
    """Of each of _PARTS equal parts of the time, where the sum and where activations were largest: no peak is lost."""
    if len(taken) <= _PARTS:
        return list(taken)
    width = max((end - begin) / _PARTS, 1e-9)
    place = CATEGORIES.index("activations")
    largest: dict[int, int] = {}
    kept: dict[int, int] = {}
    for number, (at, values) in enumerate(taken):
        part = min(int((at - begin) / width), _PARTS - 1)
        if part not in largest or sum(values) > sum(taken[largest[part]][1]):
            largest[part] = number
        if part not in kept or values[place] > taken[kept[part]][1][place]:
            kept[part] = number
    return [taken[number] for number in sorted({*largest.values(), *kept.values()})]
