"""Appends to files for people, which stay open: on a network's folder, opening one takes longer than writing it."""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from pathlib import Path

_SHOWN_BYTES = 256 << 20
"""A file that grew past it replaces its predecessor `NAME.1`: the service has all of it."""
_OPEN_SHARE = 4
"""Of the files that this process may have open, one in so many."""


class AppendedFiles:
    """Not safe for threads."""

    def __init__(self) -> None:
        self._most = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _OPEN_SHARE)
        self._open: OrderedDict[Path, int] = OrderedDict()
        """The descriptor of each, that used longest ago first."""

    def append(self, path: Path, data: bytes) -> None:
        """Raises OSError."""
        file = self._descriptor(path)
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        if os.fstat(file).st_size > _SHOWN_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
            self._close(path)

    def _descriptor(self, path: Path) -> int:
        if path in self._open and not os.fstat(self._open[path]).st_nlink:  # somebody has removed it
            self._close(path)
        if path not in self._open:
            if len(self._open) >= self._most:
                self._close(next(iter(self._open)))
            self._open[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._open.move_to_end(path)
        return self._open[path]

    def _close(self, path: Path) -> None:
        os.close(self._open.pop(path))
