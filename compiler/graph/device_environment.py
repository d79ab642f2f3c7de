"""Where something is measured: a toolchain and a target in; the place that its timings are good for out."""

from __future__ import annotations

import contextlib
import platform
import re
from pathlib import Path

from ..request import cpu_isa as targets
from ..request import schema
from ..tuning.records import DeviceEnvironment


def device_environment(
    toolchain: schema.Toolchain, target: schema.Target, device: str, threads: int
) -> DeviceEnvironment:
    """Where code for `target` that runs on `device` (`cpu` or `cuda`) is measured, if it is measured here. threads: of
    a CPU's kernels."""
    versions = toolchain.torch, toolchain.triton, toolchain.cuda
    if device == "cuda":
        return DeviceEnvironment(target.name, target.capability, _gpu_driver(), *versions)
    return DeviceEnvironment(_cpu_model(), targets.capability(target.cpu), "", *versions, threads)


def _cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _gpu_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The driver's version; '' if the system does not tell."""
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", path.read_text())
        return found[0] if found else ""
    return ""
