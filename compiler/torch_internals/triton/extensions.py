"""Triton's own C extensions (driver, launchers): record those that are built, use those that an artifact brought."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..patching import patched
from .keys import extension_key


@contextlib.contextmanager
def recording_extensions(found: dict[str, Path]) -> Iterator[None]:
    """Record the C extensions that Triton builds or finds (triton.runtime.build.compile_module_from_src)."""
    owners = _building_modules()
    if not owners:
        yield
        return
    original = owners[0].compile_module_from_src

    @functools.wraps(original)
    def compile_module_from_src(src: str, name: str, *args: Any, **kwargs: Any) -> Any:
        module = original(src, name, *args, **kwargs)
        found[extension_key(src, name)] = Path(module.__file__)
        return module

    with contextlib.ExitStack() as stack:
        for owner in owners:
            stack.enter_context(patched(owner, "compile_module_from_src", compile_module_from_src))
        yield


def _building_modules() -> list[Any]:
    """The modules that hold `compile_module_from_src`; none where Triton is not installed (CPU builds)."""
    try:
        import triton.backends.nvidia.driver
        import triton.runtime.build
    except ImportError:
        return []
    return [triton.runtime.build, triton.backends.nvidia.driver]


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
        for owner in _building_modules():
            original = owner.compile_module_from_src

            @functools.wraps(original)
            def compile_module_from_src(
                src: str, name: str, *args: Any, original: Any = original, **kwargs: Any
            ) -> Any:
                path = self.files.get(extension_key(src, name))
                return original(src, name, *args, **kwargs) if path is None else _load_extension(name, path)

            owner.compile_module_from_src = compile_module_from_src


prebuilt_extensions = PrebuiltExtensions()


def _load_extension(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
