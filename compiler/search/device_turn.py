"""Turns on a device: of all processes of a machine, one at a time measures kernels there or verifies a graph.

A turn is a lock of a folder that the processes only read (flock), so it ends with its holder, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Self

import torch

DEVICES = Path("/sys/bus/pci/devices")
WAIT_SECONDS = {"cpu": 30.0, "cuda": 300.0}
"""A turn begins after so long even if another process has the device, because that one may hang."""
_POLL_SECONDS = 0.02
_NEXT = "uevent"
"""A file of each device in sysfs. Who waits for a turn locks it first, so that a process whose turn has ended cannot
begin another one before the process that waits."""


class DeviceTurn:
    """This process's turns on a device: `with turn:` waits for one; a turn inside a turn is the same one.

    folder: what is locked for a CPU; None: nothing, and no turn waits. A GPU has a folder of its own. waiting: entered
    while another process has the device. waited: seconds, of all turns so far.
    """

    def __init__(
        self,
        device: Literal["cpu", "cuda"],
        folder: Path | None = None,
        *,
        waiting: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        seconds: float | None = None,
    ) -> None:
        self.waited = 0.0
        self._device = device
        self._folder = folder
        self._waiting = waiting
        self._seconds = WAIT_SECONDS[device] if seconds is None else seconds
        self._depth = 0
        self._lock: int | None = None

    def __enter__(self) -> Self:
        if self._depth == 0:
            folder = self._folder if self._device == "cpu" else gpu_folder()
            self._lock = None if folder is None else self._taken(folder)
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._device == "cuda":
            with contextlib.suppress(Exception):  # a broken GPU is its user's to report
                torch.cuda.empty_cache()  # the next one needs memory
        _unlock(self._lock)
        self._lock = None

    def _taken(self, folder: Path) -> int | None:
        turn, following = _opened(folder), _opened(folder / _NEXT)
        wanted = [each for each in (following, turn) if each is not None]
        try:
            if not all(map(_locked, wanted)):
                began = time.monotonic()
                with self._waiting():
                    while not all(map(_locked, wanted)) and time.monotonic() < began + self._seconds:
                        time.sleep(_POLL_SECONDS)
                self.waited += time.monotonic() - began
        finally:
            _unlock(following)
        return turn


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has it; or this file system has no locks
        return False
    return True


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # forks hold the file open too
        os.close(descriptor)


def gpu_folder(devices: Path = DEVICES) -> Path | None:
    """The current GPU's folder in sysfs, the same for all processes of the machine; None if it is unknown."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"  # type: ignore[attr-defined]
    except AttributeError:
        return None
    return devices / address
