"""A filter on system calls, in force for a process and all that it starts: sockets and the ways around a sandbox.

Written as classic BPF by hand: pyseccomp and the like need libseccomp on the machine, for sixty lines. What is
refused fails with EPERM, as if not permitted; a program of another architecture is killed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from typing import Literal

from ..process import linux

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
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

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_CALLS = {
    # name: (x86-64, aarch64)
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),  # opens sockets past this filter
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
}
_SHARED_MEMORY = {
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
_CONNECT = (42, 203)
_SOCKET, _CLONE, _CLONE3, _PRLIMIT = (41, 198), (56, 220), (435, 435), (302, 261)


Sockets = Literal["pairs", "unconnected", "unix"]
"""What may be made: pairs; also Unix sockets of streams, which connect to nothing (CUDA makes one as it starts); or all
Unix sockets."""


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
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no filter for {machine}: {os.strerror(errno.ENOSYS)}")
    column = list(_ARCHITECTURES).index(machine)
    refused = _ERRNO | errno.EPERM
    code = [
        *(
            _one(_LOAD, _ARCHITECTURE),
            _one(_EQUAL, _ARCHITECTURES[machine], 1, 0),
            _one(_RETURN, _KILL_PROCESS),
        ),
        _one(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        code += [_one(_AT_LEAST, _X32, 0, 1), _one(_RETURN, refused)]
    for numbers in (_CALLS if shared_memory else _CALLS | _SHARED_MEMORY).values():
        code += [_one(_EQUAL, numbers[column], 0, 1), _one(_RETURN, refused)]
    # a filter cannot read its flags, which are behind a pointer; glibc then uses clone
    code += [_one(_EQUAL, _CLONE3[column], 0, 1), _one(_RETURN, _ERRNO | errno.ENOSYS)]
    code += [
        *(
            _one(_EQUAL, _CLONE[column], 0, 4),
            _one(_LOAD, _FIRST_ARGUMENT),
            _one(_ANY_BIT, linux.CLONE_NEW, 0, 1),
        ),
        *(_one(_RETURN, refused), _one(_RETURN, _ALLOW)),
    ]
    # of others it asks for the same user only
    code += [
        *(_one(_EQUAL, _PRLIMIT[column], 0, 4), _one(_LOAD, _FIRST_ARGUMENT)),
        *(_one(_EQUAL, 0, 1, 0), _one(_RETURN, refused), _one(_RETURN, _ALLOW)),
    ]
    if sockets == "unix":
        code += [
            *(_one(_EQUAL, _SOCKET[column], 0, 4), _one(_LOAD, _FIRST_ARGUMENT)),
            *(_one(_EQUAL, socket.AF_UNIX, 1, 0), _one(_RETURN, refused), _one(_RETURN, _ALLOW)),
        ]
    elif sockets == "unconnected":
        # a datagram needs no connection to reach another process
        code += [
            *(_one(_EQUAL, _CONNECT[column], 0, 1), _one(_RETURN, refused)),
            *(_one(_EQUAL, _SOCKET[column], 0, 8), _one(_LOAD, _FIRST_ARGUMENT)),
            *(_one(_EQUAL, socket.AF_UNIX, 0, 5), _one(_LOAD, _SECOND_ARGUMENT), _one(_AND, _SOCKET_TYPE)),
            *(_one(_EQUAL, socket.SOCK_STREAM, 1, 0), _one(_EQUAL, socket.SOCK_SEQPACKET, 0, 1)),
            *(_one(_RETURN, _ALLOW), _one(_RETURN, refused)),
        ]
    else:
        code += [_one(_EQUAL, _SOCKET[column], 0, 1), _one(_RETURN, refused)]
    return b"".join([*code, _one(_RETURN, _ALLOW)])


def _one(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
