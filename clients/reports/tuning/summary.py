"""What a tuning report shows: rows, totals and slowdowns, from a job's results. Needs no torch.

Times are milliseconds. A ratio is another choice's time as a multiple of the winner's.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from ....compiler.api.tuning.jobs import TuneJob, TuneProgress, TuneResult
from ....compiler.tuning import records
from ....compiler.tuning.records import DeviceEnvironment, TuningEntry
from . import roofline

Kind = Literal["slower", "other", "faster", "new", "gone"]
_ORDER: tuple[Kind, ...] = ("slower", "other", "faster", "new", "gone")
_LARGE = 2048
"""A square matrix product of at least this size in a lock file measures the device's ceiling."""


class TuningRow(Struct, frozen=True, kw_only=True):
    """A problem on a device. rate: flops a second of the winner. intensity: flops for each byte that must be moved.
    saved: milliseconds a step of all graphs that have the problem. None: not known."""

    result: TuneResult
    share: roofline.RooflineShare | None
    rate: float | None
    intensity: float | None
    saved: float | None

    @property
    def entry(self) -> TuningEntry:
        return self.result.entry

    @property
    def of_default(self) -> float | None:
        return _ratio(self.entry.default, self.entry)

    @property
    def of_aten(self) -> float | None:
        return _ratio(self.entry.aten, self.entry)


class TunedGraph(Struct, frozen=True):
    """A graph's tuned problems. default, winners: their time in one step with Inductor's default choices, and now."""

    key: str
    problems: int
    default: float
    winners: float

    @property
    def saved(self) -> float:
        return self.default - self.winners


class TunedDevice(Struct, frozen=True):
    """environment: the device and its versions. rows: the largest gain first."""

    environment: DeviceEnvironment
    rows: list[TuningRow]
    ceilings: roofline.DeviceCeilings

    @property
    def clock(self) -> str:
        """The device's clock while it was measured; '' if it differs between the results."""
        clocks = {row.entry.clock for row in self.rows if row.entry.clock}
        return clocks.pop() if len(clocks) == 1 else ""


class TuningChange(Struct, frozen=True):
    """slower, faster: the winners' intervals do not overlap. other: another winner, about as fast."""

    kind: Kind
    old: TuningEntry | None
    new: TuningEntry | None

    @property
    def share(self) -> float:
        """How much longer the new winner takes, as a share of the old one's time; 0 where there are not two."""
        if self.old is None or self.new is None:
            return 0.0
        return self.new.winner.milliseconds / self.old.winner.milliseconds - 1


class TuningReport(Struct, frozen=True, kw_only=True):
    """seconds: of searching, on all devices together. missing: items of the job without a result. of_default, of_aten:
    geometric means of the ratios, None if there are none. changes: from an older lock, None without one. against: the
    name of that lock."""

    title: str
    job: TuneJob | None
    missing: list[TuneProgress]
    devices: list[TunedDevice]
    graphs: list[TunedGraph]
    problems: int
    known: int
    seconds: float
    candidates: int
    failed: int
    of_default: float | None
    of_aten: float | None
    changes: list[TuningChange] | None
    against: str = ""


def report(
    title: str,
    results: Iterable[TuneResult],
    *,
    job: TuneJob | None = None,
    progress: Iterable[TuneProgress] = (),
    old: Sequence[TuningEntry] | None = None,
    against: str = "",
) -> TuningReport:
    """old: entries of an older lock. Results for the same problem count once."""
    by_problem: dict[tuple[object, ...], TuneResult] = {}
    for result in results:
        by_problem.setdefault((result.ceiling, *records.entry_sort_key(result.entry)), result)
    by_place: dict[DeviceEnvironment, list[TuneResult]] = {}
    for result in by_problem.values():
        by_place.setdefault(result.entry.place, []).append(result)
    devices = [_device(place, found) for place, found in by_place.items()]
    devices = sorted((each for each in devices if each.rows), key=lambda each: _sort_key(each.environment))
    rows = [row for device in devices for row in device.rows]
    searched = [row for row in rows if not row.result.known]
    compared = [row for row in rows if not _only_pads(row.entry)]
    return TuningReport(
        title=title,
        job=job,
        missing=[item for item in progress if item.state not in ("done", "known")],
        devices=devices,
        graphs=_graphs(compared),
        problems=len(rows),
        known=len(rows) - len(searched),
        seconds=job.spent if job is not None else sum(row.entry.seconds for row in searched),
        candidates=sum(row.entry.candidates for row in rows),
        failed=sum(row.entry.failed for row in rows),
        of_default=_mean(row.of_default for row in compared),
        of_aten=_mean(row.of_aten for row in compared),
        changes=None if old is None else _changes(old, rows, job),
        against=against,
    )


