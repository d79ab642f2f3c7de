"""Trains a compiled module with Lightning's Trainer and with Fabric, through torchrelay and then with Inductor.
`lightning`: it is imported first, as most scripts do. `torchrelay`: that is enabled first."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torchrelay

if sys.argv[1] == "lightning":
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    torchrelay.enable()
else:
    torchrelay.enable()
    import lightning
    from lightning.pytorch.loggers import CSVLogger

from torch import Tensor, nn
from torchrelay.integrations import LightningCallback


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, rows: Tensor, _: int) -> Tensor:
        return self.layers(rows).square().mean()

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def begin() -> Tensor:
    torch.compiler.reset()
    lightning.seed_everything(0, verbose=False)
    return torch.randn(12, 6)


def fit(**arguments: Any) -> list[float]:
    rows = begin()
    module = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=3,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(torch.compile(module, backend="inductor"), torch.utils.data.DataLoader(rows, batch_size=4))
    return module.losses


def loop() -> list[float]:
    """Fabric records the arguments of torch.compile, and compiles its own wrapper of the module again."""
    rows = begin()
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = fabric.setup(torch.compile(module, backend="inductor"), optimizer)
    found = []
    for batch in rows.split(4):
        loss = model(batch).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    logger = CSVLogger(Path.cwd(), name=sys.argv[1])
    found = {"fit": fit(logger=logger, callbacks=[LightningCallback()]), "fabric": loop()}
    report = torchrelay.report()
    found["served"] = [report.misses + report.hits + report.disk_hits, len(report.graphs)]
    found["logged"] = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    torchrelay.disable()
    found |= {"fit_inductor": fit(logger=False), "fabric_inductor": loop()}
    found["after"] = len(torchrelay.report().graphs) - len(report.graphs)
    print(json.dumps(found))
