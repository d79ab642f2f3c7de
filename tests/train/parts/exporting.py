"""Models to export, as a user writes them: functions that return a model, example inputs, and which sizes may vary."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Scripts, traces and exports; a batch of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(8, 16), nn.Linear(16, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, rows: Tensor) -> Tensor:
        return self.fall(self.drop(torch.relu(self.rise(rows)))).softmax(-1)


class Baked(nn.Module):
    """Cannot be scripted (a lambda), and a trace has its number of rows as a constant; exports as it is."""

    def forward(self, *rows: Tensor) -> Tensor:
        (one,) = map(lambda row: row, rows)  # noqa: C417
        return one * (float(one.shape[0]) if torch.jit.is_tracing() else one.shape[0])


class Worse(nn.Module):
    """What is compiled computes something else than eager."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows * (2.0 if torch.compiler.is_compiling() else 3.0)


class TwoInputs(nn.Module):
    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        kept = tokens.float() * mask
        return kept.sum(1), {"sums": kept.cumsum(1)}


def net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(4, 8)


def one_row() -> tuple[nn.Module, Tensor]:
    return Net(), torch.randn(1, 8)


def two_inputs() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return TwoInputs(), (torch.randint(0, 50, (4, 6)), torch.ones(4, 6))


def baked() -> tuple[nn.Module, Tensor]:
    return Baked(), torch.randn(4, 8)


def worse() -> tuple[nn.Module, Tensor]:
    return Worse(), torch.randn(4, 8)


def no_model() -> int:
    return 3
