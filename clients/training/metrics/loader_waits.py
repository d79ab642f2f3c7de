"""Measures how long a process waits for data, in the iterators of all its DataLoaders."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader


class LoaderWaits:
    """Sums since they were last taken. samples: of this rank, as far as a loader of ours says."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._samples = 0
        self.watching = False
        """Whether every DataLoader of this process is timed."""
        self._seen = False

    def add(self, seconds: float, samples: int = 0) -> None:
        self._seen = True
        self._seconds += seconds
        self._samples += samples

    def taken(self) -> tuple[float, int] | None:
        """(seconds, samples), and start again from 0; None if no loader was ever used."""
        if not self._seen:
            return None
        taken = self._seconds, self._samples
        self._seconds, self._samples = 0.0, 0
        return taken

    def watch_loaders(self) -> None:
        """Time every DataLoader of this process from now on. A second call has no effect."""
        if self.watching:
            return
        self.watching = True
        DataLoader.__iter__ = _timed(DataLoader.__iter__, self)  # type: ignore[method-assign]


class _TimedIterator:
    """A loader's iterator; in all but its `next` it is that iterator."""

    def __init__(self, inner: Iterator[Any], waits: LoaderWaits) -> None:
        self._inner = inner
        self._waits = waits

    def __iter__(self) -> _TimedIterator:
        return self

    def __next__(self) -> Any:
        begun = time.perf_counter()
        try:
            return next(self._inner)
        finally:
            self._waits.add(time.perf_counter() - begun)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _timed(original: Callable[..., Any], waits: LoaderWaits) -> Callable[..., Any]:
    @functools.wraps(original)
    def made(loader: DataLoader[Any]) -> Any:
        return _TimedIterator(original(loader), waits)

    return made


@functools.cache
def process_loader_waits() -> LoaderWaits:
    return LoaderWaits()
