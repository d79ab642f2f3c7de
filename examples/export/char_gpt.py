"""What `torchrelay export` asks for: a function that returns a model, example inputs, and which sizes may vary.

torchrelay export torchrelay.examples.export.char_gpt:char_gpt --local -o exported
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrelay.examples.char_gpt import VOCABULARY, CharGPT


class NextCharacter(nn.Module):
    """Characters (B, T) to logits (B, V) of the next character."""

    def __init__(self, gpt: CharGPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.gpt(text)[0]
        return logits[:, -1]


def char_gpt() -> tuple[nn.Module, tuple[Tensor], dict[str, Any]]:
    """Batches of 1 to 64 texts, of 2 to 64 characters."""
    torch.manual_seed(0)
    gpt = CharGPT(layers=2, width=64, heads=4, context=64, dropout=0.0)
    text = torch.randint(0, VOCABULARY, (4, 16))
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=64)
    return NextCharacter(gpt), (text,), {"text": {0: batch, 1: length}}
