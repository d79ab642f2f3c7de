"""Names that are the same in each process: content-addressed kernel names, graph numbers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..patching import patched


@contextlib.contextmanager
def restoring_graph_counters() -> Iterator[None]:
    """After the block, graphs are numbered as if it had not been (AOT_COUNTER, _graph_counter and their like)."""
    import torch._functorch.aot_autograd as aot_autograd
    from torch._inductor import compile_fx, graph, scheduler

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(aot_autograd, "AOT_COUNTER", itertools.count()))
        stack.enter_context(patched(compile_fx, "_graph_counter", itertools.count()))
        for owner in (graph, scheduler):  # the scheduler's until 2.12
            if hasattr(owner, "_post_grad_graph_counter"):
                stack.enter_context(patched(owner, "_post_grad_graph_counter", itertools.count()))
        yield


MAX_FUSED_NAME = 100
"""Longest fused part of a kernel's name. Triton cuts its cache's file names at 150 characters; the static launcher
looks for the whole name, does not find the binary, and the kernel would be compiled and measured again on every
client."""


@contextlib.contextmanager
def content_addressed_kernel_names() -> Iterator[None]:
    """Name Triton kernels by what they are and not by where in a graph they stand: Triton's key has the name in it.

    The number at a name's end becomes a digest of the source; of two sources with one digest, the second keeps its
    number.
    """
    from torch._inductor import utils
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.virtualized import V

    fused_name = utils.get_fused_kernel_name
    define: Callable[..., Any] = TritonScheduling.define_kernel
    sources: dict[str, str] = {}

    @functools.wraps(fused_name)
    def get_fused_kernel_name(*args: Any, **kwargs: Any) -> str:
        return fused_name(*args, **kwargs)[:MAX_FUSED_NAME].rstrip("_")

    @functools.wraps(define)
    def define_kernel(self: Any, src_code: str, *args: Any, **kwargs: Any) -> Any:
        digest = hashlib.sha256(src_code.encode()).hexdigest()[:8]
        if sources.setdefault(digest, src_code) != src_code:
            return define(self, src_code, *args, **kwargs)
        with patched(V.graph.wrapper_code, "next_kernel_suffix", lambda: digest):
            return define(self, src_code, *args, **kwargs)

    holders = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torch._inductor") and vars(module).get("get_fused_kernel_name") is fused_name
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(TritonScheduling, "define_kernel", define_kernel))
        for module in holders:
            stack.enter_context(patched(module, "get_fused_kernel_name", get_fused_kernel_name))
        yield
