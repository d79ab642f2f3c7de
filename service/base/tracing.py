"""Traces: for which one a task works, and its spans, by OpenTelemetry's API. base/span_exporter.py sends them to a
collector, if there is one.

A trace has an id either way, and log lines name it. Without a collector no span is recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace import Tracer as OpenTelemetryTracer
from starlette.types import ASGIApp, Receive, Scope, Send

from ...compiler.api.trace_context import TRACE_HEADER, TraceContext, new_trace, parse_traceparent

_HEADER = TRACE_HEADER.encode()
_CLOSE_SECONDS = 3.0
_NOT_RECORDED = nullcontext(INVALID_SPAN)
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
    values = [value for name, value in scope["headers"] if name == _HEADER]
    return parse_traceparent(values[0].decode("latin-1")) if len(values) == 1 else None


def span_context(trace: TraceContext) -> SpanContext:
    """The same for OpenTelemetry."""
    flags = TraceFlags(TraceFlags.SAMPLED if trace.sampled else TraceFlags.DEFAULT)
    return SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), is_remote=True, trace_flags=flags)


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


class Tracer:
    """Makes spans of this process; without an exporter's tracer none is recorded."""

    def __init__(
        self, exporting: OpenTelemetryTracer | None = None, shut_down: Callable[[], None] = lambda: None
    ) -> None:
        """shut_down: sends what is left."""
        self._tracer = exporting
        self._shut_down = shut_down

    @property
    def exports(self) -> bool:
        return self._tracer is not None

    @contextmanager
    def begin(
        self, name: str, parent: TraceContext | None, *, began: float | None = None, server: bool = False
    ) -> Iterator[Span]:
        """The block is a span below one of another process, or the first of a new trace. began: seconds since the
        epoch; server: it answers a request, and its caller ends it, or does not and it is not exported."""
        trace = parent if parent is not None or self.exports else new_trace()
        with in_trace(trace), self.span(name, began=began, server=server) as span:
            yield span

    def span(
        self, name: str, *, began: float | None = None, server: bool = False
    ) -> AbstractContextManager[Span]:
        """The block is a span below that in which this task works. An error that leaves it makes it a failed one."""
        if self._tracer is None:
            return _NOT_RECORDED
        return _recorded(_start(self._tracer, name, _current.get(), began, server=server), server)

    def record(self, name: str, parent: TraceContext | None, began: float, ended: float) -> None:
        """A span that is over; in seconds since the epoch."""
        if self._tracer is not None:
            _start(self._tracer, name, parent, began).end(_nanoseconds(ended))

    def close(self) -> None:
        """Sends what is left; waits for a collector for some seconds, where the exporter would wait for 30."""
        ending = threading.Thread(target=self._shut_down, name="send spans", daemon=True)
        ending.start()
        ending.join(_CLOSE_SECONDS)


def _start(
    tracer: OpenTelemetryTracer,
    name: str,
    parent: TraceContext | None,
    began: float | None,
    *,
    server: bool = False,
) -> Span:
    context = Context()
    if parent is not None:
        context = set_span_in_context(NonRecordingSpan(span_context(parent)), context)
    kind = SpanKind.SERVER if server else SpanKind.INTERNAL
    return tracer.start_span(name, context, kind, start_time=None if began is None else _nanoseconds(began))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


@contextmanager
def _recorded(span: Span, server: bool) -> Iterator[Span]:
    own = span.get_span_context()
    trace = TraceContext(format_trace_id(own.trace_id), format_span_id(own.span_id), own.trace_flags.sampled)
    with in_trace(trace):
        try:
            yield span
        except BaseException as error:
            if not server:
                span.set_status(StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            if not server:
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
