"""Each entry of PyTorch's own test databases is captured and accepted by the gateway's check, or is on the list."""

from __future__ import annotations

import random

import pytest
from database_capture import Captured, capture_case, table
from database_cases import DATABASES, Case
from database_fallbacks import ALLOWED
from turn import turn

PARTS = {"operators": 8, "inplace": 2, "dtypes": 4, "modules": 3, "optimizers": 4}
"""A database that is not here is one part."""
SAMPLES = 24
"""Of all cases, as many as each commit's turn brings besides."""


def _check(cases: list[Case]) -> None:
    found = [capture_case(case) for case in cases]
    print(table(found))
    assert _wrong(found) == []
    with_graphs = [each for each in found if each.outcome in ("sent", "refused")]
    assert len(with_graphs) > len(found) / 2, table(found)  # else the comparison shows nothing


def _wrong(found: list[Captured]) -> list[str]:
    return [
        f"{each.name}: {'falls back' if each.outcome == 'refused' else 'no longer falls back'} {each.reasons}"
        for each in found
        if (each.outcome == "refused") != (each.name in ALLOWED)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database", "part"), [(name, part) for name in DATABASES for part in range(PARTS.get(name, 1))]
)
def test_each_entry_is_sent_or_on_the_list(database: str, part: int) -> None:
    _check(list(DATABASES[database]())[part :: PARTS.get(database, 1)])


def test_each_turns_share_of_all_entries_is_sent_or_on_the_list() -> None:
    cases = [case for name in DATABASES for case in DATABASES[name]()]
    chosen = random.Random(turn()).sample(cases, SAMPLES)
    print(f"turn {turn()}:", *(case.name for case in chosen), sep="\n  ")
    _check(chosen)


def test_each_name_on_the_list_is_an_entry() -> None:
    assert ALLOWED.keys() <= {case.name for name in DATABASES for case in DATABASES[name]()}
