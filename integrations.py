"""Classes that other libraries take: callbacks for trainers, cache back ends for autotuners.

`from torchrelay.integrations import TransformersCallback, LightningCallback`; TritonCacheManager and HelionCache are
named in those libraries' settings. Each imports its library when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .clients.artifacts.autotune_cache.helion_cache import HelionCache
    from .clients.artifacts.autotune_cache.triton_cache import TritonCacheManager
    from .clients.reports.lightning_callback import LightningCallback
    from .clients.reports.transformers_callback import TransformersCallback

__all__ = ["HelionCache", "LightningCallback", "TransformersCallback", "TritonCacheManager"]

_MODULES = {
    "HelionCache": "artifacts.autotune_cache.helion_cache",
    "LightningCallback": "reports.lightning_callback",
    "TransformersCallback": "reports.transformers_callback",
    "TritonCacheManager": "artifacts.autotune_cache.triton_cache",
}
"""Name to module of clients."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".clients.{_MODULES[name]}", __package__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
