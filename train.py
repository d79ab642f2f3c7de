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
    from .clients.training.checkpoints import Checkpoints
    from .clients.training.data import Batches, batches
    from .clients.training.metrics import Callback, MetricsFile, TensorBoard, add_callback, report
    from .clients.training.parallel import ddp, join, zero
    from .clients.training.setup import autocast
    from .clients.training.stopping import should_stop

_NAMES = {
    "Batches": "data",
    "Callback": "metrics",
    "Checkpoints": "checkpoints",
    "MetricsFile": "metrics",
    "TensorBoard": "metrics",
    "add_callback": "metrics",
    "autocast": "setup",
    "batches": "data",
    "ddp": "parallel",
    "join": "parallel",
    "report": "metrics",
    "should_stop": "stopping",
    "zero": "parallel",
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
