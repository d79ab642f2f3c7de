"""Import what loading an artifact, or a training's first step, needs before it is needed."""

from __future__ import annotations

import contextlib
import functools
import os

import torch

from ..patching import patched, patched_environment


def preload_loader() -> None:
    """Import what loading an artifact needs, without creating Inductor's process pool."""
    with patched_environment(TORCH_WARM_POOL="0"):
        import torch._dynamo.aot_compile_types
        import torch._functorch._aot_autograd.aot_autograd_result
        import torch._functorch.aot_autograd
        import torch._inductor.async_compile
        import torch._inductor.codecache
        import torch._inductor.codegen.memory_planning
        import torch._inductor.debug
        import torch._inductor.output_code  # noqa: F401


def preload_training() -> None:
    """Import what the first step of a script imports that trains a compiled model on several ranks, as far as it is the
    same for nearly all of them; without creating Inductor's process pool or initialising CUDA."""
    with patched_environment(TORCH_WARM_POOL="0"), _availability_by_nvml():
        preload_loader()
        import torch._dynamo.backends.registry
        import torch._dynamo.convert_frame
        import torch._inductor.decomposition
        import torch.distributed.checkpoint.state_dict
        import torch.distributed.fsdp
        import torch.distributed.tensor.experimental
        import torch.distributed.tensor.parallel
        import torch.export._trace
        import torch.fx.experimental.validator
        import torch.nn.attention.flex_attention
        import torch.profiler

        torch._dynamo.backends.registry.list_backends()


def _availability_by_nvml() -> contextlib.AbstractContextManager[None]:
    """Whether there is a GPU NVML says: torch 2.11 asks as it imports torch._inductor.runtime.benchmarking, and CUDA's
    own answer would keep forks from CUDA. NVML is asked in a fork, for it starts a thread that goes on."""
    return patched(torch.cuda, "is_available", _nvml_sees_a_gpu)


@functools.cache
def _nvml_sees_a_gpu() -> bool:
    child = os.fork()
    if child == 0:
        seen = False
        try:
            seen = torch.cuda._device_count_nvml() > 0
        finally:
            os._exit(0 if seen else 1)
    return os.waitpid(child, 0)[1] == 0
