"""Compares two sets of tuning winners: which problems became slower or faster, are new or gone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from ...compiler.tuning import records

Kind = Literal["slower", "other", "faster", "new", "gone"]
_ORDER: tuple[Kind, ...] = ("slower", "other", "faster", "new", "gone")


class TuningChange(Struct, frozen=True):
    """slower, faster: the winners' intervals do not overlap. other: another winner, about as fast."""

    kind: Kind
    old: records.TuningEntry | None
    new: records.TuningEntry | None

    @property
    def share(self) -> float:
        """How much longer the new winner takes, as a share of the old one's time; 0 where there are not two."""
        if self.old is None or self.new is None:
            return 0.0
        return self.new.winner.milliseconds / self.old.winner.milliseconds - 1


def tuning_changes(
    old: Iterable[records.TuningEntry], new: Iterable[records.TuningEntry]
) -> list[TuningChange]:
    """The changes, the largest slowdown first. After an upgrade, an entry is compared with the one for the same device
    under other versions, if there is exactly one."""
    before, after = ({records.entry_sort_key(entry): entry for entry in side} for side in (old, new))
    on_device = _unique(before.values())
    found: list[TuningChange | None] = []
    moved: set[object] = set()
    for place, entry in after.items():
        last = before.get(place) or on_device.get(_on_device(entry))
        if last is None:
            found.append(TuningChange("new", None, entry))
            continue
        moved.add(records.entry_sort_key(last))
        found.append(_change(last, entry))
    found += [TuningChange("gone", entry, None) for place, entry in before.items() if place not in moved]
    changes = [change for change in found if change is not None]
    return sorted(changes, key=lambda change: (_ORDER.index(change.kind), -change.share))


def _unique(entries: Iterable[records.TuningEntry]) -> dict[object, records.TuningEntry]:
    """By device and problem, where there is one."""
    groups: dict[object, list[records.TuningEntry]] = {}
    for entry in entries:
        groups.setdefault(_on_device(entry), []).append(entry)
    return {device: group[0] for device, group in groups.items() if len(group) == 1}


def _on_device(entry: records.TuningEntry) -> tuple[object, ...]:
    place = entry.place
    return place.device, place.capability, place.threads, entry.problem


def _change(old: records.TuningEntry, new: records.TuningEntry) -> TuningChange | None:
    if new.winner.low > old.winner.high:
        return TuningChange("slower", old, new)
    if new.winner.high < old.winner.low:
        return TuningChange("faster", old, new)
    return TuningChange("other", old, new) if old.winner.candidate != new.winner.candidate else None
