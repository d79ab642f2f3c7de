"""The process between a Ray worker and its rank: a Launch on standard input in; the rank's own end out.

Whatever the rank started ends with it, and all of it ends when the worker does: the rank's processes are below this
one, which adopts orphans. Tells the rank's process id. SIGTERM goes on to the rank.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import subprocess
import sys

import msgspec
from msgspec import Struct

from ..processes import Survivors, become_subreaper, die_with_parent, kill_below


class Launch(Struct, frozen=True):
    """What to start, where, with which environment; `keep`: descriptors that it gets."""

    command: list[str]
    folder: str
    environment: dict[str, str]
    keep: list[int] = []


def main() -> None:
    """Start the rank, wait for it, clear up, end as it did. `sys.argv`: the worker's process id, and the descriptor on
    which to tell the rank's."""
    become_subreaper()
    parent, says = int(sys.argv[1]), int(sys.argv[2])
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=Launch)
    rank: subprocess.Popen[bytes] | None = None

    def pass_on(*_: object) -> None:
        if os.getppid() != parent:  # the worker is gone: the kernel sent this
            _clear()
            os._exit(1)
        if rank is not None and rank.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    die_with_parent(parent, signal.SIGTERM)
    try:
        rank = subprocess.Popen(
            launch.command,
            cwd=launch.folder,
            env=launch.environment,
            stdin=subprocess.DEVNULL,
            pass_fds=launch.keep,
            process_group=0,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
    except OSError as error:
        print(f"the rank cannot be started: {error}", file=sys.stderr, flush=True)
        sys.exit(127)
    os.write(says, b"%d\n" % rank.pid)
    os.close(says)
    for descriptor in launch.keep:
        os.close(descriptor)
    code = rank.wait()
    _clear()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to be reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _clear() -> None:
    with contextlib.suppress(Survivors):
        kill_below(os.getpid())


if __name__ == "__main__":
    main()
