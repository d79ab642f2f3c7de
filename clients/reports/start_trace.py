"""The spans of a process's start: imports, the client's stages, graphs, functions and their first calls.

As a file they are complete events of the Trace Event Format, which chrome://tracing and ui.perfetto.dev show. Times are
counted from the start of the process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from ..atomic_file import write_whole

Kind = Literal["import", "stage", "graph", "function", "call"]
About = dict[str, str | int]
SPANS_KEPT = 20_000
_SHORTEST_IMPORT = 1e-3
"""Seconds; there are thousands of shorter ones."""


class Span(Struct, frozen=True):
    """began, ended: seconds of time.perf_counter. thread: its ident."""

    kind: Kind
    name: str
    began: float
    ended: float
    thread: int
    about: About


class StartTrace:
    """The spans so far, the first 20,000. Safe for threads."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._age = seconds_since_process_start() or 0.0
        self._began = time.perf_counter()

    def add(self, kind: Kind, name: str, began: float, ended: float, about: About | None = None) -> None:
        """What this thread did between two readings of time.perf_counter."""
        if len(self.spans) < SPANS_KEPT:
            self.spans.append(Span(kind, name, began, ended, threading.get_ident(), about or {}))

    @contextlib.contextmanager
    def span(self, kind: Kind, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, name, start, time.perf_counter())

    def first_call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose first call becomes a span."""
        called = False

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal called
            if called:
                return function(*args, **kwargs)
            called = True
            with self.span("call", f"first call of {name}"):
                return function(*args, **kwargs)

        return wrapper

    def time_imports(self) -> None:
        """Make spans of this process's imports from now on: of modules in Python and of shared libraries."""
        for loader, method in (
            (importlib.machinery.SourceFileLoader, "exec_module"),
            (importlib.machinery.ExtensionFileLoader, "create_module"),
        ):
            setattr(loader, method, self._timed_import(getattr(loader, method)))

    def _timed_import(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(loader: Any, module: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(loader, module)
            finally:
                if (ended := time.perf_counter()) - start >= _SHORTEST_IMPORT:
                    self.add("import", f"import {loader.name}", start, ended)

        return timed

    def write(self, path: Path) -> None:
        """Raises OSError."""
        pid, main = os.getpid(), threading.main_thread().ident
        program = Path(sys.argv[0]).name if sys.argv else "python"
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": main, "args": {"name": program}},
            _event("before torchrelay", "import", 0.0, self._age, pid, main, {}),
        ]
        for span in sorted(self.spans, key=lambda span: (span.began, -span.ended)):
            began, seconds = self._age + span.began - self._began, span.ended - span.began
            events.append(_event(span.name, span.kind, began, seconds, pid, span.thread, dict(span.about)))
        write_whole(path, msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}) + b"\n")


def _event(
    name: str, kind: str, began: float, seconds: float, pid: int, thread: int | None, about: dict[str, Any]
) -> dict[str, Any]:
    """A complete event; ts and dur are microseconds."""
    times = {"ts": began * 1e6, "dur": seconds * 1e6}
    return {"ph": "X", "name": name, "cat": kind, **times, "pid": pid, "tid": thread, "args": about}


def seconds_since_process_start() -> float | None:
    """Age of this process, from the kernel (10 ms steps); None where /proc is missing."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return None
    started = int(stat.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
