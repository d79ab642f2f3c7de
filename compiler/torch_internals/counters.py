"""What PyTorch counts or times in this process, and whether a profiler is on."""

from __future__ import annotations

import time

import torch


def trace_seconds() -> float:
    """Seconds since Dynamo began on the frame whose graph this thread compiles; 0 outside of one
    (torch._dynamo.utils.get_metrics_context; its start is private)."""
    from torch._dynamo.utils import get_metrics_context

    context = get_metrics_context()
    return (time.time_ns() - context._start_time_ns) / 1e9 if context.in_progress() else 0.0


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


def profiler_enabled() -> bool:
    """torch._C._autograd._profiler_enabled: whether any profiler of autograd's is on in this thread."""
    return bool(torch._C._autograd._profiler_enabled())
