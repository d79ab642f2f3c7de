"""One measurement at a time on a device, among all processes of a machine; and the GPU's clock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

EXCLUSIVE_SECONDS = 30.0
DEVICES = Path("/sys/bus/pci/devices")


def gpu_clock() -> str:
    """The multiprocessors' present clock; '' without NVML."""
    try:
        return f"{torch.cuda.clock_rate()} MHz"
    except Exception:
        return ""


@contextlib.contextmanager
def exclusive(folder: Path | None, seconds: float = EXCLUSIVE_SECONDS) -> Iterator[None]:
    """Hold a lock on `folder` during the block; None: no lock.

    Best effort: after `seconds` the block is entered without the lock, because its holder may hang. Nothing is written:
    jobs may only read what they share.
    """
    if folder is None:
        yield
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield
        return
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:  # it is held; or this file system has no locks
                time.sleep(0.02)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # forks hold the file open too
        os.close(descriptor)


def gpu_lock_folder(devices: Path = DEVICES) -> Path | None:
    """The current GPU's folder in sysfs, the same for all processes of the machine; None if it is unknown."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"  # type: ignore[attr-defined]
    except AttributeError:
        return None
    return devices / address
