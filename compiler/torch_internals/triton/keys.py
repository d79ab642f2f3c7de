"""Names of Triton kernels and Triton's C extensions in an artifact: digests of their sources."""

from __future__ import annotations

import hashlib


def kernel_key(source: str) -> str:
    """What a bundle calls a Triton kernel: a digest of its source. Upstream's own (CompiledTritonKernels.key) also
    digests every source file of PyTorch, 0.3 s at each start, for what the artifact's toolchain says already."""
    return hashlib.sha256(source.encode()).hexdigest()


def extension_key(source: str, name: str) -> str:
    """What names a C extension of Triton's in an artifact. Its own cache key will not do: that one depends on
    whether the machine has the `file` command."""
    return f"{name}-{hashlib.sha256(source.encode()).hexdigest()}"
