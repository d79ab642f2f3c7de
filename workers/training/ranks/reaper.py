"""The process between a Ray worker and its rank: it starts the rank, and kills all that the rank started at its end.

The rank's processes are descendants of the reaper, which adopts orphans. They end with the rank, and also when the
worker ends, because its end of the socket closes then. The reaper sends "ready" when it can take a launch, "pid N" when
the rank runs, and "end CODE" when no process is left; the worker sends one byte for each request.
"""

from __future__ import annotations

import array
import contextlib
import functools
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from ....compiler import decoding
from ...process.process_tree import UnkillableProcesses, become_subreaper, die_with_parent, kill_below

STOP, KILL = b"t", b"k"
"""The worker's requests: SIGTERM, or SIGKILL, for the rank."""
_LENGTH = struct.Struct("<I")
_DESCRIPTORS = 3
"""Standard output, standard error and, if it has one, the rank's channel."""


class RankLaunch(Struct, frozen=True):
    """A command, its folder and its environment. channel: the variable that names its descriptor for messages."""

    command: list[str]
    folder: str
    environment: dict[str, str]
    channel: str = ""


StartRank = Callable[[RankLaunch], int]
"""Starts the rank, whose standard streams are this process's own; its process id, or 0 in the rank itself."""


def encode(launch: RankLaunch) -> bytes:
    """`launch` as bytes for `receive`; the descriptors are sent with them."""
    body = msgspec.json.encode(launch)
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> tuple[RankLaunch, list[int]]:
    """Send "ready" and receive a RankLaunch and its descriptors. Raises EOFError, OSError if the worker ends before."""
    connection.sendall(b"ready\n")
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(_DESCRIPTORS * descriptors.itemsize)
    head, ancillary, _, _ = connection.recvmsg(_LENGTH.size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    head += _exactly(connection, _LENGTH.size - len(head))
    body = _exactly(connection, *_LENGTH.unpack(head))
    return decoding.from_json(body, type=RankLaunch), list(descriptors)


def supervise(
    connection: socket.socket, launch: RankLaunch, descriptors: Sequence[int], begin: StartRank
) -> RankLaunch:
    """Start the rank, wait for its end, and end this process. Returns only in the rank, if `begin` forked: its launch,
    with the channel in its environment."""
    for number, descriptor in enumerate(descriptors[:2], start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    channel = list(descriptors[2:])
    if channel:
        named = {**launch.environment, launch.channel: str(channel[0])}
        launch = msgspec.structs.replace(launch, environment=named)
        os.set_inheritable(channel[0], True)
    try:
        rank = begin(launch)
    except OSError as error:
        print(f"the rank cannot be started: {error}", file=sys.stderr, flush=True)
        _report(connection, "end", 127)
        os._exit(0)
    if rank == 0:
        return launch
    for descriptor in channel:
        os.close(descriptor)
    _report(connection, "pid", rank)
    code = _watch(connection, rank)
    with contextlib.suppress(UnkillableProcesses):
        kill_below(os.getpid())
    if code is not None:
        _report(connection, "end", code)
    os._exit(0)


def _watch(connection: socket.socket, rank: int) -> int | None:
    """The rank's exit code, below 0 the signal; None once the worker is gone."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        if (code := _reaped(rank)) is not None:
            return code
        for descriptor in select.select([connection.fileno(), wake], [], [])[0]:
            if descriptor == wake:
                os.read(wake, 1 << 10)
            elif not (requests := _requests(connection)):
                return None
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL if KILL in requests else signal.SIGTERM)


def _reaped(rank: int) -> int | None:
    """Collect ended children, adopted orphans too; the exit code of `rank` if it has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # cannot be while the rank is there
            return -signal.SIGKILL
        if pid == rank:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            return None


def _requests(connection: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionError):
        return connection.recv(1 << 10)
    return b""


def _report(connection: socket.socket, what: str, number: int) -> None:
    with contextlib.suppress(ConnectionError):
        connection.sendall(f"{what} {number}\n".encode())


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = connection.recv(min(length - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return data


def become_rank(reaper: int) -> None:
    """Set up a rank's process, just forked: it ends with its reaper, and signals are as a shell's foreground has them.
    Ray blocks SIGINT in all that it starts, and a service in the background ignores some."""
    die_with_parent(reaper)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _start(launch: RankLaunch) -> int:
    named = launch.environment.get(launch.channel)
    return subprocess.Popen(
        launch.command,
        cwd=launch.folder,
        env=launch.environment,
        stdin=subprocess.DEVNULL,
        pass_fds=[int(named)] if named else [],
        process_group=0,
        preexec_fn=functools.partial(become_rank, os.getpid()),
    ).pid


def main() -> None:
    """`sys.argv`: the descriptor of this end of the socket."""
    become_subreaper()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    try:
        launch, descriptors = receive(connection)
    except (EOFError, OSError):
        return
    supervise(connection, launch, descriptors, _start)


if __name__ == "__main__":
    main()
