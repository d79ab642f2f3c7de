"""Whether a CUDA kernel runs on Tensor Cores, and how that is known. Needs no torch.

A name is evidence, not proof. Two closed lists have parts of names: those that say no are looked for first, then those
that say yes. The first part of the second list is that of PyTorch's TensorBoard plugin (kineto tb_plugin,
profiler/tensor_core.py), from NVIDIA's PyProf; the rest are names that cuBLAS, CUTLASS, cuDNN and FlashAttention have
given since. For Triton's kernels the PTX is searched or, if there is none, the disassembled binary.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

UsesTensorCores = Literal["yes", "no", "unknown"]

_YES = (
    # PyProf's
    "h884", "s884", "h1688", "s1688", "hmma", "i8816", "16816", "dgrad_1x1_stride_2x2", "first_layer_wgrad_kernel",
    "conv1x1", "conv2d_c1_k1", "direct_group", "xmma_implicit_gemm", "xmma_sparse_conv",
    "xmma_warp_specialized_implicit_gemm", "xmma_gemm", "xmma_sparse_gemm", "c1688",
    # since then
    "tensorop", "wmma", "gmma", "imma", "tcgen05", "utcmma", "nvjet", "i16832", "i16864", "cutlass3x",
    "flash_fwd", "flash_bwd", "fmha_cutlassf_f16", "fmha_cutlassf_bf16", "fmha_cutlassb_f16", "fmha_cutlassb_bf16",
)  # fmt: skip
_NOT = ("simt", "ffma", "sgemm", "dgemm", "cgemm", "zgemm", "gemv", "splitkreduce", "reducesplitk")
"""Looked for before the others: an `xmma_gemm` that ends in `ffma` multiplies in the ordinary units."""
_PRODUCT = (
    "gemm", "conv", "cudnn", "flash", "fmha", "attention", "nvjet", "cutlass", "wgrad", "dgrad", "triton_tem",
)  # fmt: skip
"""Kernels that multiply matrices, which is what Tensor Cores do."""
_TRITON_WITHOUT = re.compile(r"^triton_(poi|red|per|for)_")
"""Inductor's own names: pointwise, reduction, persistent reduction, foreach; none has a tl.dot."""
_PTX = re.compile(rb"\b(?:mma\.sync|wmma\.mma|wgmma\.mma_async|tcgen05\.mma)\b")
_SASS = re.compile(r"\b(?:HMMA|IMMA|DMMA|BMMA|QMMA|OMMA|HGMMA|IGMMA|QGMMA|BGMMA|UTC[A-Z]*MMA)\b")
_DISASSEMBLY_SECONDS = 20.0


class TensorCoreUse(Struct, frozen=True):
    """how: `name: ` and the part that decided, `ptx`, `sass`, or '' if the answer is not known."""

    answer: UsesTensorCores
    how: str = ""


def of_kernel(name: str, triton: Mapping[str, TensorCoreUse] = {}) -> TensorCoreUse:
    """triton: what `of_triton` found."""
    plain = name.partition("(")[0].strip()
    if plain in triton:
        return triton[plain]
    if match := _TRITON_WITHOUT.match(plain):
        return TensorCoreUse("no", f"name: {match[0]}")
    if part := _part(name, _NOT):
        return TensorCoreUse("no", f"name: {part}")
    if part := _part(name, _YES):
        return TensorCoreUse("yes", f"name: {part}")
    return TensorCoreUse("unknown") if multiplies(name) else TensorCoreUse("no", "no product by its name")


def multiplies(name: str) -> bool:
    """Whether it multiplies matrices, by its name."""
    return _part(name, _PRODUCT) != ""


def _part(name: str, parts: Iterable[str]) -> str:
    """The first of the parts that the name has, in any case; '' if it has none."""
    lower = name.lower()
    return next((part for part in parts if part in lower), "")


def of_triton(
    names: Iterable[str], folders: Iterable[Path], *, nvdisasm: Path | None = None
) -> dict[str, TensorCoreUse]:
    """By name, for kernels found in Triton's caches (a folder for each kernel, with NAME.ptx and NAME.cubin). If a name
    has several binaries, one that uses Tensor Cores is enough."""
    found: dict[str, TensorCoreUse] = {}
    wanted = set(names)
    for path in (
        path for folder in folders for kind in ("ptx", "cubin") for path in folder.glob(f"*/*.{kind}")
    ):
        if path.stem not in wanted:
            continue
        if path.suffix == ".ptx":
            how, used = "ptx", _PTX.search(_content(path)) is not None
        elif nvdisasm is not None and not path.with_suffix(".ptx").exists():
            text = _disassembled(path, nvdisasm)
            if not text:
                continue
            how, used = "sass", _SASS.search(text) is not None
        else:
            continue
        if used or path.stem not in found:
            found[path.stem] = TensorCoreUse("yes" if used else "no", how)
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # removed meanwhile
        return b""


def _disassembled(cubin: Path, nvdisasm: Path) -> str:
    command = [str(nvdisasm), str(cubin)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_DISASSEMBLY_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")
