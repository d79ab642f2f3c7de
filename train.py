"""What a training script may import: `from torchrelay import train`. A script that does not runs as well.

    start = checkpoints.restore(model=model, optimizer=optimizer, loader=batches) or 0
    for step, batch in enumerate(batches, start):
        ...
        train.report(step=step, loss=loss)

The names load what they need when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .clients.training.checkpointing.checkpoints import Checkpoints
    from .clients.training.data import Batches, batches
    from .clients.training.distributed.data_parallel import ddp, join, zero
    from .clients.training.metrics.reporter import (
        Callback,
        MetricsFile,
        TensorBoard,
        add_callback,
        report,
    )
    from .clients.training.precision import autocast
    from .clients.training.preemption import should_stop

_NAMES = {
    "Batches": "data",
    "Callback": "metrics.reporter",
    "Checkpoints": "checkpointing.checkpoints",
    "MetricsFile": "metrics.reporter",
    "TensorBoard": "metrics.reporter",
    "add_callback": "metrics.reporter",
    "autocast": "precision",
    "batches": "data",
    "ddp": "distributed.data_parallel",
    "join": "distributed.data_parallel",
    "report": "metrics.reporter",
    "should_stop": "preemption",
    "zero": "distributed.data_parallel",
}
"""Name to module of clients/training."""

__all__ = [
    "Batches",
    "Callback",
    "Checkpoints",
    "MetricsFile",
    "TensorBoard",
    "add_callback",
    "autocast",
    "batches",
    "ddp",
    "join",
    "report",
    "should_stop",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".clients.training.{_NAMES[name]}", __package__)
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
