"""Import what a compile needs before the first one comes."""

from __future__ import annotations

from ..patching import patched_environment


def preload_compiler() -> None:
    """Import everything that a compile needs, without creating Inductor's process pool or touching a GPU."""
    with patched_environment(TORCH_WARM_POOL="0"):
        import torch._inductor.async_compile
        import torch._inductor.codegen.cpp
        import torch._inductor.codegen.cpp_wrapper_cpu
        import torch._inductor.codegen.wrapper
        import torch._inductor.compile_fx
        import torch._inductor.fx_passes.joint_graph
        import torch._inductor.fx_passes.post_grad
        import torch._inductor.fx_passes.pre_grad
        import torch._inductor.kernel.conv
        import torch._inductor.kernel.mm
        import torch._inductor.lowering
        import torch._inductor.scheduler
        import torch.utils.cpp_extension
        import torch.utils.file_baton  # noqa: F401

    from torch._inductor.decomposition import select_decomp_table

    select_decomp_table()
    from torch._inductor.runtime import triton_compat
    from torch.utils._triton import has_triton_package

    if has_triton_package():
        triton_compat.triton_key()  # a digest of all of Triton's files, that each compiler process would make anew
