"""Callbacks for trainers: `from torchrelay.integrations import TransformersCallback, LightningCallback`.

Each imports its trainer's library when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .clients.reports.lightning_callback import LightningCallback
    from .clients.reports.transformers_callback import TransformersCallback

__all__ = ["LightningCallback", "TransformersCallback"]

_MODULES = {"LightningCallback": "lightning_callback", "TransformersCallback": "transformers_callback"}
"""Name to module of clients/reports."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".clients.reports.{_MODULES[name]}", __package__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
