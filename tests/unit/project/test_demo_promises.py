"""The demo's checks fail when a promise is broken."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from torchrelay.clients.reports.run_report import RunReport
from torchrelay.examples.demo.runs import FIRST, LOCAL, STAGES, TEAMMATE, Run, check


def runs(**changes: Any) -> tuple[Run, Run, Run]:
    """A good demo; `changes` go to the teammate."""
    common: dict[str, Any] = {
        "example": "e",
        "first_step": 1.0,
        "from_process_start": 2.0,
        "step_milliseconds": 1.0,
    }
    losses = (2.0, 1.0)
    local = Run(who=LOCAL, losses=losses, **common)
    first = Run(who=FIRST, **common, losses=losses, misses=2)
    return local, first, Run(who=TEAMMATE, **(common | {"losses": losses, "hits": 2} | changes))


def held(three: tuple[Run, Run, Run], compilers: list[str]) -> bool:
    return all(passed for passed, _ in check(*three, tolerance=1e-5, compilers=compilers))


def test_a_good_demo_holds() -> None:
    assert held(runs(), [])


@pytest.mark.parametrize(
    "changes",
    [
        {"hits": 1, "misses": 1},
        {"hits": 1},
        {"fallbacks": {"no_worker": 1}},
        {"losses": (2.0, 1.001)},
        {"losses": (2.0,)},
    ],
)
def test_a_teammate_that_missed_fell_back_or_differs_is_told(changes: dict[str, Any]) -> None:
    assert not held(runs(**changes), [])


def test_a_compiler_within_reach_is_told() -> None:
    assert not held(runs(), ["/usr/bin/g++"])


def test_the_stages_shown_are_all_that_the_client_reports() -> None:
    shown = [part for parts in STAGES.values() for part in parts]
    assert sorted(shown) == sorted(msgspec.to_builtins(RunReport().snapshot())["seconds"])
