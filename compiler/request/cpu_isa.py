"""CPU targets: what builds C++ for a kind of processor, and the instruction sets of a client's. Knows no torch.

A request names its target (schema.Target.name); only flags of a target here reach a compiler's command line, whatever a
request says. The names of instruction sets are Linux's own (/proc/cpuinfo); the flags are GCC's. An artifact depends on
the target alone, never on the worker's CPU. docs/targets.md tells how a package adds a target.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from msgspec import Struct

from ..errors import Unsupported
from . import schema
from .allowed_names import words

ENTRY_POINTS = "torchrelay.targets"
"""The group in which a package of a worker's environment names its CpuTarget objects."""

_VECTORS: tuple[tuple[str, frozenset[str]], ...] = (
    ("avx2", frozenset({"avx2", "fma", "f16c"})),
    ("avx512", frozenset({"avx512f", "avx512dq", "avx512bw", "avx512vl", "fma"})),
    ("avx512_vnni", frozenset({"avx512_vnni", "avx512vl"})),
    ("amx_tile", frozenset({"amx_tile", "amx_bf16", "amx_int8"})),
    ("asimd", frozenset({"asimd"})),
)
"""Inductor's name of a vector instruction set -> the cpuinfo names that it needs."""


class CpuTarget(Struct, frozen=True, kw_only=True):
    """What builds C++ for a kind of processor.

    name: as requests name it. machine: of computers that run its code, as `uname -m` says. base: GCC flags of each
    build, without their dashes. flags: a cpuinfo name -> the flag that it adds, or, from `+`, what it adds to the first
    of `base`; no other instruction set is used, nor a vector set that needs one. cpuinfo: the line of /proc/cpuinfo
    that has these names. compiler: the C++ compiler, from the PATH; '': the machine's own, as Inductor chooses it.
    """

    name: str
    machine: str
    base: tuple[str, ...]
    flags: Mapping[str, str] = {}
    cpuinfo: str = "flags"
    compiler: str = ""

    @property
    def is_native(self) -> bool:
        """Whether this machine runs its code."""
        return self.machine == platform.machine()

    @property
    def torch_folder(self) -> Path:
        """torch for its machine, unpacked in this Python's environment: another machine's headers and libraries."""
        return Path(sys.prefix) / "targets" / self.machine / "torch"

    def compiler_flags(self, cpu: Collection[str]) -> list[str]:
        """GCC flags for a processor, without their dashes."""
        added = [self.flags[name] for name in sorted(cpu) if name in self.flags]
        first, *others = self.base
        extensions = (flag for flag in added if flag.startswith("+"))
        return ["".join([first, *extensions]), *others, *(flag for flag in added if not flag.startswith("+"))]

    def vector_sets(self, cpu: Collection[str]) -> list[str]:
        """Inductor's names of the vector instruction sets that it uses of a processor's."""
        return vector_sets(self.flags.keys() & set(cpu))


X86_64 = CpuTarget(
    name="",
    machine="x86_64",
    base=("march=x86-64", "mtune=generic"),
    flags=dict(
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
    ),
)
AARCH64 = CpuTarget(
    name="aarch64",
    machine="aarch64",
    base=("march=armv8-a",),
    flags=dict(
        pair.split("=")
        for pair in words(
            "asimd=+simd asimddp=+dotprod asimdhp=+fp16 asimdfhm=+fp16fml asimdrdm=+rdma atomics=+lse bf16=+bf16"
            " crc32=+crc i8mm=+i8mm"
        )
    ),
    cpuinfo="Features",
    compiler="aarch64-linux-gnu-g++",
)
"""Without SVE: the width of its vectors is not in /proc/cpuinfo."""
NATIVE = AARCH64 if AARCH64.is_native else X86_64
"""This machine's own, of ours."""


@functools.cache
def cpu_targets() -> dict[str, CpuTarget]:
    """All that this environment knows, by name: ours, and those of installed packages under other names."""
    known = {target.name: target for target in (X86_64, AARCH64)}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        target = entry.load()
        if isinstance(target, CpuTarget):
            known.setdefault(target.name, target)
    return known


def target_of(target: schema.Target) -> CpuTarget:
    """What builds the C++ of a request for `target`. A GPU's is its host's. Raises Unsupported."""
    if target.kind != "cpu":
        return NATIVE
    try:
        return cpu_targets()[target.name]
    except KeyError:
        raise Unsupported(f"this worker knows no CPU target {target.name!r}") from None


def capability(cpu: Collection[str]) -> str:
    """A CPU's vector sets as one text, as `records.DeviceEnvironment` has it: `avx2 avx512`."""
    return " ".join(vector_sets(cpu))


def vector_sets(cpu: Collection[str]) -> list[str]:
    """Inductor's names of the vector instruction sets that a processor offers."""
    offered = set(cpu)
    return [name for name, needs in _VECTORS if needs <= offered]
