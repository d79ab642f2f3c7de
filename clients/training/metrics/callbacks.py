"""Callbacks of a rank's metrics: the base class, a file of JSON lines, TensorBoard."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import msgspec

from ....compiler.api.training.events import CheckpointEvent, StepMetrics


class Callback:
    """Called with what is reported to the job, in the rank that it was added to. Override what you want; an error in
    it is the script's error."""

    def on_metrics(self, metrics: StepMetrics) -> None:
        """After each `train.report`, and the step's own values now and then."""

    def on_checkpoint(self, checkpoint: CheckpointEvent) -> None:
        """A checkpoint is complete, or has failed. In rank 0, from another thread than the script's."""

    def on_end(self) -> None:
        """The script has ended."""


class MetricsFile(Callback):
    """One JSON object a line, appended to `path`."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 (closed at the end)

    def on_metrics(self, metrics: StepMetrics) -> None:
        self._file.write(msgspec.json.encode(metrics) + b"\n")

    def on_end(self) -> None:
        self._file.close()


class TensorBoard(Callback):
    """Event files in `folder`, for `tensorboard --logdir`. Needs the package `tensorboard`."""

    def __init__(self, folder: str | Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open: Any = None
        self._make = functools.partial(SummaryWriter, str(folder))
        self._lock = threading.Lock()

    def on_metrics(self, metrics: StepMetrics) -> None:
        for name, value in metrics.values.items():
            self._writer().add_scalar(name, value, metrics.step, walltime=metrics.at)

    def on_checkpoint(self, checkpoint: CheckpointEvent) -> None:
        if checkpoint.kept:
            self._writer().add_scalar("checkpoint_seconds", checkpoint.seconds, checkpoint.step)

    def on_end(self) -> None:
        if self._open is not None:
            self._open.close()

    def _writer(self) -> Any:
        """Made when there is something to write, so that no empty file is left."""
        with self._lock:
            self._open = self._open or self._make()
        return self._open
