"""Entries of PyTorch's databases start without tracing, some at each commit's turn: none is stale, none traced in vain.

All of them: `python tests/compile/parts/database_starts.py FOLDER`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from database_starts import STARTED_FROM, all_names, run
from turn import turn

ENTRIES = 40


@pytest.mark.slow
def test_each_turns_entries_start_without_tracing_and_are_not_stale(tmp_path: Path) -> None:
    names = random.Random(turn()).sample(all_names(STARTED_FROM), ENTRIES)
    print(f"turn {turn()}:", *names, sep="\n  ")
    recorded, started = run(tmp_path, names, "record"), run(tmp_path, names, "start")
    assert [each.crashed for each in (*recorded, *started) if each.crashed] == []
    assert {each.name: each.stale for each in started if each.stale} == {}
    assert {each.name: each.vain for each in started if each.vain} == {}
    assert sum(each.used for each in started) > 0.8 * sum(each.calls for each in recorded)
