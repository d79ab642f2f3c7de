"""CPU targets: the instruction sets of a client's processor in; compiler flags and vector widths out. Knows no torch.

Only names of this table reach a compiler's command line, whatever a request says. The names are Linux's own
(/proc/cpuinfo); the flags are GCC's. An artifact depends on the target's list alone, never on the worker's CPU.
"""

from __future__ import annotations

from collections.abc import Collection

from .allowed_names import words

GCC_FLAGS: dict[str, str] = dict(
    pair.split("=")
    for pair in words(
        """
        amx_bf16=mamx-bf16 amx_fp16=mamx-fp16 amx_int8=mamx-int8 amx_tile=mamx-tile avx=mavx avx2=mavx2
        avx512_bf16=mavx512bf16 avx512_fp16=mavx512fp16 avx512_vnni=mavx512vnni avx512bw=mavx512bw
        avx512cd=mavx512cd avx512dq=mavx512dq avx512f=mavx512f avx512vbmi=mavx512vbmi avx512vl=mavx512vl
        avx_vnni=mavxvnni bmi1=mbmi bmi2=mbmi2 f16c=mf16c fma=mfma movbe=mmovbe popcnt=mpopcnt
        sse4_1=msse4.1 sse4_2=msse4.2 ssse3=mssse3
        """
    )
)
"""cpuinfo name -> GCC flag, without its dash."""

_VECTORS: tuple[tuple[str, frozenset[str]], ...] = (
    ("avx2", frozenset({"avx2", "fma", "f16c"})),
    ("avx512", frozenset({"avx512f", "avx512dq", "avx512bw", "avx512vl", "fma"})),
    ("avx512_vnni", frozenset({"avx512_vnni", "avx512vl"})),
    ("amx_tile", frozenset({"amx_tile", "amx_bf16", "amx_int8"})),
)
"""Inductor's name of a vector instruction set -> the cpuinfo names that it needs."""


def compiler_flags(cpu: Collection[str]) -> list[str]:
    """GCC flags for a target, without their dashes; a generic x86-64 base plus what the target offers."""
    return ["march=x86-64", "mtune=generic", *(GCC_FLAGS[name] for name in sorted(cpu) if name in GCC_FLAGS)]


def capability(cpu: Collection[str]) -> str:
    """A CPU target's vector sets as one text, as `records.DeviceEnvironment` has it: `avx2 avx512`."""
    return " ".join(vector_sets(cpu))


def vector_sets(cpu: Collection[str]) -> list[str]:
    """Inductor's names of the vector instruction sets that a target offers."""
    offered = set(cpu)
    return [name for name, needs in _VECTORS if needs <= offered]
