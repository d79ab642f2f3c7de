"""A process with PyTorch imported, from which a job's ranks on one node are forked.

It starts before the ranks have their devices, with the environment that all of them share, so that PyTorch reads at
import what it would read in a rank. Only the variables that differ between ranks (PLACE_NAMES) are set later. A
launch that differs otherwise is refused, and its worker starts a new interpreter. Each fork becomes a reaper, which
forks the rank.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import multiprocessing.process
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ....compiler import decoding
from ...process import private_folders
from ...process.process_tree import become_subreaper, reap
from ..ranks.environment import PLACE_NAMES, RANK_PROGRAM
from ..ranks.reaper import RankLaunch, become_rank, receive, supervise

_PREFIX = "torchrelay-warm-"
_SOCKET = "socket"
_BACKLOG = 64
_LAUNCH_SECONDS = 10.0
_REAP_SECONDS = 1.0
_COMMAND = [sys.executable, "-m", RANK_PROGRAM]
_REAPER = [sys.executable, "-m", "torchrelay.workers.training.ranks.reaper"]


class PreforkProcess(NamedTuple):
    """The owner's view of a warm process; it ends when `alive` is closed. path: of its socket."""

    process: subprocess.Popen[bytes]
    alive: socket.socket
    path: str


def start(environment: Mapping[str, str]) -> PreforkProcess:
    """Start a warm process; it takes launches at once. environment: of all its ranks. Raises OSError, Unavailable."""
    folder, lock = private_folders.make(str(private_folders.short_root(_PREFIX)), _PREFIX)
    path = folder / _SOCKET
    ours, theirs = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as listener, theirs:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        order = [
            *(sys.executable, "-m", "torchrelay.workers.training.prefork.server"),
            *("--listen", str(listener.fileno()), "--owner", str(theirs.fileno()), "--lock", str(lock)),
        ]
        process = subprocess.Popen(
            order,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno(), theirs.fileno(), lock],
            start_new_session=True,
        )
    os.close(lock)
    with contextlib.suppress(ConnectionError):
        ours.sendall(msgspec.json.encode(dict(environment)) + b"\n")
    return PreforkProcess(process, ours, str(path))


class _PreforkServer:
    """Runs in the warm process."""

    def __init__(self, listener: socket.socket, owner: socket.socket, lock: int) -> None:
        self._listener = listener
        self._owner = owner
        self._lock = lock
        self._shared = _shared(_line(owner))

    def serve(self) -> RankLaunch | None:
        """Fork ranks. Returns None once the owner is gone, and in each rank its launch."""
        while True:
            ready = select.select([self._listener, self._owner], [], [], _REAP_SECONDS)[0]
            reap()
            if self._owner in ready:
                return None
            if not ready:
                continue
            connection, _ = self._listener.accept()
            if os.fork() == 0:
                return self._reap_rank(connection)
            connection.close()

    def _reap_rank(self, connection: socket.socket) -> RankLaunch:
        """Become the reaper of a rank, in a fork; returns in the rank."""
        self._listener.close()
        self._owner.close()
        os.close(self._lock)
        os.setsid()
        become_subreaper()
        connection.settimeout(_LAUNCH_SECONDS)
        try:
            launch, descriptors = receive(connection)
        except (EOFError, OSError, msgspec.MsgspecError):
            os._exit(1)
        connection.settimeout(None)
        if launch.command[:3] != _COMMAND or _shared(launch.environment) != self._shared:
            os._exit(1)  # its worker starts a new interpreter
        _title(_REAPER)
        launch = supervise(connection, launch, descriptors, _fork)
        connection.close()
        return launch


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in PLACE_NAMES}


def _line(owner: socket.socket) -> dict[str, str]:
    """The environment as the owner gave it: Python adds a variable to its own if the locale is C."""
    data = b""
    while not data.endswith(b"\n"):
        if not (piece := owner.recv(1 << 20)):
            raise EOFError
        data += piece
    return decoding.from_json(data, type=dict[str, str])


def _fork(launch: RankLaunch) -> int:
    reaper = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        become_rank(reaper)
    return pid


def _become(launch: RankLaunch) -> None:
    """Set in the rank what a new interpreter would have set."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in PLACE_NAMES:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in launch.environment.items() if name in PLACE_NAMES})
    os.chdir(launch.folder)
    sys.path[0] = multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
    sys.orig_argv[:] = launch.command
    _title(launch.command)
    # Python itself reseeds `random` after each fork
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _title(command: Sequence[str]) -> None:
    """Set the command line that `ps` shows."""
    with contextlib.suppress(ImportError):  # it is for people alone
        from setproctitle import setproctitle

        setproctitle(" ".join(command))


def _unfit(fit: Callable[[], bool]) -> str:
    """Why this process must not be forked; '' if it may. fit: asked in a fork."""
    if (probe := os.fork()) == 0:
        well = False
        try:
            well = fit()
        finally:
            os._exit(0 if well else 1)
    if os.waitpid(probe, 0)[1] != 0:
        return "importing PyTorch initialised CUDA"
    # OpenBLAS ended its threads before the fork above, and starts them again when needed
    tasks = list(Path("/proc/self/task").iterdir())
    if len(tasks) > 1:
        names = []
        for task in tasks:
            with contextlib.suppress(OSError):  # it has ended
                names.append((task / "comm").read_text().strip())
        return f"importing PyTorch started threads: {', '.join(sorted(names))}"
    return ""


def main(arguments: Sequence[str]) -> int:
    """The exit code: of the server, or of a rank."""
    parser = argparse.ArgumentParser(prog="torchrelay.workers.training.prefork.server")
    for name in ("--listen", "--owner", "--lock"):
        parser.add_argument(name, type=int, required=True, help="a descriptor")
    given = parser.parse_args(arguments)
    folder, server_pid = Path.cwd(), os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener, owner = socket.socket(fileno=given.listen), socket.socket(fileno=given.owner)
    for descriptor in (given.listen, given.owner, given.lock):
        os.set_inheritable(descriptor, False)
    launch = None
    try:
        server = _PreforkServer(listener, owner, given.lock)
        gc.disable()  # almost nothing that is imported is garbage
        program = importlib.import_module(RANK_PROGRAM)
        program.preload()
        gc.collect()
        gc.freeze()  # ranks that collect do not touch, and so copy, these pages
        gc.enable()
        if why := _unfit(program.fit):
            print(f"ranks start cold: {why}", file=sys.stderr, flush=True)
            return 1
        launch = server.serve()
    except EOFError:
        return 0
    finally:
        if os.getpid() == server_pid:
            shutil.rmtree(folder, ignore_errors=True)
    if launch is None:
        return 0
    _become(launch)
    code: int = program.main(launch.command[3:])
    return code


if __name__ == "__main__":
    # Not this module, which is __main__ until a rank's script is.
    from torchrelay.workers.training.prefork import server as _server

    sys.exit(_server.main(sys.argv[1:]))
