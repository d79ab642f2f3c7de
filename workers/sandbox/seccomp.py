"""A filter on system calls, in force for a process and all that it starts: what is not listed is refused.

Written as classic BPF by hand: pyseccomp and the like need libseccomp on the machine, for sixty lines. What is
refused fails with EPERM, as if not permitted. A call that is newer than the list fails with ENOSYS, as on an older
kernel, so that libraries use what came before it. A program of another architecture than x86-64 is killed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Iterator, Set
from typing import Literal

from ..process import linux
from .system_calls import ALLOWED, NEWEST, SHARED_MEMORY

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_ABOVE = 0x25  # BPF_JMP | BPF_JGT | BPF_K
_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL_PROCESS = 0x80000000

_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
"""Offsets in struct seccomp_data; the arguments' low halves, on little-endian machines."""
_SOCKET_TYPE = 0xF
"""The bits of a socket's type; the others are its flags."""
_X32 = 0x40000000

_X86_64 = 0xC000003E

_CONNECT, _SOCKET, _SOCKETPAIR, _CLONE, _CLONE3, _PRLIMIT = 42, 41, 53, 56, 435, 302
"""Calls that depend on their arguments."""
Sockets = Literal["pairs", "unconnected", "unix"]
"""What may be made: pairs of streams; also Unix sockets of streams, which connect to nothing (CUDA makes one as it
starts); or all Unix sockets."""


def install(*, sockets: Sockets, shared_memory: bool) -> None:
    """Filter this process from now on.

    shared_memory: System V's and POSIX message queues, where they are the process' own. Raises OSError where the
    kernel or the architecture has no such filter.
    """
    program = _program(sockets=sockets, shared_memory=shared_memory)
    count = len(program) // 8
    held = ctypes.create_string_buffer(program, len(program))
    described = ctypes.create_string_buffer(struct.pack("@HP", count, ctypes.addressof(held)))
    linux.never_gain_privileges()
    linux.prctl(_PR_SET_SECCOMP, _MODE_FILTER, described)


def _program(*, sockets: Sockets, shared_memory: bool) -> bytes:
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, f"no filter for {platform.machine()}: {os.strerror(errno.ENOSYS)}")
    refused = _ERRNO | errno.EPERM
    code = [
        *(_one(_LOAD, _ARCHITECTURE), _one(_EQUAL, _X86_64, 1, 0), _one(_RETURN, _KILL_PROCESS)),
        *(_one(_LOAD, _NUMBER), _one(_AT_LEAST, _X32, 0, 1), _one(_RETURN, refused)),
        # a filter cannot read its flags, which are behind a pointer; glibc then uses clone
        *(_one(_EQUAL, _CLONE3, 0, 1), _one(_RETURN, _ERRNO | errno.ENOSYS)),
        *(_one(_EQUAL, _CLONE, 0, 4), _one(_LOAD, _FIRST_ARGUMENT), _one(_ANY_BIT, linux.CLONE_NEW, 0, 1)),
        *(_one(_RETURN, refused), _one(_RETURN, _ALLOW)),
        # of others it asks for the same user only
        *(_one(_EQUAL, _PRLIMIT, 0, 4), _one(_LOAD, _FIRST_ARGUMENT)),
        *(_one(_EQUAL, 0, 1, 0), _one(_RETURN, refused), _one(_RETURN, _ALLOW)),
    ]
    numbers = ALLOWED | SHARED_MEMORY if shared_memory else ALLOWED
    if sockets == "unix":
        numbers |= {_CONNECT, _SOCKETPAIR}
        code += [
            *(_one(_EQUAL, _SOCKET, 0, 4), _one(_LOAD, _FIRST_ARGUMENT)),
            *(_one(_EQUAL, socket.AF_UNIX, 1, 0), _one(_RETURN, refused), _one(_RETURN, _ALLOW)),
        ]
    else:
        # a datagram needs no connection to reach another process
        for call in [_SOCKETPAIR] if sockets == "pairs" else [_SOCKETPAIR, _SOCKET]:
            code += [
                *(_one(_EQUAL, call, 0, 8), _one(_LOAD, _FIRST_ARGUMENT)),
                *(
                    _one(_EQUAL, socket.AF_UNIX, 0, 5),
                    _one(_LOAD, _SECOND_ARGUMENT),
                    _one(_AND, _SOCKET_TYPE),
                ),
                *(_one(_EQUAL, socket.SOCK_STREAM, 1, 0), _one(_EQUAL, socket.SOCK_SEQPACKET, 0, 1)),
                *(_one(_RETURN, _ALLOW), _one(_RETURN, refused)),
            ]
    for first, last in _runs(numbers):
        code += [_one(_AT_LEAST, first, 0, 2), _one(_ABOVE, last, 1, 0), _one(_RETURN, _ALLOW)]
    code += [_one(_ABOVE, NEWEST, 0, 1), _one(_RETURN, _ERRNO | errno.ENOSYS), _one(_RETURN, refused)]
    return b"".join(code)


def _runs(numbers: Set[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of numbers that follow each other."""
    for first in sorted(number for number in numbers if number - 1 not in numbers):
        last = first
        while last + 1 in numbers:
            last += 1
        yield first, last


def _one(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
