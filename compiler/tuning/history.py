"""Winners of a problem by the versions that measured them. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from msgspec import Struct

from .records import Timing, TuningEntry


class WinnerChange(Struct, frozen=True):
    """What happened to a problem's times from one version to the next, as a share of the earlier one; null where the
    intervals overlap, or where one was not measured. winner: of what is used. aten: of PyTorch's own kernel, the
    baseline: if it moved as much, the change is PyTorch's."""

    winner: float | None
    aten: float | None


class TunedProblem(Struct, frozen=True):
    """A problem on one model of device. winners: the newest version first; changes: of each from the one after it."""

    problem: str
    device: str
    winners: list[TuningEntry]
    changes: list[WinnerChange]


def by_version(entries: Iterable[TuningEntry]) -> list[TunedProblem]:
    """Groups entries by problem and device, in the order in which they come."""
    groups: dict[tuple[object, ...], list[TuningEntry]] = {}
    for entry in entries:
        place = entry.place
        groups.setdefault((entry.problem, place.device, place.capability, place.threads), []).append(entry)
    return [_tuned(group) for group in groups.values()]


def _tuned(group: list[TuningEntry]) -> TunedProblem:
    newest = sorted(group, key=_version, reverse=True)
    changes = [
        WinnerChange(_change(old.winner, new.winner), _change(old.aten, new.aten))
        for new, old in pairwise(newest)
    ]
    return TunedProblem(newest[0].problem.brief(), newest[0].place.device, newest, changes)


def _version(entry: TuningEntry) -> tuple[tuple[int, ...], ...]:
    place = entry.place
    return tuple(
        tuple(map(int, re.findall(r"[0-9]{1,9}", text)))
        for text in (place.torch, place.triton, place.cuda, place.driver)
    )


def _change(old: Timing | None, new: Timing | None) -> float | None:
    if old is None or new is None or (old.low <= new.high and new.low <= old.high):
        return None
    return new.milliseconds / old.milliseconds - 1
