"""One small graph through the service and back, forward and backward.

`torchrelay doctor` runs this in a process of its own (`python -m torchrelay.clients.commands.diagnostics.round_trip`),
with TORCHRELAY_MODE=require, TORCHRELAY_CHECK=1 (so the first call is compared with eager) and an empty cache. Prints
one line of JSON: how it was served, seconds, whether its first call was compared. A typed error prints as
{"error": ...} instead, and the exit status is 1.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec
import torch

from ....compiler.errors import RelayError
from ...reports.run_report import report


def main() -> int:
    try:
        answer = _round_trip()
    except RelayError as error:
        answer = {"error": {"code": error.code, "message": error.message, "hint": error.advice}}
    print(msgspec.json.encode(answer).decode())
    return 1 if "error" in answer else 0


def _round_trip() -> dict[str, Any]:
    start = time.perf_counter()
    weight = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
    rows = torch.linspace(-2, 2, 32).reshape(4, 8)

    def loss(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(rows @ weight).square().mean()

    compiled = torch.compile(loss, backend="torchrelay", fullgraph=True)
    torch.autograd.grad(compiled(rows, weight), weight)
    seconds = time.perf_counter() - start
    found = report()
    return {"outcome": found.graphs[-1].outcome, "seconds": seconds, "checked": found.checked}


if __name__ == "__main__":
    sys.exit(main())
