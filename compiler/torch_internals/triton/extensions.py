"""Triton's own C extensions (driver, launchers): record those that are built, use those that an artifact brought."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..patching import patched, replace
from .caches import extension_key

_log = logging.getLogger(__name__)

Build = Callable[[], ModuleType]


_BUILDERS = ("compile_module_from_src", "compile_module_from_file")
"""Functions of triton.runtime.build that give a module for C source; the driver uses the second since Triton 3.9."""


@contextlib.contextmanager
def recording_extensions(files: dict[str, Path]) -> Iterator[None]:
    """Record the C extensions that Triton builds or finds."""

    def record(key: str, name: str, build: Build) -> ModuleType:
        module = build()
        assert module.__file__ is not None
        files[key] = Path(module.__file__)
        return module

    with contextlib.ExitStack() as stack:
        for owner, name in builders():
            stack.enter_context(patched(owner, name, _around(owner, name, record)))
        yield


def builders() -> Iterator[tuple[ModuleType, str]]:
    """The modules that hold a builder, and its name; none where Triton is not installed (CPU builds)."""
    try:
        import triton.backends.nvidia.driver
        import triton.runtime.build
    except ImportError:
        return
    for owner in (triton.runtime.build, triton.backends.nvidia.driver):
        for name in _BUILDERS:
            if hasattr(owner, name):
                yield owner, name


def _around(
    owner: ModuleType, builder: str, step: Callable[[str, str, Build], ModuleType]
) -> Callable[..., ModuleType]:
    """The builder, with `step` around it, which is given the extension's key, its name, and what builds it."""
    original = getattr(owner, builder)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> ModuleType:
        given = signature.bind(*args, **kwargs).arguments
        source = given["src"] if "src" in given else Path(given["src_path"]).read_text(encoding="utf-8")
        key = extension_key(source, given["name"])
        return step(key, given["name"], lambda: original(*args, **kwargs))

    return build


class PrebuiltExtensions:
    """Prebuilt C extensions of Triton's that verified artifacts brought, by triton_module_id."""

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        self.installed = False

    def add(self, files: Mapping[str, Path]) -> None:
        """Have Triton use these instead of calling a C compiler, from now on."""
        self.files.update(files)
        if not self.installed:
            self.installed = True
            self._install()

    def _install(self) -> None:
        for owner, name in builders():
            replace(owner, name, _around(owner, name, self._find_or_build))

    def _find_or_build(self, key: str, name: str, build: Build) -> ModuleType:
        path = self.files.get(key)
        if path is not None:
            try:
                return load_extension(name, path)
            except ImportError as error:  # in the middle of a training step, where nothing else could be done
                _log.warning("torchrelay: %s is built here, the artifact's cannot be loaded: %s", name, error)
        return build()


prebuilt_extensions = PrebuiltExtensions()


def load_extension(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nvdisasm() -> str:
    """Path of NVIDIA's disassembler in the Triton package; '' if it is not there."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return ""
    path = Path(found.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(path) if path.is_file() else ""
