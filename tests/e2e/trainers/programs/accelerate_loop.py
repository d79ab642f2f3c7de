"""A loop with Accelerate. `both`: with Inductor, then with torchrelay, in one process. `plain`: as `accelerate launch`
tells it."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed


def losses(**arguments: Any) -> list[float]:
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.compiler.reset()
    set_seed(0)
    accelerator = Accelerator(cpu=True, **arguments)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.randn(5, 6)
    found = []
    for _ in range(3):
        loss = model(rows).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def both() -> dict[str, Any]:
    found: dict[str, Any] = {"inductor": losses(dynamo_backend="inductor")}

    import torchrelay

    torchrelay.enable()
    found["named"] = losses(dynamo_backend="torchrelay")
    report = torchrelay.report()
    found["served"] = [report.misses, len(report.graphs)]
    return found


if __name__ == "__main__":
    print(json.dumps({"plain": losses()} if sys.argv[1] == "plain" else both()))
