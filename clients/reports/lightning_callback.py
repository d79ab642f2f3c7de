"""What torchrelay did, in the loggers of a Lightning Trainer."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from .run_report import ReportValues

# Two distributions hold the same code; their classes do not mix.
if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch import Callback, Trainer
else:
    from pytorch_lightning import Callback, Trainer


class LightningCallback(Callback):
    """Logs hits, misses, fallbacks and seconds after each batch or validation that compiled something.

    Trainer(callbacks=[LightningCallback()])
    """

    def __init__(self) -> None:
        self._values = ReportValues()

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._log(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self._log(trainer)

    def on_test_end(self, trainer: Trainer, *_: Any) -> None:
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        if values := self._values.changed():
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)
