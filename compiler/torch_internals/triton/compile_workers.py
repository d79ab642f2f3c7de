"""Inductor's pool of processes that compile Triton kernels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ..inductor.config import STATIC_USER_KERNELS

MAX_COMPILE_WORKERS = 24


@contextlib.contextmanager
def compile_workers(device: str, count: int) -> Iterator[None]:
    """Inside the block, Inductor's pool of Triton compilers runs, if `device` is `cuda`: forked now, before this
    process touches a GPU (AsyncCompile.warm_pool).

    They take the ptxas that torch brings, and this process must take the same: Triton's cache goes by it. Each makes
    pages of its own of what this process has imported, some 300 MB, which count as the job's memory.
    """
    if device != "cuda" or count <= 1:
        yield
        return
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    _set_triton_ptxas_path()
    for name, value in STATIC_USER_KERNELS.items():  # what is set later does not reach the pool
        setattr(config, name, value)
    config.compile_threads = min(count, MAX_COMPILE_WORKERS)
    config.worker_start_method = "fork"
    AsyncCompile.process_pool.cache_clear()
    AsyncCompile.warm_pool()
    AsyncCompile.wait_pool_ready()
    try:
        yield
    finally:
        shutdown_compile_workers()


def build_configuration(name: str, source: str, config: Any, caches: Mapping[str, str]) -> None:
    """Build into Triton's cache, in a process of Inductor's pool (torch._inductor.runtime.compile_tasks)."""
    from torch._inductor.codecache import PyCodeCache

    os.environ.update(caches)
    kernel = getattr(PyCodeCache.load(source), name)
    if kernel.fn.fn is None:  # it was sent away from here (prepare_for_pickle)
        PyCodeCache.cache_clear()
        kernel = getattr(PyCodeCache.load(source), name)
    kernel._precompile_config(config)
