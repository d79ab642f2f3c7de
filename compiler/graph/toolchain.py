"""This process' toolchain and target, as a request has them, and the environment of its timings. Imports torch."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import platform
import re
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal

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


def local_target(kind: Literal["cpu", "cuda"], index: int | None = None) -> schema.Target:
    """This process' target: its CPU's instruction sets and, for `cuda`, the GPU `index` (default: current).

    Of the vector instructions only those that PyTorch's own kernels use: ATEN_CPU_CAPABILITY may have limited them, for
    Inductor as well.
    """
    cpu = _instruction_sets(cpuinfo("flags").split(), torch.backends.cpu.get_cpu_capability())
    if kind == "cpu":
        return schema.Target(kind="cpu", name="", capability="", units=0, cpu=cpu)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return schema.Target(
        kind="cuda",
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        units=properties.multi_processor_count,
        cpu=cpu,
    )


def _instruction_sets(cpuinfo_flags: Collection[str], capability: str = "") -> list[str]:
    """The names of the table that a processor offers, sorted. capability: that PyTorch limits itself to."""
    offered = cpu_isa.GCC_FLAGS.keys() & set(cpuinfo_flags)
    beyond = _BEYOND.get(capability)
    return sorted(name for name in offered if beyond is None or not beyond.fullmatch(name))


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
