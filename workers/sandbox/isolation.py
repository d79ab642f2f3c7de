"""The forms of isolation for a compile's process, strongest first, and how a process enters each.

namespaces  no network, no other process, of the files only the view; a filter on system calls
landlock    of the files only the view, no sockets; a filter on system calls
seccomp     no sockets; the filter alone, all files that the worker's user may read
none        limits on memory, processes, files and time, as all forms have

Which of them a machine has is found out by trying (sandbox_probe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from ..process import linux
from ..settings import Form, IsolationSetting, SlotSettings
from . import landlock, namespaces, seccomp
from .visible_paths import VisiblePaths

_LAYERS: dict[Form, list[str]] = {
    "namespaces": ["namespaces", "seccomp"],
    "landlock": ["landlock", "seccomp"],
    "seccomp": ["seccomp"],
    "none": ["none"],
}

_LEAVES_OPEN = {
    "namespaces": "",
    "landlock": "they see the names of other files and processes",
    "seccomp": "they reach the files and processes of the worker's user; no other form works here",
    "none": "they reach the files, processes and network of the worker's user; no form works here",
    "off": "they reach the files, processes and network of the worker's user",
}
"""By the strongest layer."""


class Sandbox(Struct, frozen=True):
    """The form of isolation for one process, and the paths that it sees."""

    form: Form
    view: VisiblePaths
    own: Path
    """The only folder that it may write to; it has a folder `tmp`, and no `root` or `shm`."""
    shown: list[Path]
    """Folders that it may read besides the view."""

    def run(self, body: Callable[[], None], *, inherited: Sequence[int], pid_pipe: int) -> None:
        """Run `body` isolated; returns when it has ended. See namespaces.run for `inherited` and `pid_pipe`.

        Raises OSError where this machine does not offer the form.
        """
        match self.form:
            case "namespaces":
                namespaces.run(
                    lambda: self._filtered(body),
                    view=self.view,
                    own=self.own,
                    shown=self.shown,
                    inherited=inherited,
                    pid_pipe=pid_pipe,
                )
            case "landlock":
                linux.drop_capabilities()
                self._give_up_files()
                self._filtered(body)
            case "seccomp":
                linux.drop_capabilities()
                self._filtered(body)
            case "none":
                body()

    def _filtered(self, body: Callable[[], None]) -> None:
        apart = self.form == "namespaces"  # there a Unix socket reaches no process outside
        sockets: seccomp.Sockets = "unix" if apart else "unconnected" if self.view.gpu else "pairs"
        seccomp.install(sockets=sockets, shared_memory=apart)
        body()

    def _give_up_files(self) -> None:
        # POSIX semaphores of Triton's compile pool are in /dev/shm; without namespaces there is only one
        shared = ["/dev/shm"] if self.view.gpu else []
        landlock.restrict(
            readable=[*self.view.readable, "/proc", *self.shown],
            devices=self.view.devices,
            writable=[self.own, *shared],
        )


def forms(settings: SlotSettings) -> list[Form]:
    """The forms that may be tried for jobs, strongest first."""
    allowed: dict[IsolationSetting, list[Form]] = {
        "auto": ["namespaces", "landlock", "seccomp", "none"],
        "required": ["namespaces", "landlock"],
        "off": ["none"],
    }
    return [form for form in allowed[settings.isolation] if form in settings.forms]


def describe(layers: Sequence[str]) -> str:
    """The layers, and what they do not keep away, in words."""
    leaves_open = _LEAVES_OPEN.get(next(iter(layers), ""), "")
    return ", ".join(layers) + (f" ({leaves_open}: docs/isolation.md)" if leaves_open else "")


def layers(form: Form, setting: IsolationSetting) -> list[str]:
    """The layers of `form`, as /v1/workers names them."""
    return ["off"] if setting == "off" else _LAYERS[form]
