"""Recorded programs after each change of a matrix, and after changes that do not matter, in processes of their own.

Correct is what eager computes in the same process. Where Dynamo itself differs from eager, the start must have traced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import program_matrix as matrix
import pytest

GROUPS = 12
SAMPLE = 60
CHANGED, UNCHANGED, REPEATED = (
    "is stale",
    "is no change",
    "is recorded again after a change that does not matter",
)


def problems(rows: dict[str, str], folder: Path) -> tuple[dict[str, str], int]:
    """What is wrong with which row; and how many start without tracing if nothing has changed that matters."""
    records = folder / "records"
    records.mkdir()
    first = matrix.start(rows, folder / "first", records, changed=False, unrelated=False, seed="1")
    same = matrix.start(rows, folder / "same", records, changed=False, unrelated=True, seed="2")
    other = matrix.start(rows, folder / "other", records, changed=True, unrelated=False, seed="3")
    wrong: dict[str, str] = {}
    for name in rows:
        if any(is_stale(start[name]) for start in (same, other)):
            wrong[name] = CHANGED
        elif eager(first[name]) == eager(other[name]) or eager(first[name]) != eager(same[name]):
            wrong[name] = UNCHANGED
        elif same[name]["made"] and not first[name]["reasons"]:  # each function of it had a record
            wrong[name] = f"{REPEATED}: {same[name]['reasons']}"
    return wrong, sum(start["started"] > 0 for start in same.values())


def eager(start: dict[str, Any]) -> list[Any]:
    return [each for _, each in start["results"]]


def is_stale(start: dict[str, Any]) -> bool:
    return start["started"] > 0 and any(compiled != plain for compiled, plain in start["results"])


def test_some_rows_of_the_matrix_are_not_stale(tmp_path: Path) -> None:
    rows = matrix.rows()
    assert len(rows) >= 1000
    step = len(rows) // SAMPLE
    wrong, started = problems(dict(list(rows.items())[::step]), tmp_path)
    assert not wrong
    assert started >= 0.85 * SAMPLE


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_no_row_of_the_matrix_is_stale(group: int, tmp_path: Path) -> None:
    rows = dict(list(matrix.rows().items())[group::GROUPS])
    wrong, started = problems(rows, tmp_path)
    assert not wrong
    assert started >= 0.85 * len(rows)
