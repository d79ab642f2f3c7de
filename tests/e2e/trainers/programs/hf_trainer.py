"""Trains with Hugging Face's Trainer. `both`: with Inductor, then with torchrelay in each spelling, in one process.
`plain`: as a user's script that has never heard of torchrelay."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, set_seed


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))

    def forward(self, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted = self.layers(rows)
        return {"loss": (predicted - labels).square().mean(), "predicted": predicted}


def trainer(**arguments: Any) -> Trainer:
    set_seed(0)
    torch.compiler.reset()
    rows = [{"rows": row, "labels": row[:1]} for row in torch.randn(12, 6)]
    told = TrainingArguments(
        output_dir=".",
        max_steps=3,
        logging_steps=1,
        per_device_train_batch_size=4,
        save_strategy="no",
        use_cpu=True,
        **{"report_to": [], **arguments},
    )
    return Trainer(Regression(), told, train_dataset=rows)


def losses(made: Trainer) -> list[float]:
    made.train()
    return [row["loss"] for row in made.state.log_history if "loss" in row]


def plain() -> dict[str, Any]:
    return {"plain": losses(trainer(torch_compile=True))}


def both() -> dict[str, Any]:
    found: dict[str, Any] = {"inductor": losses(trainer(torch_compile=True))}

    import torchrelay
    from torchrelay.integrations import TransformersCallback

    torchrelay.enable()
    found["enabled"] = losses(trainer(torch_compile=True))
    first = torchrelay.report()
    last = trainer(torch_compile_backend="torchrelay", report_to=["tensorboard"])
    last.add_callback(TransformersCallback(last))
    found["named"] = losses(last)
    second = torchrelay.report()
    found["served"] = [first.misses, second.hits + second.disk_hits, len(second.graphs)]
    found["logged"] = [row for row in last.state.log_history if "torchrelay/misses" in row]
    torchrelay.disable()
    before = len(second.graphs)
    found["disabled"] = losses(trainer(torch_compile=True))
    found["after"] = len(torchrelay.report().graphs) - before
    return found


if __name__ == "__main__":
    print(json.dumps(plain() if sys.argv[1] == "plain" else both()))
