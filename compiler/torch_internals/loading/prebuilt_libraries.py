"""Have PyTorch take an artifact's prebuilt kernels while a thread loads it, and compile nothing."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...process.fork_safe_lock import ForkSafeLock
from ..dynamo.programs import generated_code
from ..patching import replace
from ..triton.caches import kernel_key
from .light_imports import without_lowering_import


class _PrebuiltLibraries(threading.local):
    """The prebuilt C++ libraries of the artifact that this thread is loading, and the folder for its other files."""

    table: Mapping[tuple[tuple[str, ...], str], Path] | None = None
    folder: Path | None = None
    imports_lowering = True


prebuilt_libraries = _PrebuiltLibraries()
_TRITON = "TRITON_CACHE_DIR"


class _TritonFolder:
    """TRITON_CACHE_DIR while any thread loads an artifact: Triton and Inductor run what lies there under a predictable
    name. Only the whole process can have another. What other threads compile meanwhile is kept there too."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._inside = 0
        self._before: str | None = None

    @contextlib.contextmanager
    def set(self, folder: Path) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._before = os.environ.get(_TRITON)
                os.environ[_TRITON] = str(folder)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    if self._before is None:
                        os.environ.pop(_TRITON, None)
                    else:
                        os.environ[_TRITON] = self._before


_triton_folder = _TritonFolder()


@contextlib.contextmanager
def loading_from(
    libraries: Mapping[tuple[tuple[str, ...], str], Path], folder: Path, *, imports_lowering: bool = True
) -> Iterator[None]:
    """This thread loads an artifact inside the block. libraries: its C++ kernels, by argument types and source. folder:
    where its generated code and its GPU binaries lie; nothing else is run, whatever the cache folders of PyTorch and
    Triton hold, to which others may have written. imports_lowering: whether its code needs Inductor's lowering."""
    prebuilt_libraries.table, prebuilt_libraries.folder = libraries, folder
    prebuilt_libraries.imports_lowering = imports_lowering
    try:
        with generated_code.only_from(folder), _triton_folder.set(folder / "triton"):
            yield
    finally:
        prebuilt_libraries.table = prebuilt_libraries.folder = None
        prebuilt_libraries.imports_lowering = True


def install_library_lookup() -> None:
    """For the thread that loads an artifact: its kernels come from there, by the worker's names; files lie in its
    folder; no processes are started, no tuning caches asked, no lowering imported that its code does not need."""
    from torch._inductor import codecache
    from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels
    from torch._inductor.codecache import CppPythonBindingsCodeCache, FxGraphCache
    from torch._inductor.runtime import autotune_cache

    original = AsyncCompile.cpp_pybinding
    if getattr(original, "_torchrelay", False):
        return

    @functools.wraps(original)
    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        path = (prebuilt_libraries.table or {}).get((tuple(argtypes), source_code))
        if path is None:
            return original(self, argtypes, source_code)
        module = CppPythonBindingsCodeCache._load_library(str(path), path.stem)
        return getattr(module, CppPythonBindingsCodeCache.entry_function)

    cpp_pybinding._torchrelay = True  # type: ignore[attr-defined]
    replace(AsyncCompile, "cpp_pybinding", cpp_pybinding)
    upstream_path = codecache.get_path

    def get_path(basename: str, extension: str, specified_dir: str = "") -> tuple[str, str, str]:
        if prebuilt_libraries.folder is not None:
            specified_dir = str(prebuilt_libraries.folder / "python")
        return upstream_path(basename, extension, specified_dir)

    replace(codecache, "get_path", get_path)
    replace(CompiledTritonKernels, "key", staticmethod(_while_loading(CompiledTritonKernels.key, kernel_key)))
    no_pool = _while_loading(AsyncCompile.use_process_pool, lambda: False)
    replace(AsyncCompile, "use_process_pool", staticmethod(no_pool))
    no_caches = _while_loading(
        autotune_cache.inductor_meta_from_config, lambda: {"autotune_local_cache": False}
    )
    replace(autotune_cache, "inductor_meta_from_config", no_caches)
    no_cache = _while_loading(autotune_cache.AutotuneCache.create, lambda *args, **kwargs: None)
    replace(autotune_cache.AutotuneCache, "create", staticmethod(no_cache))
    upstream_hit = FxGraphCache.cache_hit_post_compile

    def cache_hit_post_compile(*args: Any, **kwargs: Any) -> Any:
        run = upstream_hit if prebuilt_libraries.imports_lowering else without_lowering_import(upstream_hit)
        return run(*args, **kwargs)

    replace(FxGraphCache, "cache_hit_post_compile", staticmethod(cache_hit_post_compile))


def _while_loading(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `instead` in a thread that loads an artifact, and `original` in all others."""

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (original if prebuilt_libraries.table is None else instead)(*args, **kwargs)

    return choose
