"""How a fork server starts, and gets its order from its slot's actor over a socket, the places of its output included.
From then on the socket is the server's connection to its actor.

The actor starts it with that socket. Or it starts before its actor, while Ray starts, and is adopted: torch takes
longer to import than Ray to start. `PrestartedServer` is in the process that starts both, `adopt` in the actor,
`await_adoption` in the server. They meet at a Unix socket in a private folder. A server that nobody has adopted ends
with the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from ...compiler import decoding
from ..process import private_folders
from ..process.process_tree import ForeignProcess
from ..settings import ENGINE, EarlyServer, SlotOrder
from .environment import server_environment

_PREFIX = "torchrelay-early-"
_SOCKET = "s"
_ORDER_BYTES = 1 << 20
_OUTPUTS = (1, 2)
"""The file descriptors of standard output and standard error."""
_SECONDS_TO_END = 3.0
"""How long a server may take that its actor has left. As long as what the supervisor gives to all processes."""


class PrestartedServer:
    """A fork server that imports its engine while its slot does not exist yet; ends in `close` if nobody has adopted
    it. Raises OSError, Unavailable."""

    def __init__(self, engine: str = ENGINE) -> None:
        root = str(private_folders.short_root(_PREFIX))
        self._folder, self._lock = private_folders.make(root, _PREFIX)
        path = str(self._folder / _SOCKET)
        owner, self._owner = os.pipe()
        self._process: subprocess.Popen[bytes] | None = None
        self._open = True
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen()
                environment = server_environment(os.environ, python_path(), mark_of(path))
                self._process = start(engine, environment, listener=listener.fileno(), owner=owner)
        except BaseException:  # a signal, too
            self.close()
            raise
        finally:
            os.close(owner)
        # An adopted server that ends is nobody else's to wait for.
        threading.Thread(target=self._process.wait, name="early fork server", daemon=True).start()
        self.early_server = EarlyServer(self._process.pid, path)
        """For its actor."""

    def close(self) -> None:
        """End it, unless an actor has it."""
        if not self._open:
            return
        self._open = False
        os.close(self._owner)
        if self._process is not None:
            if self._folder.exists():  # it was not adopted
                self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_END)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> PrestartedServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


def start(
    engine: str, environment: Mapping[str, str], *, python: str = sys.executable, **descriptors: int
) -> subprocess.Popen[bytes]:
    """descriptors: `socket`, the connection to its actor; or `listener` and `owner`, see `await_adoption`. Raises
    OSError."""
    return subprocess.Popen(
        [
            *(python, "-P", "-m", "torchrelay.workers.fork_server.server", "--engine", engine),
            *(f"--{name}={descriptor}" for name, descriptor in descriptors.items()),
        ],
        pass_fds=[*descriptors.values()],
        stdin=subprocess.DEVNULL,
        env=dict(environment),
        start_new_session=True,
    )


def python_path() -> str:
    """Where a server with this process's Python finds the package."""
    return os.pathsep.join(entry for entry in sys.path if entry)


def mark_of(path: str) -> str:
    """The name of its slot in its environment: its actor's is not known yet when it starts."""
    return Path(path).parent.name


# --- in the slot's actor ----------------------------------------------------------------------------------


def adopt(server: EarlyServer) -> tuple[ForeignProcess, socket.socket]:
    """The process of `server`, and a connection to it. Raises OSError if it has ended, or has an actor."""
    # If the socket then answers, the server lives, so that no other process had its number.
    process, connection = ForeignProcess(server.pid), socket.socket(socket.AF_UNIX)
    connection.connect(server.socket)
    return process, connection


def send_order(connection: socket.socket, slot_order: SlotOrder, lock: int) -> None:
    """Raises OSError."""
    socket.send_fds(connection, [msgspec.json.encode(slot_order) + b"\n"], [lock, *_OUTPUTS])


def share_limits(pid: int) -> None:
    """Give process `pid` the limits and priorities of this one, which it would have inherited. Raises OSError."""
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            limit = getattr(resource, name)
            resource.prlimit(pid, limit, resource.getrlimit(limit))
    os.sched_setaffinity(pid, os.sched_getaffinity(0))
    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0))
    score = "oom_score_adj"
    Path(f"/proc/{pid}", score).write_text(Path("/proc/self", score).read_text())


# --- in the server ----------------------------------------------------------------------------------------


def await_adoption(
    listener: socket.socket, owner: int
) -> tuple[socket.socket, SlotOrder] | tuple[None, None]:
    """The first actor that connects and says what it wants. None once the process that started this one has ended."""
    while True:
        readable, _, _ = select.select([listener.fileno(), owner], [], [])
        if owner in readable:
            _remove_folder(listener)
            return None, None
        connection, _ = listener.accept()
        slot_order = received_order(connection)
        if slot_order is not None:
            _remove_folder(listener)
            listener.close()  # another actor starts a server of its own
            os.close(owner)
            return connection, slot_order
        connection.close()


def _remove_folder(listener: socket.socket) -> None:
    shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)


def received_order(connection: socket.socket) -> SlotOrder | None:
    """The order; this process then writes where the actor does. None if the actor has gone."""
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, _ORDER_BYTES, 3)
        while not data.endswith(b"\n"):
            piece = connection.recv(_ORDER_BYTES)
            if not piece:
                return None
            data += piece
        _, *outputs = descriptors  # the first is the lock of the jobs' folder, which stays open
    except OSError:
        return None
    for standard, output in zip(_OUTPUTS, outputs, strict=True):
        os.dup2(output, standard)
        os.close(output)
    return decoding.from_json(data, type=SlotOrder)
