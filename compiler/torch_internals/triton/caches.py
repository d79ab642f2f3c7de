"""Triton's and Inductor's caches on disk, and the names of kernels and C extensions in an artifact."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch

from ..patching import patched


@contextlib.contextmanager
def without_autotune_cache() -> Iterator[None]:
    """Inside the block no kernel looks for its winner in a file or leaves it in one: winners go into the artifact, and
    into a node's store."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    with patched(AutotuneCache, "create", staticmethod(lambda *args, **kwargs: None)):
        yield


def triton_cache_folders() -> list[Path]:
    """torch._inductor.runtime.cache_dir_utils.triton_cache_dir: the folders in which Triton keeps what it compiled
    for this process, each kernel in one of its own."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    return [Path(triton_cache_dir(number)) for number in range(torch.cuda.device_count())]


def kernel_key(source: str) -> str:
    """What a bundle calls a Triton kernel: a digest of its source. Upstream's own (CompiledTritonKernels.key) also
    digests every source file of PyTorch, 0.3 s at each start, for what the artifact's toolchain says already."""
    return hashlib.sha256(source.encode()).hexdigest()


def extension_key(source: str, name: str) -> str:
    """What names a C extension of Triton's in an artifact. Its own cache key will not do: that one depends on
    whether the machine has the `file` command."""
    return f"{name}-{hashlib.sha256(source.encode()).hexdigest()}"
