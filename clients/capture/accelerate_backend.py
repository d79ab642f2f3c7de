"""Hugging Face's Accelerate accepts "torchrelay" as a back end. It has a closed enum of them, DynamoBackend.

Accelerate takes a second to import, and most programs do not use it. So this changes what is imported already, and
else waits for the import: a finder in sys.meta_path that looks for no other module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "TORCHRELAY"


class AccelerateBackend(MetaPathFinder):
    """DynamoBackend("TORCHRELAY") is valid between `enable` and `disable`, and so is the option --dynamo_backend."""

    def __init__(self) -> None:
        self._on = False
        self._modules: dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]] = {
            "accelerate.utils.dataclasses": (_accept, _reject),
            "accelerate.commands.config.config_utils": (_list, _unlist),
        }
        """What to do with a module, and how to undo it."""

    def enable(self) -> None:
        self._on = True
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name, (change, _) in self._modules.items():
            if (module := sys.modules.get(name)) is not None:
                change(module)

    def disable(self) -> None:
        self._on = False
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, (_, undo) in self._modules.items():
            if (module := sys.modules.get(name)) is not None:
                undo(module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self._on:
                    self._modules[fullname][0](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _accept(dataclasses: Any) -> None:
    kind = dataclasses.DynamoBackend
    member = str.__new__(kind, NAME)
    member._name_ = member._value_ = NAME

    def _missing_(_: Any, value: object) -> Any:
        return member if value == NAME else None

    kind._missing_ = classmethod(_missing_)  # the enum module's own way to accept more values


def _reject(dataclasses: Any) -> None:
    if "_missing_" in vars(dataclasses.DynamoBackend):
        del dataclasses.DynamoBackend._missing_


def _list(config_utils: Any) -> None:
    if NAME not in config_utils.DYNAMO_BACKENDS:
        config_utils.DYNAMO_BACKENDS.append(NAME)


def _unlist(config_utils: Any) -> None:
    if NAME in config_utils.DYNAMO_BACKENDS:
        config_utils.DYNAMO_BACKENDS.remove(NAME)


@functools.cache
def process_accelerate() -> AccelerateBackend:
    return AccelerateBackend()
