"""What becomes of cases of PyTorch's databases on the way to a service: traced, captured and checked, not compiled.

python tests/compile/parts/database_capture.py [DATABASE ...] prints what falls back, and a table of the counts.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from database_cases import DATABASES, Case
from msgspec import Struct
from torchrelay.compiler.errors import RelayError
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.request import codec, validate

Outcome = Literal["sent", "refused", "no graph", "no sample"]
OUTCOMES: tuple[Outcome, ...] = ("sent", "refused", "no graph", "no sample")


class Captured(Struct):
    """reasons: what the client or the gateway said of each graph that was refused, or why there is no sample."""

    name: str
    outcome: Outcome
    reasons: list[str] = []


def capture_case(case: Case) -> Captured:
    """Let Dynamo trace a case, and send each graph through the client's capture and the gateway's check."""
    graphs = 0
    refused: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        try:
            sent = capture(gm, inputs, mode="default", options={}).request
            validate.check_request(codec.unpack_request(codec.pack_request(sent)), codec.Limits())
        except RelayError as error:
            refused.append(f"{error.code}: {error.message}")
        except Exception as error:
            refused.append(f"unexpected {type(error).__name__}: {error}")
        return gm.forward

    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call = case.make()
        except Exception as error:  # a sample for another device or library
            return Captured(case.name, "no sample", [f"{type(error).__name__}: {error}"])
        if call is None:
            return Captured(case.name, "no sample")

        def run(*args: Any, **kwargs: Any) -> Any:
            return call.function(*args, **kwargs)

        with contextlib.suppress(Exception):  # of the case itself; the graphs up to it are what matters
            torch.compile(run, backend=backend)(*call.args, **call.kwargs)
    if refused:
        return Captured(case.name, "refused", refused)
    return Captured(case.name, "sent" if graphs else "no graph")


def table(captured: Iterable[Captured]) -> str:
    """Counts for each database, as a table."""
    counts: dict[str, Counter[Outcome]] = {}
    for each in captured:
        counts.setdefault(each.name.partition("/")[0], Counter())[each.outcome] += 1
    lines = ["| database | cases | " + " | ".join(OUTCOMES) + " |", "|---" * (len(OUTCOMES) + 2) + "|"]
    for database, found in counts.items():
        numbers = [found.total(), *(found[outcome] for outcome in OUTCOMES)]
        lines.append(f"| {database} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines)


def main(databases: list[str]) -> int:
    found = []
    for database in databases or DATABASES:
        for case in DATABASES[database]():
            found.append(capture_case(case))
            if found[-1].outcome == "refused":
                print(case.name, *found[-1].reasons, sep="\n    ", flush=True)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
