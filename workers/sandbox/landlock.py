"""Landlock: a process, and all that it starts, loses access to every file outside the given folders.

Needs no privilege and no namespace. Its rules do not cover Unix sockets in the file system: seccomp.py refuses
them. From its sixth version on, signals and abstract sockets stay inside as well.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from ..process import linux

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_FIRST = (1 << 13) - 1
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_IOCTL_DEVICE = 1 << 15

_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_NETWORK = 0b11
"""Binding and connecting of TCP."""
_SCOPES = 0b11
"""Abstract sockets and signals."""

OLDEST = 2
"""Before it (Linux 5.19), no file could be linked from one folder to another."""


def version() -> int:
    """The kernel's Landlock; 0 if it has none."""
    try:
        return linux.system_call(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def restrict(
    *, readable: Iterable[str | Path], devices: Iterable[str | Path], writable: Iterable[str | Path]
) -> None:
    """Lose access to all but these paths and what is below them. Raises OSError."""
    has = version()
    if has < OLDEST:
        raise OSError(errno.ENOSYS, f"Landlock {has} (of {OLDEST}): {os.strerror(errno.ENOSYS)}")
    every = _FIRST | _REFER | (_TRUNCATE if has >= 3 else 0) | (_IOCTL_DEVICE if has >= 5 else 0)
    attributes = struct.pack("=QQQ", every, _NETWORK if has >= 4 else 0, _SCOPES if has >= 6 else 0)
    size = 24 if has >= 6 else 16 if has >= 4 else 8
    ruleset = linux.system_call(_CREATE_RULESET, attributes, size, 0)
    try:
        for paths, access in (
            (readable, _READ),
            (devices, _READ_FILE | _WRITE_FILE | _READ_DIR | _IOCTL_DEVICE),
            (writable, every),
        ):
            for path in paths:
                _add(ruleset, path, access & every)
        linux.never_gain_privileges()
        linux.system_call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _add(ruleset: int, path: str | Path, access: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            access &= _ON_FILES
        linux.system_call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", access, opened), 0)
    finally:
        os.close(opened)
