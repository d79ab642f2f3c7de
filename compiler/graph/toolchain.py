"""This process' toolchain and target, as a request has them. Imports torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Literal

import torch

from ..request import cpu_isa, schema


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
    cpu = cpu_isa.instruction_sets(cpuinfo("flags").split(), torch.backends.cpu.get_cpu_capability())
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


def cpuinfo(field: str, path: Path = Path("/proc/cpuinfo")) -> str:
    """What Linux says of the first processor under `field`; '' if it says nothing."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field and value.strip():
                return value.strip()
    return ""
