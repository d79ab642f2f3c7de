"""A compiled step of an optimizer starts without tracing, and only where tracing would make the same of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from program_optimizers import OPTIMIZERS, TRACED, UNFIT, USED, of
from program_starts import Recorded, from_records, traced, without_compiler


def numbers(results: list[Any]) -> list[float]:
    return [float(each) for each in re.findall(r"-?\d+\.[\de-]+", repr(results))]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_starts_without_tracing(name: str, tmp_path: Path) -> None:
    file, text, programs = tmp_path / "program.py", of(OPTIMIZERS[name]), Recorded()
    wanted = traced(file, text).results
    first, again = (from_records(programs, file, text) for _ in range(2))
    assert (first.how, again.how) == ("traced", "used"), (first.reasons, again.reasons)
    assert first.results == again.results == wanted
    assert again.graphs == 0
    eager = without_compiler(file, text).results
    if "capturable" in name:  # for which eager asks for a GPU
        assert "Error" in repr(eager)
        return
    assert numbers(again.results) == pytest.approx(numbers(eager), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", TRACED | USED)
def test_a_step_after_a_change_is_that_of_the_changed_program(name: str, tmp_path: Path) -> None:
    change, file, programs = (TRACED | USED)[name], tmp_path / "program.py", Recorded()
    here, wanted = traced(file, change.before()).results, traced(file, change.after()).results
    first = from_records(programs, file, change.before())
    again = from_records(programs, file, change.before())
    assert first.results == again.results == here
    assert again.how == "used", (first.reasons, again.reasons)
    changed = from_records(programs, file, change.after())
    assert changed.results == wanted
    assert change.how == "used" or changed.how != "used"
    assert change.how != "used" or changed.graphs == name.endswith("which is traced"), changed.reasons


@pytest.mark.parametrize("name", UNFIT)
def test_a_step_that_may_do_anything_is_traced_at_each_start(name: str, tmp_path: Path) -> None:
    file, programs = tmp_path / "program.py", Recorded()
    first, again = (from_records(programs, file, UNFIT[name]) for _ in range(2))
    assert again.graphs == first.graphs > 0 and again.reasons
    assert first.results == again.results == traced(file, UNFIT[name]).results


@pytest.mark.parametrize("name", ["SGD, momentum", "Adam, a tensor as rate", "AdamW, groups"])
def test_a_start_that_checks_leaves_the_optimizer_to_tracing_as_it_was(name: str, tmp_path: Path) -> None:
    """Else tracing would find a state, and make something else of several groups."""
    file, text, programs = tmp_path / "program.py", of(OPTIMIZERS[name]), Recorded()
    first = from_records(programs, file, text)
    programs.checking = True
    assert from_records(programs, file, text).results == first.results
    assert programs.checks_now and set(programs.checks_now) == {""}
