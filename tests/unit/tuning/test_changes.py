"""What `torchrelay tune diff` tells: intervals decide what is slower, versions may differ, the worst stands first."""

from __future__ import annotations

from pathlib import Path

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torchrelay.clients.commands import application
from torchrelay.clients.jobfiles import tuning_lock
from torchrelay.clients.reports.tuning.summary import TuningChange, tuning_changes
from torchrelay.compiler.tuning import records
from typer.testing import CliRunner

SIDE = records.Operand("float32", (4, 4), (4, 1))
PLACE = records.DeviceEnvironment(
    device="GPU", capability="9.0", driver="1", torch="2.12.0", triton="3.6", cuda="13.0"
)
NEWER = replace(PLACE, torch="2.13.0", driver="2")


def entry(
    op: str, median: float, winner: str = "aten", place: records.DeviceEnvironment = PLACE
) -> records.TuningEntry:
    return records.TuningEntry(
        problem=records.Problem(op, (SIDE, SIDE), SIDE),
        place=place,
        winner=records.Timing(winner, median, median * 0.95, median * 1.05, 9),
        candidates=2,
    )


OLD = [entry("a", 1.0), entry("b", 1.0), entry("c", 1.0), entry("d", 1.0), entry("e", 1.0), entry("f", 1.0)]
NEW = [
    entry("a", 1.04),
    entry("b", 1.2),
    entry("c", 1.04, "triton"),
    entry("d", 0.5, "triton"),
    entry("e", 2.0, "triton"),
    entry("g", 1.0),
]


def told(found: list[TuningChange]) -> list[tuple[str, str]]:
    return [(change.kind, (change.new or change.old).problem.op) for change in found]  # type: ignore[union-attr]


def test_the_worst_stands_first_and_noise_is_not_told() -> None:
    found = tuning_changes(OLD, NEW)
    assert told(found) == [
        ("slower", "e"),
        ("slower", "b"),
        ("other", "c"),
        ("faster", "d"),
        ("new", "g"),
        ("gone", "f"),
    ]
    assert [round(change.share, 2) for change in found] == [1.0, 0.2, 0.04, -0.5, 0.0, 0.0]


@pytest.mark.parametrize("kept", [[], OLD])
def test_after_an_upgrade_the_same_device_is_compared(kept: list[records.TuningEntry]) -> None:
    """Whether or not the file still has the old versions' winners."""
    moved = [replace(each, place=NEWER) for each in NEW]
    expected = [each for each in told(tuning_changes(OLD, NEW)) if each != ("gone", "f") or not kept]
    assert told(tuning_changes(OLD, [*kept, *moved])) == expected


def test_of_several_versions_none_is_the_last() -> None:
    newest = replace(NEWER, torch="2.14.0")
    both = [entry("a", 1.0), entry("a", 1.0, place=NEWER)]
    assert told(tuning_changes(both, [entry("a", 9.0, place=newest)])) == [
        ("new", "a"),
        ("gone", "a"),
        ("gone", "a"),
    ]


@given(st.lists(strategies.tuning_entries, max_size=5, unique_by=records.entry_sort_key), st.data())
def test_what_is_new_one_way_is_gone_the_other(
    entries: list[records.TuningEntry], data: st.DataObject
) -> None:
    assert tuning_changes(entries, entries) == []
    part = [each for each in entries if data.draw(st.booleans())]
    there, back = tuning_changes(part, entries), tuning_changes(entries, part)
    assert len(there) == len(back) == len(entries) - len(part)
    assert {change.kind for change in there} <= {"new"}
    assert {change.kind for change in back} <= {"gone"}


def test_the_command_tells_it_in_lines(tmp_path: Path) -> None:
    files = tmp_path / "old.lock", tmp_path / "new.lock"
    for file, entries in zip(files, (OLD, NEW), strict=True):
        file.write_text(tuning_lock.write(entries))
    shown = CliRunner().invoke(application(), ["tune", "diff", *map(str, files)])
    assert shown.exit_code == 0
    first, second, *_, last = shown.stdout.splitlines()
    assert first == "slower +100.0% e(f32[4,4], f32[4,4]) -> f32[4,4]"
    assert second == "    GPU: aten 1 ms -> triton 2 ms"
    assert last == "2 slower, 1 other, 1 faster, 1 new, 1 gone"
    same = CliRunner().invoke(application(), ["tune", "diff", str(files[0]), str(files[0])])
    assert same.stdout.strip() == "nothing changed"
