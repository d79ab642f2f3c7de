"""Import what a compile, loading an artifact, or a training's first step needs before it is needed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator

import torch

from ..patching import patched, patched_environment
from .light_imports import libraries_when_used, without_debug_import


def preload_loader() -> None:
    """Import what loading an artifact needs, without creating Inductor's process pool."""
    import torch._dynamo  # noqa: F401 - looks at all modules: beside the stubs it would import the libraries

    with patched_environment(TORCH_WARM_POOL="0"), libraries_when_used():
        _import(
            """
            torch._dynamo.aot_compile_types torch._functorch._aot_autograd.aot_autograd_result
            torch._functorch.aot_autograd torch._inductor.async_compile torch._inductor.codecache
            torch._inductor.output_code
            """
        )
        without_debug_import()


def preload_training() -> None:
    """Import what the first step of a script imports that trains a compiled model on several ranks, as far as it is the
    same for nearly all of them; without creating Inductor's process pool or initialising CUDA."""
    with patched_environment(TORCH_WARM_POOL="0"), counting_gpus_in_a_fork():
        preload_loader()
        _import(
            """
            torch._dynamo.backends.registry torch._dynamo.convert_frame torch._inductor.codegen.memory_planning
            torch._inductor.debug torch._inductor.decomposition torch.distributed.checkpoint.state_dict
            torch.distributed.fsdp torch.distributed.tensor.experimental torch.distributed.tensor.parallel
            torch.export._trace torch.fx.experimental.validator torch.nn.attention.flex_attention torch.profiler
            """
        )
        torch._dynamo.backends.registry.list_backends()


def _import(modules: str) -> None:
    for module in modules.split():
        importlib.import_module(module)


@contextlib.contextmanager
def counting_gpus_in_a_fork() -> Iterator[None]:
    """Whether there are GPUs, and how many, NVML says, asked in a fork: CUDA's own answer would keep forks of this
    process from CUDA, and NVML's would leave them open files and a thread that they do not have."""
    with (
        patched_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"),
        patched(
            torch.cuda, "_device_count_nvml", functools.partial(_in_a_fork, torch.cuda._device_count_nvml)
        ),
    ):
        yield


@functools.cache
def _in_a_fork(ask: Callable[[], int]) -> int:
    """0 where NVML does not answer: a negative number would have torch ask CUDA."""
    child = os.fork()
    if child == 0:
        count = 0
        try:
            count = max(0, ask())
        finally:
            os._exit(min(count, 255))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def preload_compiler() -> None:
    """Import everything that a compile needs, without creating Inductor's process pool or touching a GPU."""
    with patched_environment(TORCH_WARM_POOL="0"):
        _import(
            """
            torch._inductor.async_compile torch._inductor.codegen.cpp torch._inductor.codegen.cpp_wrapper_cpu
            torch._inductor.codegen.wrapper torch._inductor.compile_fx torch._inductor.fx_passes.joint_graph
            torch._inductor.fx_passes.post_grad torch._inductor.fx_passes.pre_grad torch._inductor.kernel.conv
            torch._inductor.kernel.mm torch._inductor.lowering torch._inductor.scheduler
            torch.utils.cpp_extension torch.utils.file_baton
            """
        )

    from torch._inductor.decomposition import select_decomp_table

    select_decomp_table()
    from torch._inductor.runtime import triton_compat
    from torch.utils._triton import has_triton_package

    if has_triton_package():
        triton_compat.triton_key()  # a digest of all of Triton's files, that each compiler process would make anew
