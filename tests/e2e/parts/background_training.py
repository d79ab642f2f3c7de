"""Trains with torchrelay.background, and the same eagerly beside it: SALT [WORD ...]; one line of JSON out.

SALT makes a graph of its own. It trains until no graph is left in the background, and three steps more. DYNAMIC: sizes
are symbolic. CHECKPOINT: the compiled function runs inside torch.utils.checkpoint. DAMAGED: the artifact arrives
damaged. WAITS: writes a line after the first step, and goes on once it reads one. LEAVES: ends after the first step.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

import msgspec
import torch
import torchrelay
from torch.utils.checkpoint import checkpoint
from torchrelay.clients.gateway.compile_client import GatewayClient

SALT, WORDS = float(sys.argv[1]), sys.argv[2:]
SECONDS = 240
"""The longest that it trains; the tests expect it to end before."""


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 12), torch.nn.GELU(), torch.nn.Dropout(0.25), torch.nn.Linear(12, 4)
    )


def loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows) * SALT).square().mean()


class Training:
    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self._model = model()
        if "DROPOUT" not in WORDS:
            self._model.eval()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05)
        self.losses: list[float] = []

    def step(self) -> None:
        torch.manual_seed(len(self.losses))
        rows = torch.linspace(-1, 1, 48).reshape(8, 6)
        if "CHECKPOINT" in WORDS:
            found = checkpoint(self._loss, self._model, rows, use_reentrant=False)
        else:
            found = self._loss(self._model, rows)
        found.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(found.item())


def damage() -> None:
    fetch = GatewayClient.fetch_bytes

    def damaged(self: GatewayClient, *arguments: Any) -> bytes:
        data = fetch(self, *arguments)
        return data[:-1] + bytes([data[-1] ^ 1])

    GatewayClient.fetch_bytes = damaged  # type: ignore[method-assign]


def main() -> None:
    if "DAMAGED" in WORDS:
        damage()
    relay = Training(
        torch.compile(
            loss,
            backend="torchrelay",
            dynamic="DYNAMIC" in WORDS,
            options={"torchrelay.background": True},
        )
    )
    eager, error, until = Training(loss), "", time.monotonic() + SECONDS
    relay.step()
    began = torchrelay.report().background
    if "LEAVES" in WORDS:
        return
    if "WAITS" in WORDS:
        print("begun", flush=True)
        sys.stdin.readline()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", torchrelay.FallbackWarning)
        try:
            while torchrelay.report().background and time.monotonic() < until:
                relay.step()
            for _ in range(3):
                relay.step()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    for _ in relay.losses:
        eager.step()
    told = [str(w.message) for w in caught if issubclass(w.category, torchrelay.FallbackWarning)]
    found = {"began": began, "error": error, "told": told, "relay": relay.losses, "eager": eager.losses}
    print(json.dumps({**found, "report": msgspec.to_builtins(torchrelay.report())}))


if __name__ == "__main__":
    main()
