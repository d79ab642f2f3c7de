"""Whether a run that verification makes on a CPU has room in the memory that a compile may hold."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path


class NoRoom(Exception):
    """A run would exceed the limit, and the compile would be killed; the text says by how much."""


class Room:
    """limit: bytes that this process may hold; 0: any number, or the runs are a GPU's."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._run = 0

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside is a run of the size that `require` counts in: inputs, activations and gradients."""
        if self._limit:
            _give_back()
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = _held("VmRSS")
        yield
        self._run = max(self._run, _held("VmHWM") - before)

    def require(self, runs: int = 1) -> None:
        """Raises NoRoom if there is none for a run, or for one in float64, which is as large as two."""
        if not self._limit or self._fits(runs):
            return
        _give_back()
        if not self._fits(runs):
            held, more = _held("RssAnon") >> 20, runs * self._run >> 20
            raise NoRoom(
                f"the worker has too little memory: a run takes {more} MiB beside {held}, limit {self._limit >> 20}"
            )

    def _fits(self, runs: int) -> bool:
        return _held("RssAnon") + runs * self._run <= self._limit


def _give_back() -> None:
    """What was freed and glibc keeps; the next run takes it again, unseen."""
    ctypes.CDLL(None).malloc_trim(0)


def _held(name: str) -> int:
    """Bytes, by the name in /proc/self/status; 0 where a sandbox's kernel does not say."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(sizes[0]) << 10 if sizes else 0
