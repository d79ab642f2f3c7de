"""One small graph through the service and back, forward and backward.

`torchrelay doctor` runs this in a process of its own (`python -m torchrelay.clients.commands.diagnostics.round_trip`),
with TORCHRELAY_MODE=require, TORCHRELAY_CHECK=1 and an empty cache. Prints one line of JSON: how it was served, the
largest difference from eager, seconds, whether its first call was checked. A typed error prints as {"error": ...}
instead, and the exit status is 1.
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

    expected = loss(rows, weight)
    (expected_grad,) = torch.autograd.grad(expected, weight)
    compiled = torch.compile(loss, backend="torchrelay", fullgraph=True)
    answer = compiled(rows, weight)
    (found_grad,) = torch.autograd.grad(answer, weight)
    error = max((answer - expected).abs().max().item(), (found_grad - expected_grad).abs().max().item())
    seconds = time.perf_counter() - start
    found = report()
    return {
        "outcome": found.graphs[-1].outcome,
        "max_abs_error": error,
        "seconds": seconds,
        "checked": found.checked,
    }


if __name__ == "__main__":
    sys.exit(main())
