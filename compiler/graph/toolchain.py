"""This process' toolchain and target, as a request has them, and the environment of its timings. Imports torch."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import platform
import re
import shutil
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal

import msgspec
import torch

from ..errors import LibraryMismatch
from ..request import cpu_isa, schema
from ..request.operator_table.table import LIBRARIES
from ..tuning.records import DeviceEnvironment

_BEYOND: dict[str, re.Pattern[str]] = {
    "DEFAULT": re.compile(r"avx.*|amx_.*|fma|f16c"),
    "AVX2": re.compile(r"avx512.*|amx_.*"),
}
"""PyTorch's CPU capability -> what it leaves unused."""


def local_toolchain() -> schema.Toolchain:
    """The toolchain of this process. An artifact loads only in a process with the same one."""
    try:
        triton = importlib.metadata.version("triton") if torch.version.cuda else ""
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return schema.Toolchain(
        python=f"cp{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}",
        torch=str(torch.__version__),
        triton=triton,
        cuda=torch.version.cuda or "",
        platform=f"{sys.platform}-{platform.machine()}",
    )


def local_target(kind: Literal["cpu", "cuda"], index: int | None = None, name: str = "") -> schema.Target:
    """This process' target: its CPU's instruction sets and, for `cuda`, the GPU `index` (default: current). name: of a
    CPU target other than the machine's own.

    Of the vector instructions only those that PyTorch's own kernels use: ATEN_CPU_CAPABILITY may have limited them, for
    Inductor as well.
    """
    own = cpu_isa.NATIVE
    cpu = _instruction_sets(cpuinfo(own.cpuinfo).split(), torch.backends.cpu.get_cpu_capability(), own)
    if kind == "cpu":
        return schema.Target(kind="cpu", name=name or own.name, capability="", units=0, cpu=cpu)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return schema.Target(
        kind="cuda",
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        units=properties.multi_processor_count,
        cpu=cpu,
    )


def _instruction_sets(
    cpuinfo_flags: Collection[str], capability: str = "", own: cpu_isa.CpuTarget = cpu_isa.X86_64
) -> list[str]:
    """The names of the target that a processor offers, sorted. capability: that PyTorch limits itself to."""
    offered = own.flags.keys() & set(cpuinfo_flags)
    beyond = _BEYOND.get(capability)
    return sorted(name for name in offered if beyond is None or not beyond.fullmatch(name))


def other_targets() -> list[schema.OtherTarget]:
    """The CPU targets that this environment builds for beside the machine's own."""
    return [
        schema.OtherTarget(target.name, toolchain)
        for target in cpu_isa.cpu_targets().values()
        if target != cpu_isa.NATIVE
        and (not target.compiler or shutil.which(target.compiler))
        and (toolchain := _toolchain_of(target)) is not None
    ]


def _toolchain_of(target: cpu_isa.CpuTarget) -> schema.Toolchain | None:
    """That of clients on a target's machine; None where another machine's torch is not here, or is not this version."""
    own = local_toolchain()
    if target.is_native:
        return msgspec.structs.replace(own, triton="")
    try:
        text = (target.torch_folder / "version.py").read_text()
    except OSError:
        return None
    stated = dict(re.findall(r"^(\w+)\b[^=\n]*= '([^'\n]*)'$", text, re.MULTILINE))
    version = stated.get("__version__", "")
    if version.partition("+")[0] != own.torch.partition("+")[0]:
        return None
    return msgspec.structs.replace(
        own,
        torch=version,
        cuda=stated.get("cuda", ""),
        triton="",
        platform=f"{sys.platform}-{target.machine}",
    )


def local_library(name: str) -> schema.Library:
    """A known library as this process has it (request/operator_table/table.py). Its module is imported, so its
    operators are registered. Raises LibraryMismatch if it is not installed or defines no such operators."""
    known = LIBRARIES[name]
    try:
        version = importlib.metadata.version(name)
        source = importlib.import_module(known.module).__file__
    except (ImportError, RuntimeError, OSError) as error:
        raise LibraryMismatch(f"this Python has no usable {name}: {error}") from None
    if source is None:
        raise LibraryMismatch(f"{known.module} has no source file")
    return schema.Library(name, version, hashlib.sha256(Path(source).read_bytes()).hexdigest())


def require_libraries(libraries: Iterable[schema.Library]) -> None:
    """Have the operators of a checked request's libraries registered. Raises LibraryMismatch, with both versions."""
    for wanted in libraries:
        have = local_library(wanted.name)
        if have != wanted:
            raise LibraryMismatch(
                f"the worker has {have.name} {have.version} (source {have.source[:16]}), "
                f"the client {wanted.version} ({wanted.source[:16]})"
            )


def cpuinfo(field: str, path: Path = Path("/proc/cpuinfo")) -> str:
    """What Linux says of the first processor under `field`; '' if it says nothing."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field and value.strip():
                return value.strip()
    return ""


def device_environment(
    toolchain: schema.Toolchain, target: schema.Target, device: str, threads: int
) -> DeviceEnvironment:
    """The environment of code for `target` that runs on this machine's `device` (`cpu` or `cuda`). threads: those of
    a CPU's kernels."""
    versions = toolchain.torch, toolchain.triton, toolchain.cuda
    if device == "cuda":
        return DeviceEnvironment(target.name, target.capability, gpu_driver(), *versions)
    model = cpuinfo("model name") or platform.processor() or platform.machine()
    return DeviceEnvironment(model, cpu_isa.capability(target.cpu), "", *versions, threads)


def gpu_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The driver's version; '' if it is not known."""
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", path.read_text())
        return found[0] if found else ""
    return ""
