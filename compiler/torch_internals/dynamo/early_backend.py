"""A back end that torch.compile knows by its name before it looks for any. Does not import torch.

torch.compile(backend=NAME) imports every module of torch._dynamo.backends, and only then asks installed packages for
back ends. Most of that is imported again as a need of loading an artifact, but not all, and not with the collector
paused.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_REGISTRY = "torch._dynamo.backends.registry"


class _EarlyBackend:
    """As the EntryPoint of an installed package: `load` is called by the first torch.compile that names it."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self.load = load


def register(name: str, load: Callable[[], Any]) -> None:
    """Have PyTorch call `load` for the back end as soon as it is named; now, or when the registry is imported."""
    registry = sys.modules.get(_REGISTRY)
    if registry is None:
        sys.meta_path.insert(0, _Finder(name, load))
    else:
        _add(registry, name, load)


def _add(registry: ModuleType, name: str, load: Callable[[], Any]) -> None:
    known = getattr(registry, "_BACKENDS", None)
    if isinstance(known, dict):  # else a PyTorch that finds it as an installed package's
        known.setdefault(name, _EarlyBackend(load))


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for one import, and adds the back end after it."""

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self._name = name
        self._load = load

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        own = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            own(module)
            _add(module, self._name, self._load)

        loader.exec_module = exec_module
        return spec
