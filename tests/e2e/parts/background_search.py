"""Runs products forward and backward with torchrelay.background and a search for the fastest kernels: SALT [WORD ...];
one line of JSON out.

SALT makes a graph of its own. It runs until nothing is left in the background, and three steps more. The backward of
the first step waits until the artifact has taken over. LOCAL: it is compared with what Inductor compiles here with the
same options. LEAVES: ends after three steps.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
import torchrelay

SALT, WORDS = float(sys.argv[1]), sys.argv[2:]
SECONDS = 400
"""The longest that it runs; the tests expect it to end before."""
COMPARED = 8
"""Steps of each version that are compared: the last, among them the one whose backward waited."""
SEARCH = {"max_autotune": True}
Loss = Callable[..., torch.Tensor]


def products(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (torch.bmm(torch.bmm(x, w).relu(), v) * SALT).square().mean()


class Step(NamedTuple):
    """One forward, whose backward may wait. version: what the report says it is."""

    number: int
    version: str
    loss: torch.Tensor
    weights: list[torch.Tensor]

    def values(self) -> list[float]:
        gradients = torch.autograd.grad(self.loss, self.weights)
        return [self.loss.item(), *(gradient.norm().item() for gradient in gradients)]


def forward(loss: Loss, number: int) -> Step:
    torch.manual_seed(number)
    x, *weights = (torch.randn(size) for size in ((4, 48, 32), (4, 32, 64), (4, 64, 32)))
    found = loss(x, *(weight.requires_grad_() for weight in weights))
    version = "eager" if torchrelay.report().background else "tuned"
    return Step(number, version, found, weights)


def differences(steps: list[tuple[Step, list[float]]]) -> dict[str, float]:
    """By version, the largest relative difference from what it must compute."""
    references: dict[str, Loss] = {"eager": products, "tuned": products}
    if "LOCAL" in WORDS:
        torch.compiler.reset()
        references["tuned"] = torch.compile(products, backend="inductor", options=SEARCH)
    found: dict[str, float] = {}
    chosen = [each for name in references for each in [s for s in steps if s[0].version == name][-COMPARED:]]
    for step, values in chosen:
        wanted = forward(references[step.version], step.number).values()
        worst = max(abs(a - b) / abs(b) for a, b in zip(values, wanted, strict=True))
        found[step.version] = max(found.get(step.version, 0.0), worst)
    return found


def run(steps: list[tuple[Step, list[float]]]) -> None:
    loss = torch.compile(products, backend="torchrelay", options={**SEARCH, "torchrelay.background": True})
    until, report = time.monotonic() + SECONDS, torchrelay.report

    def step() -> None:
        made = forward(loss, len(steps))
        steps.append((made, made.values()))
        time.sleep(0.02)

    if "LEAVES" in WORDS:
        for _ in range(3):
            step()
        return
    waiting = forward(loss, len(steps))
    while report().background and time.monotonic() < until:
        step()
    steps.append((waiting, waiting.values()))
    for _ in range(3):
        step()


def main() -> None:
    steps: list[tuple[Step, list[float]]] = []
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", torchrelay.FallbackWarning)
        try:
            run(steps)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    if "LEAVES" in WORDS:
        return
    report = torchrelay.report()
    told = [str(w.message) for w in caught if issubclass(w.category, torchrelay.FallbackWarning)]
    found = {"error": error, "told": told, "differences": differences(steps)}
    print(json.dumps({**found, "report": msgspec.to_builtins(report)}))


if __name__ == "__main__":
    main()
