"""What changed between two sets of tuning winners: both in; slower, other, faster, new and gone problems out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from . import tuning

Kind = Literal["slower", "other", "faster", "new", "gone"]
_ORDER: tuple[Kind, ...] = ("slower", "other", "faster", "new", "gone")


class Change(Struct, frozen=True):
    """slower, faster: the winners' intervals do not overlap. other: another winner, about as fast."""

    kind: Kind
    old: tuning.Entry | None
    new: tuning.Entry | None

    @property
    def share(self) -> float:
        """How much longer the new winner takes, as a share of the old one's time; 0 where there are not two."""
        if self.old is None or self.new is None:
            return 0.0
        return self.new.winner.milliseconds / self.old.winner.milliseconds - 1


def changes(old: Iterable[tuning.Entry], new: Iterable[tuning.Entry]) -> list[Change]:
    """What is worth a look, the largest slowdown first. A problem in a new place is compared with the old entry for the
    same device under other versions, if there is one and no more: so after an upgrade."""
    before, after = ({tuning.order(entry): entry for entry in side} for side in (old, new))
    on_device = _unique(before.values())
    found: list[Change | None] = []
    moved: set[object] = set()
    for place, entry in after.items():
        last = before.get(place) or on_device.get(_on_device(entry))
        if last is None:
            found.append(Change("new", None, entry))
            continue
        moved.add(tuning.order(last))
        found.append(_change(last, entry))
    found += [Change("gone", entry, None) for place, entry in before.items() if place not in moved]
    told = [change for change in found if change is not None]
    return sorted(told, key=lambda change: (_ORDER.index(change.kind), -change.share))


def _unique(entries: Iterable[tuning.Entry]) -> dict[object, tuning.Entry]:
    """By device and problem, where there is one."""
    groups: dict[object, list[tuning.Entry]] = {}
    for entry in entries:
        groups.setdefault(_on_device(entry), []).append(entry)
    return {device: group[0] for device, group in groups.items() if len(group) == 1}


def _on_device(entry: tuning.Entry) -> tuple[object, ...]:
    place = entry.place
    return place.device, place.capability, place.threads, entry.problem


def _change(old: tuning.Entry, new: tuning.Entry) -> Change | None:
    if new.winner.low > old.winner.high:
        return Change("slower", old, new)
    if new.winner.high < old.winner.low:
        return Change("faster", old, new)
    return Change("other", old, new) if old.winner.candidate != new.winner.candidate else None
