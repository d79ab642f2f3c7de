"""Spans by OpenTelemetry's SDK, sent by OTLP over HTTP in the background.

It is imported where there is a collector only. Environment variables of OpenTelemetry's say where it is, what it is
sent with, how many traces are sampled and how this process is called.
"""

from __future__ import annotations

import logging
import threading

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from ...compiler.api.trace_context import TraceContext
from .tracing import RecordedSpan

log = structlog.get_logger(__name__)

_CLOSE_SECONDS = 3.0


class OpenTelemetrySpan(RecordedSpan):
    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._dropped = False

    @property
    def context(self) -> TraceContext:
        found = self._span.get_span_context()
        return TraceContext(
            f"{found.trace_id:032x}", f"{found.span_id:016x}", bool(found.trace_flags.sampled)
        )

    def describe(self, **attributes: str | int | float) -> None:
        for name, value in attributes.items():
            self._span.set_attribute(f"torchrelay.{name}", value)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def link(self, other: TraceContext | None) -> None:
        if other is not None:
            self._span.add_link(_span_context(other))

    def fail(self, reason: str) -> None:
        self._span.set_status(trace.StatusCode.ERROR, reason)

    def drop(self) -> None:
        self._dropped = True

    def end(self, ended: float | None = None) -> None:
        if not self._dropped:
            self._span.end(None if ended is None else int(ended * 1e9))


class OpenTelemetryExporter:
    def __init__(self, version: str) -> None:
        reports = logging.getLogger("opentelemetry")
        if not reports.handlers:
            reports.addHandler(_ServiceLog(logging.WARNING))
            reports.propagate = False
        own = Resource({"service.name": "torchrelay", "service.version": version})
        self._provider = TracerProvider(
            resource=Resource.create().merge(own).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("torchrelay", version)

    def start(
        self, name: str, parent: TraceContext | None, began: float | None, server: bool
    ) -> OpenTelemetrySpan:
        context = Context()
        if parent is not None:
            context = trace.set_span_in_context(trace.NonRecordingSpan(_span_context(parent)), context)
        return OpenTelemetrySpan(
            self._tracer.start_span(
                name,
                context,
                trace.SpanKind.SERVER if server else trace.SpanKind.INTERNAL,
                start_time=None if began is None else int(began * 1e9),
            )
        )

    def close(self) -> None:
        # by itself it waits 30 s for a collector that is down
        ending = threading.Thread(target=self._provider.shutdown, name="send spans", daemon=True)
        ending.start()
        ending.join(_CLOSE_SECONDS)


class _ServiceLog(logging.Handler):
    """What the SDK reports, a collector that is down say, is in the service's own log."""

    def emit(self, record: logging.LogRecord) -> None:
        log.warning("spans_not_exported", error=record.getMessage())


def _span_context(found: TraceContext) -> trace.SpanContext:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if found.sampled else trace.TraceFlags.DEFAULT)
    return trace.SpanContext(
        int(found.trace_id, 16), int(found.span_id, 16), is_remote=True, trace_flags=flags
    )
