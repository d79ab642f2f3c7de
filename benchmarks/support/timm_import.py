"""timm, which imports torchvision for images' transforms, on machines where torchvision is missing or does not load."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch


class _Enumeration(type):
    """A class whose every attribute is its name, as members of an enumeration might be."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Absent(ModuleType):
    """A module whose every attribute is a class of its own that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Enumeration(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_timm() -> Any:
    """torchvision looks missing again afterwards. A build of it for CUDA beside a PyTorch without CUDA has no
    operators, and describes them all the same."""
    if "timm" in sys.modules:
        return sys.modules["timm"]
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            for name in ("nms", "qnms"):
                signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{name}", signature)
        import timm

        return timm
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        import timm
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            with contextlib.suppress(KeyError):
                del sys.modules[name]
    return timm
