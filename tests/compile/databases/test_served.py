"""Cases of PyTorch's own databases, some at each commit's turn, through a service: what local Inductor gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torchrelay
from comparison import Program, Run, run, same, served
from database_cases import DATABASES, Call, Case
from database_fallbacks import ALLOWED
from turn import turn

pytestmark = pytest.mark.usefixtures("remote")

CASES = 12
DRAWN_FROM = (
    "operators",
    "inplace",
    "dtypes",
    "foreach",
    "modules",
    "optimizers",
    "higher-order",
    "autograd",
)


class _Made:
    """A case as `run` takes it: what it makes belongs to its inputs."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._call: Call | None = None

    def make(self) -> Program:
        call = self._call = self._case.make()
        if call is None:
            pytest.skip("no sample")
        if not call.kwargs:
            return call.function

        def program(*args: Any) -> Any:
            return call.function(*args, **call.kwargs)

        return program

    def inputs(self, step: int) -> tuple[Any, ...]:
        assert self._call is not None
        return self._call.args


def _run(case: Case, backend: str) -> Run:
    made = _Made(case)
    return run(made.make, made.inputs, backend=backend, steps=1)


@pytest.mark.slow
def test_each_turns_cases_are_what_local_inductor_gives() -> None:
    cases = [case for name in DRAWN_FROM for case in DATABASES[name]() if case.name not in ALLOWED]
    dice = random.Random(turn())
    print("turn", turn())
    compared = 0
    while compared < CASES:
        case = dice.choice(cases)
        try:
            local = _run(case, "inductor")
        except Exception as error:  # what PyTorch itself does not compile shows nothing
            print(f"{case.name}: not compiled locally, {type(error).__name__}")
            continue
        if not local.graphs:
            continue
        print(case.name)
        before = torchrelay.report()
        remote = _run(case, "torchrelay")
        assert (case.name, remote.graphs) == (case.name, local.graphs)
        assert served(before) >= remote.graphs
        same(local, remote, tolerance=1e-6)
        compared += 1
