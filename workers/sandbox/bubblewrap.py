"""Bubblewrap around a fork server: an order to start it in; the same order in a sandbox of its own out.

The server then has no network, sees no other process and none of the machine's files but the view, its jobs' folder
and the kept kernels: no home, no state folder, no signing key, no socket of Redis or Ray.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .visible_paths import VisiblePaths

_PROBE_SECONDS = 20.0


def wrapped(
    command: Sequence[str], view: VisiblePaths, *, writable: Sequence[Path], environment: Mapping[str, str]
) -> list[str]:
    """`command` inside; it inherits file descriptors and becomes its namespace's first process.

    No --die-with-parent: the server ends by itself when its actor goes, and tidies up first.
    """
    program = shutil.which("bwrap", path=environment.get("PATH"))
    if program is None:
        raise FileNotFoundError("bubblewrap is not installed")
    order = [
        program,
        "--unshare-user-try",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
    ]
    order += ["--unshare-cgroup-try", "--as-pid-1", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]
    if os.getuid() == 0:
        order += ["--cap-add", "CAP_SETFCAP"]  # a user namespace below may then have a root of its own
    order += ["--tmpfs", "/tmp"]
    for path in view.readable:
        order += ["--ro-bind", path, path]
    for path in view.devices:
        order += ["--dev-bind", path, path]
    for folder in writable:
        order += ["--bind", str(folder), str(folder)]
    return [*order, "--", *command]


def why_not(view: VisiblePaths, environment: Mapping[str, str]) -> str:
    """'' if bubblewrap starts programs on this machine, else what it says."""
    true = shutil.which("true", path=environment.get("PATH", os.defpath))
    if true is None:
        return "there is no program to try it with"
    try:
        order = wrapped([true], view, writable=[], environment=environment)
        done = subprocess.run(order, capture_output=True, text=True, timeout=_PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"
