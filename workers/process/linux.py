"""System calls that Python does not offer, through libc: namespaces, mounts, capabilities. Linux only.

Every function raises OSError as its system call fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_NEW = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)

MS_NOSUID = 2
MS_NODEV = 4
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

_MOUNT_ATTR_RDONLY = 0x1
_MOUNT_ATTR_NOSUID = 0x2
_MNT_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION_3 = 0x20080522

_PIVOT_ROOT, _MOUNT_SETATTR = 155, 442
"""Numbers of x86-64."""


def unshare(flags: int) -> None:
    _checked("unshare", flags)


def mount(source: str, target: str | Path, kind: str, flags: int, data: str = "") -> None:
    _checked("mount", source.encode(), os.fsencode(target), kind.encode(), flags, data.encode())


def make_read_only(target: str | Path, *, recursive: bool) -> None:
    """Linux 5.12."""
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    system_call(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), flags, attributes, len(attributes))


def become_root_of(folder: str | Path) -> None:
    """Make `folder`, a mount point, this mount namespace's root, and let go of the old one."""
    os.chdir(folder)
    system_call(_PIVOT_ROOT, b".", b".")
    _checked("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def drop_capabilities() -> None:
    """All of them, for this process and whatever it executes."""
    never_gain_privileges()
    with contextlib.suppress(PermissionError):  # who may not lower the bound has nothing to lose
        for capability in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
            prctl(_PR_CAPBSET_DROP, capability)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _checked("capset", header, bytes(24))


def never_gain_privileges() -> None:
    """No set-user-ID program will have any effect; what Landlock and seccomp ask for."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def prctl(option: int, value: int, pointer: object = 0) -> None:
    _checked("prctl", option, value, pointer, 0, 0)


def system_call(number: int, *arguments: object) -> int:
    return _checked("syscall", number, *arguments)


def _checked(name: str, *arguments: object) -> int:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_long if name == "syscall" else ctypes.c_int
    # an argument of a variadic function fills its register only if it is as wide
    result: int = function(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
