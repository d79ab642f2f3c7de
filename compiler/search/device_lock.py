"""One measurement at a time on a device, among all processes of a machine; and the GPU's clock meanwhile."""

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
    """Of the GPU's multiprocessors, now; '' where NVML is not to be had."""
    try:
        return f"{torch.cuda.clock_rate()} MHz"
    except Exception:
        return ""


@contextlib.contextmanager
def exclusive(folder: Path | None, seconds: float = EXCLUSIVE_SECONDS) -> Iterator[None]:
    """Inside the block, no other process is inside such a block with `folder`.

    A wish and no promise: after `seconds` it is entered all the same. Who holds it may have stopped, and to measure is
    then better than to wait. Nothing is written: a job may only read what it shares with others.
    """
    if folder is None:
        yield
        return
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield
        return
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:  # somebody is; or this file system has no locks
                time.sleep(0.02)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_UN)  # copies of this process hold the file open too
        os.close(held)


def gpu_lock_folder(devices: Path = DEVICES) -> Path | None:
    """The folder in which Linux shows the current GPU, to every process of the machine; None if it cannot be told."""
    told = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        address = f"{told.pci_domain_id:04x}:{told.pci_bus_id:02x}:{told.pci_device_id:02x}.0"  # type: ignore[attr-defined]
    except AttributeError:
        return None
    return devices / address
