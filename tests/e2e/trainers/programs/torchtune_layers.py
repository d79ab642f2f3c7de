"""Trains a tiny Llama whose layers and loss torchtune compiles, with the back end that its variable
TORCH_COMPILE_BACKEND names: Inductor, then torchrelay; and last Inductor, in whose place torchrelay is by then."""

from __future__ import annotations

import json
import os

import torch
import torchrelay
from torchtune.models.llama2 import llama2
from torchtune.training import compile_loss, compile_model


def losses(backend: str) -> list[float]:
    os.environ["TORCH_COMPILE_BACKEND"] = backend
    torch.compiler.reset()
    torch.manual_seed(0)
    model = llama2(vocab_size=32, num_layers=2, num_heads=2, num_kv_heads=2, embed_dim=16, max_seq_len=8)
    compile_model(model, verbose=False)
    loss_of = compile_loss(torch.nn.CrossEntropyLoss(), verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(32, (2, 8))
    found = []
    for _ in range(3):
        loss = loss_of(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    found = {"inductor": losses("inductor"), "named": losses("torchrelay")}
    torchrelay.enable()
    found["enabled"] = losses("inductor")
    report = torchrelay.report()
    print(json.dumps({**found, "served": [report.misses, report.hits + report.disk_hits]}))
