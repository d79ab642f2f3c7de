"""Runs a function in namespaces of its own: no network, no other process, and only the files that it is shown.

It takes three processes, because a pid namespace begins with a child of the process that makes it, and the first
process in it ignores signals. The outer process makes the namespaces and ends as the job ends. The first process inside
collects dead processes, and all others end with it. Its child is the job. A user namespace gives the right to make the
other namespaces; the job gives up all of its rights.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from ..process import linux
from ..process.process_tree import FAILED, die_with_parent, fork
from .visible_paths import VisiblePaths

_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}


def run(
    body: Callable[[], None],
    *,
    view: VisiblePaths,
    own: Path,
    shown: Sequence[Path],
    inherited: Sequence[int],
    pid_pipe: int,
) -> None:
    """Run `body` in a grandchild that sees `view`, `shown` and its `own` folder. Returns, or dies, as it does.

    inherited: file descriptors for the job alone. pid_pipe: takes the first process' pid and is closed then. Raises
    OSError, before `body` starts, if the kernel refuses.
    """
    outer, uid, gid = os.getpid(), os.getuid(), os.getgid()
    parent = os.getppid()
    linux.unshare(linux.CLONE_NEW)
    die_with_parent(parent)  # new credentials may have unset it
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    status, report = os.pipe()

    def in_the_job() -> None:
        die_with_parent(1)
        os.close(report)
        os.setsid()
        _show(view, own, shown)
        linux.drop_capabilities()
        body()

    def in_the_first() -> None:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # its parent has no pid in its own namespace
        for descriptor in (status, pid_pipe):
            os.close(descriptor)
        job = fork(in_the_job)
        for descriptor in inherited:
            os.close(descriptor)
        dead, how = os.wait()
        while dead != job:
            dead, how = os.wait()
        os.write(report, how.to_bytes(4, "little"))

    first = fork(in_the_first)
    os.write(pid_pipe, str(first).encode())
    for descriptor in (pid_pipe, report, *inherited):
        os.close(descriptor)
    received = os.read(status, 4)
    how = os.waitpid(first, 0)[1]
    _end_as(os.waitstatus_to_exitcode(int.from_bytes(received, "little") if received else how), outer)


def _end_as(code: int, outer: int) -> None:
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no action to set
        signal.signal(-code, signal.SIG_DFL)
    os.kill(outer, -code)
    os._exit(FAILED)


def _show(view: VisiblePaths, own: Path, shown: Sequence[Path]) -> None:
    """Make a file system of the visible paths and make it the root."""
    (root := own / "root").mkdir()
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    (own / "shm").mkdir()
    for source, target in ((own / "tmp", "tmp"), (own / "shm", "dev/shm")):
        (root / target).mkdir(parents=True)
        linux.mount(str(source), root / target, "", linux.MS_BIND)
    for path in [*view.readable, *map(str, shown)]:
        _bind(path, root)
        linux.make_read_only(_within(root, path), recursive=True)
    for path in view.devices:
        _bind(path, root)
    for name, target in _LINKS.items():
        (root / "dev" / name).symlink_to(target)
    (root / "proc").mkdir()
    try:
        linux.mount("proc", root / "proc", "proc", linux.MS_NOSUID | linux.MS_NODEV)
        fresh = True
    except PermissionError:
        fresh = False
        # In a container that hides parts of /proc no other may be mounted. The outer one shows no secret: another
        # user namespace's processes may not be read.
        linux.mount("/proc", root / "proc", "", linux.MS_BIND | linux.MS_REC)
    # the kernel's settings ask for root's number alone, which a root's job keeps without any of its rights
    if view.gpu and fresh:
        _make_all_but_processes_read_only(root / "proc")  # CUDA does not start if it cannot name its threads
    else:
        linux.make_read_only(root / "proc", recursive=True)
    _bind(str(own), root, recursive=False)  # `root` is in it
    linux.make_read_only(root, recursive=False)
    linux.become_root_of(root)


def _make_all_but_processes_read_only(proc: Path) -> None:
    """Do so in a /proc that shows the job's own processes alone."""
    for entry in proc.iterdir():
        if not entry.name.isdecimal() and not entry.is_symlink():
            linux.mount(str(entry), entry, "", linux.MS_BIND)
            linux.make_read_only(entry, recursive=True)


def _bind(path: str, root: Path, *, recursive: bool = True) -> None:
    target = _within(root, path)
    if Path(path).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    linux.mount(path, target, "", linux.MS_BIND | (linux.MS_REC if recursive else 0))


def _within(root: Path, path: str) -> Path:
    return root / path.lstrip("/")
