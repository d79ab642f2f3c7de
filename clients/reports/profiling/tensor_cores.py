"""A CUDA kernel's name in; whether it runs on Tensor Cores, and how that is known, out. No torch.

A name is evidence, not proof. Two closed lists: parts of names that say yes, and those that say no before them. The
first part of the list is that of PyTorch's TensorBoard plugin (kineto tb_plugin, profiler/tensor_core.py), from
NVIDIA's PyProf; the rest are names that cuBLAS, CUTLASS, cuDNN and FlashAttention have given since. What Triton
compiled is looked up in its PTX, or, where there is none, in the disassembled binary.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

UsesTensorCores = Literal["yes", "no", "unknown"]

_PYPROF = (
    "h884", "s884", "h1688", "s1688", "hmma", "i8816", "16816", "dgrad_1x1_stride_2x2", "first_layer_wgrad_kernel",
    "conv1x1", "conv2d_c1_k1", "direct_group", "xmma_implicit_gemm", "xmma_sparse_conv",
    "xmma_warp_specialized_implicit_gemm", "xmma_gemm", "xmma_sparse_gemm", "c1688",
)  # fmt: skip
_SINCE = (
    "tensorop", "wmma", "gmma", "imma", "tcgen05", "utcmma", "nvjet", "i16832", "i16864", "cutlass3x",
    "flash_fwd", "flash_bwd", "fmha_cutlassf_f16", "fmha_cutlassf_bf16", "fmha_cutlassb_f16", "fmha_cutlassb_bf16",
)  # fmt: skip
_NOT = ("simt", "ffma", "sgemm", "dgemm", "cgemm", "zgemm", "gemv", "splitkreduce", "reducesplitk")
"""Read before the others: an `xmma_gemm` that ends in `ffma` multiplies in the ordinary units."""
_PRODUCT = (
    "gemm",
    "conv",
    "cudnn",
    "flash",
    "fmha",
    "attention",
    "nvjet",
    "cutlass",
    "wgrad",
    "dgrad",
    "triton_tem",
)
"""Kernels that multiply matrices, which is what Tensor Cores do."""
_TRITON_WITHOUT = re.compile(r"^triton_(poi|red|per|for)_")
"""Inductor's own names: pointwise, reduction, persistent reduction, foreach; none has a tl.dot."""
_PTX = re.compile(rb"\b(?:mma\.sync|wmma\.mma|wgmma\.mma_async|tcgen05\.mma)\b")
_SASS = re.compile(r"\b(?:HMMA|IMMA|DMMA|BMMA|QMMA|OMMA|HGMMA|IGMMA|QGMMA|BGMMA|UTC[A-Z]*MMA)\b")
_DISASSEMBLY_SECONDS = 20.0


class TensorCoreUse(Struct, frozen=True):
    """how: `name` and the part that says so, `ptx`, `sass`, or '' where nothing is known."""

    answer: UsesTensorCores
    how: str = ""


def of_kernel(name: str, triton: Mapping[str, TensorCoreUse] = {}) -> TensorCoreUse:
    """triton: what `of_triton` found."""
    plain = name.partition("(")[0].strip()
    if plain in triton:
        return triton[plain]
    if plain.startswith("triton_") and (match := _TRITON_WITHOUT.match(plain)):
        return TensorCoreUse("no", f"name: {match[0]}")
    low = name.lower()
    for part in _NOT:
        if part in low:
            return TensorCoreUse("no", f"name: {part}")
    for part in (*_PYPROF, *_SINCE):
        if part in low:
            return TensorCoreUse("yes", f"name: {part}")
    if multiplies(name):
        return TensorCoreUse("unknown")
    return TensorCoreUse("no", "no product by its name")


def multiplies(name: str) -> bool:
    """Whether it multiplies matrices, by its name."""
    low = name.lower()
    return any(part in low for part in _PRODUCT)


def of_triton(
    names: Iterable[str], folders: Iterable[Path], *, nvdisasm: Path | None = None
) -> dict[str, TensorCoreUse]:
    """Kernels by name, found in Triton's caches (a folder for each kernel, NAME.ptx and NAME.cubin inside). One of
    several binaries of a name that multiplies on Tensor Cores is enough."""
    found: dict[str, TensorCoreUse] = {}
    wanted = set(names)
    for folder in folders:
        for ptx in folder.glob("*/*.ptx"):
            if ptx.stem in wanted:
                _add(found, ptx.stem, "ptx", _PTX.search(_bytes(ptx)) is not None)
    if nvdisasm is None:
        return found
    for folder in folders:
        for cubin in folder.glob("*/*.cubin"):
            if cubin.stem in wanted and not cubin.with_suffix(".ptx").exists():
                text = _disassembled(cubin, nvdisasm)
                if text:
                    _add(found, cubin.stem, "sass", _SASS.search(text) is not None)
    return found


def _add(found: dict[str, TensorCoreUse], name: str, how: str, yes: bool) -> None:
    if yes or name not in found:
        found[name] = TensorCoreUse("yes" if yes else "no", how)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # swept meanwhile
        return b""


def _disassembled(cubin: Path, nvdisasm: Path) -> str:
    try:
        done = subprocess.run(
            [str(nvdisasm), str(cubin)],
            capture_output=True,
            timeout=_DISASSEMBLY_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")
