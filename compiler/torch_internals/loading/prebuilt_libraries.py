"""Have PyTorch take an artifact's prebuilt kernels while a thread loads it, and compile nothing."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..triton.keys import kernel_key


class _PrebuiltLibraries(threading.local):
    """The prebuilt C++ libraries of the artifact that this thread is loading."""

    table: Mapping[tuple[tuple[str, ...], str], Path] | None = None


prebuilt_libraries = _PrebuiltLibraries()


def install_library_lookup() -> None:
    """For the thread that loads an artifact, and else as before: AsyncCompile.cpp_pybinding asks the artifact
    first, CompiledTritonKernels.key names its kernels as the worker did, use_process_pool starts no processes
    (there is nothing to compile), autotune_cache's inductor_meta_from_config says that there are no tuning
    caches to consult (winners are in the artifact), rather than digest every source file of Triton, and AutotuneCache
    has none, rather than digest every source file of PyTorch."""
    from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels
    from torch._inductor.codecache import CppPythonBindingsCodeCache
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
    AsyncCompile.cpp_pybinding = cpp_pybinding  # type: ignore[method-assign]
    upstream_key = CompiledTritonKernels.key

    def key(kernel_src: str) -> str:
        return upstream_key(kernel_src) if prebuilt_libraries.table is None else kernel_key(kernel_src)

    CompiledTritonKernels.key = staticmethod(key)  # type: ignore[method-assign]
    upstream_pool: Callable[[], bool] = AsyncCompile.use_process_pool

    def use_process_pool(cls: Any) -> bool:
        return prebuilt_libraries.table is None and upstream_pool()

    AsyncCompile.use_process_pool = classmethod(use_process_pool)  # type: ignore[method-assign,assignment]
    upstream_meta = autotune_cache.inductor_meta_from_config

    def inductor_meta_from_config() -> dict[str, object]:
        return upstream_meta() if prebuilt_libraries.table is None else {"autotune_local_cache": False}

    autotune_cache.inductor_meta_from_config = inductor_meta_from_config
    upstream_cache = autotune_cache.AutotuneCache.create

    def create(*args: Any, **kwargs: Any) -> Any:
        return upstream_cache(*args, **kwargs) if prebuilt_libraries.table is None else None

    autotune_cache.AutotuneCache.create = staticmethod(create)  # type: ignore[method-assign]