def of_lock(entries: Iterable[TuningEntry]) -> list[TuneResult]:
    """A lock file's entries as a job's results. Copies and large square products are the devices' ceilings."""
    return [
        TuneResult(item="", entry=entry, ceiling=ceiling)
        for entry in entries
        for ceiling in ([False, True] if _large(entry) else [entry.problem.op == "copy"])
    ]


def _only_pads(entry: TuningEntry) -> bool:
    """Whether the entry only decides if another problem's matrices are padded; that problem has its own times."""
    return entry.problem.op.startswith("pad_mm.")


def _large(entry: TuningEntry) -> bool:
    sizes = {length for operand in entry.problem.operands for length in operand.size}
    return entry.problem.op == "mm" and len(sizes) == 1 and min(sizes) >= _LARGE


def _sort_key(environment: DeviceEnvironment) -> tuple[str, ...]:
    return environment.device, environment.torch, environment.digest()


def _device(environment: DeviceEnvironment, results: Sequence[TuneResult]) -> TunedDevice:
    tuned = [result for result in results if not result.ceiling]
    measured = [result.entry for result in results if result.ceiling]
    ceilings = roofline.ceilings(measured, [result.entry for result in tuned])
    return TunedDevice(environment, sorted((_row(result, ceilings) for result in tuned), key=_gain), ceilings)


def _row(result: TuneResult, ceilings: roofline.DeviceCeilings) -> TuningRow:
    entry = result.entry
    work, time = roofline.kernel_work(entry), entry.winner.milliseconds
    saved = None
    if entry.default is not None and result.graphs and not _only_pads(entry):
        saved = sum(count for _, count in result.graphs) * (entry.default.milliseconds - time)
    return TuningRow(
        result=result,
        share=roofline.share(entry, ceilings),
        rate=work.flops / (time / 1e3) if work.flops else None,
        intensity=work.flops / work.bytes if work.flops and work.bytes else None,
        saved=saved,
    )


def _gain(row: TuningRow) -> tuple[object, ...]:
    """A sort key: the largest gain first."""
    ratio = row.of_default or row.of_aten
    return ratio is None, -(ratio or 0.0), row.entry.problem.text()


def _graphs(rows: Iterable[TuningRow]) -> list[TunedGraph]:
    """Graphs with problems whose default time is known; the largest saving first."""
    found: dict[str, TunedGraph] = {}
    for row in rows:
        if row.entry.default is None:
            continue
        for key, count in row.result.graphs:
            graph = found.get(key, TunedGraph(key, 0, 0.0, 0.0))
            found[key] = TunedGraph(
                key,
                graph.problems + 1,
                graph.default + count * row.entry.default.milliseconds,
                graph.winners + count * row.entry.winner.milliseconds,
            )
    return sorted(found.values(), key=lambda graph: (-graph.saved, graph.key))


def _changes(
    old: Sequence[TuningEntry], rows: Iterable[TuningRow], job: TuneJob | None
) -> list[TuningChange]:
    """A job has only some problems: the others are not gone."""
    found = tuning_changes(old, [row.entry for row in rows])
    return [change for change in found if job is None or change.kind != "gone"]


def _ratio(other: records.Timing | None, entry: TuningEntry) -> float | None:
    return None if other is None else other.milliseconds / entry.winner.milliseconds


def _mean(ratios: Iterable[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(known) if known else None


# --- two sets of winners, compared ---------------------------------------------------------------------------


def tuning_changes(old: Iterable[TuningEntry], new: Iterable[TuningEntry]) -> list[TuningChange]:
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


def _unique(entries: Iterable[TuningEntry]) -> dict[object, TuningEntry]:
    """By device and problem, where there is one."""
    groups: dict[object, list[TuningEntry]] = {}
    for entry in entries:
        groups.setdefault(_on_device(entry), []).append(entry)
    return {device: group[0] for device, group in groups.items() if len(group) == 1}


def _on_device(entry: TuningEntry) -> tuple[object, ...]:
    place = entry.place
    return place.device, place.capability, place.threads, entry.problem


def _change(old: TuningEntry, new: TuningEntry) -> TuningChange | None:
    if new.winner.low > old.winner.high:
        return TuningChange("slower", old, new)
    if new.winner.high < old.winner.low:
        return TuningChange("faster", old, new)
    return TuningChange("other", old, new) if old.winner.candidate != new.winner.candidate else None
