"""What PyTorch counts or times in this process, and whether a profiler is on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from .patching import patched


def kernels_measured() -> int:
    """How often this process chose between a Triton kernel's candidates by running them
    (torch._dynamo.utils.compilation_time_metrics of two methods of CachingAutotuner)."""
    from torch._dynamo.utils import compilation_time_metrics

    methods = ("benchmark_all_configs", "coordinate_descent_tuning")
    return sum(len(compilation_time_metrics.get(f"CachingAutotuner.{method}", ())) for method in methods)


def benchmarks_run() -> int:
    """How often Inductor timed something in this process (torch._inductor.runtime.benchmarking.time_and_count)."""
    from torch._dynamo.utils import counters

    return sum(
        count
        for name, count in counters["inductor"].items()
        if name.startswith("benchmarking.") and name.endswith((".benchmark_cpu", ".benchmark_gpu"))
    )


@contextlib.contextmanager
def timing_inside(context: AbstractContextManager[object]) -> Iterator[None]:
    """Inside the block, Inductor enters `context`, which may be entered again, whenever it times something on a GPU
    while it lowers a graph: padded products, candidates that it compares itself."""
    from torch._inductor.runtime.benchmarking import benchmarker

    timed = benchmarker.benchmark_gpu

    def benchmark_gpu(*args: Any, **kwargs: Any) -> Any:
        with context:
            return timed(*args, **kwargs)

    with patched(benchmarker, "benchmark_gpu", benchmark_gpu):
        yield


def profiler_enabled() -> bool:
    """torch._C._autograd._profiler_enabled: whether any profiler of autograd's is on in this thread."""
    return bool(torch._C._autograd._profiler_enabled())
