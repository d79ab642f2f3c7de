"""The device environment in which timings of this process hold."""

from __future__ import annotations

import contextlib
import platform
import re
from pathlib import Path

from ..request import cpu_isa as targets
from ..request import schema
from ..tuning.records import DeviceEnvironment
from .toolchain import cpuinfo


def device_environment(
    toolchain: schema.Toolchain, target: schema.Target, device: str, threads: int
) -> DeviceEnvironment:
    """The environment of code for `target` that runs on this machine's `device` (`cpu` or `cuda`). threads: those of
    a CPU's kernels."""
    versions = toolchain.torch, toolchain.triton, toolchain.cuda
    if device == "cuda":
        return DeviceEnvironment(target.name, target.capability, _gpu_driver(), *versions)
    model = cpuinfo("model name") or platform.processor() or platform.machine()
    return DeviceEnvironment(model, targets.capability(target.cpu), "", *versions, threads)


def _gpu_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The driver's version; '' if it is not known."""
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", path.read_text())
        return found[0] if found else ""
    return ""
