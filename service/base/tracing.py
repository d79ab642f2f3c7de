"""Traces: for which one a task works, and its spans, which go to an OpenTelemetry collector if there is one.

A trace has an id either way, and log lines name it. Without a collector no span is recorded.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from ...compiler.api.trace_context import TRACE_HEADER, TraceContext, new_trace, parse_traceparent

_HEADER = TRACE_HEADER.encode()
_current: ContextVar[TraceContext | None] = ContextVar("trace", default=None)


def current_trace() -> TraceContext | None:
    """The span in which this task works."""
    return _current.get()


def trace_header() -> str:
    """The traceparent of the span in which this task works; '' if there is none."""
    trace = _current.get()
    return "" if trace is None else trace.header


def trace_of(scope: Scope) -> TraceContext | None:
    """The span of an HTTP request's sender. Two such headers are none."""
    found = [value for name, value in scope["headers"] if name == _HEADER]
    return parse_traceparent(found[0].decode("latin-1")) if len(found) == 1 else None


@contextmanager
def in_trace(trace: TraceContext | None) -> Iterator[None]:
    """The block works for this span."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


class TracedLogs:
    """ASGI: the log lines of a request have the trace id of its sender. It records no spans."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with in_trace(trace_of(scope) if scope["type"] == "http" else None):
            await self._app(scope, receive, send)


class TraceSpan:
    """A part of what is done in a trace. This one is not recorded."""

    def describe(self, **attributes: str | int | float) -> None:
        """More attributes, named `torchrelay.<name>`."""

    def rename(self, name: str) -> None:
        """Its name is known by now."""

    def link(self, trace: TraceContext | None) -> None:
        """It waits for what another trace has caused."""

    def fail(self, reason: str) -> None:
        """What it stands for has failed."""

    def drop(self) -> None:
        """It is not exported."""


_NOTHING = nullcontext(TraceSpan())


class RecordedSpan(TraceSpan, ABC):
    @property
    @abstractmethod
    def context(self) -> TraceContext:
        """How spans below it, and other processes, know it."""

    @abstractmethod
    def end(self, ended: float | None = None) -> None:
        """ended: seconds since the epoch; default now."""


class SpanExporter(Protocol):
    """base/span_exporter.py has the one."""

    def start(
        self, name: str, parent: TraceContext | None, began: float | None, server: bool
    ) -> RecordedSpan: ...

    def close(self) -> None: ...


class Tracer:
    """Makes spans of this process; without an exporter none is recorded."""

    def __init__(self, exporter: SpanExporter | None) -> None:
        self._exporter = exporter

    @property
    def exports(self) -> bool:
        return self._exporter is not None

    @contextmanager
    def begin(
        self, name: str, parent: TraceContext | None, *, began: float | None = None, server: bool = False
    ) -> Iterator[TraceSpan]:
        """The block is a span below one of another process, or the first of a new trace. began: seconds since the
        epoch; server: it answers a request."""
        trace = parent if parent is not None or self.exports else new_trace()
        with in_trace(trace), self.span(name, began=began, server=server) as span:
            yield span

    def span(
        self, name: str, *, began: float | None = None, server: bool = False
    ) -> AbstractContextManager[TraceSpan]:
        """The block is a span below that in which this task works. An error that leaves it makes it a failed one."""
        if self._exporter is None:
            return _NOTHING
        return _recorded(self._exporter.start(name, _current.get(), began, server))

    def record(self, name: str, parent: TraceContext | None, began: float, ended: float) -> None:
        """A span that is over; in seconds since the epoch."""
        if self._exporter is not None:
            self._exporter.start(name, parent, began, False).end(ended)

    def close(self) -> None:
        """Sends what is left; waits for a collector for some seconds."""
        if self._exporter is not None:
            self._exporter.close()


@contextmanager
def _recorded(span: RecordedSpan) -> Iterator[TraceSpan]:
    with in_trace(span.context):
        try:
            yield span
        except BaseException as error:
            span.fail(type(error).__name__)
            raise
        finally:
            span.end()


class Stages:
    """Spans that follow each other below the one in which this task works: each ends where the next begins."""

    def __init__(self, tracer: Tracer, first: str, *, began: float) -> None:
        """began: of the first stage, in seconds since the epoch."""
        self._tracer = tracer
        self._parent = current_trace()
        self._name = first
        self._began = began

    def enter(self, name: str) -> None:
        if name != self._name:
            self.end()
            self._name = name

    def end(self) -> None:
        now = time.time()
        self._tracer.record(self._name, self._parent, self._began, now)
        self._began = now
