"""Spans by OpenTelemetry's SDK, sent by OTLP over HTTP in the background.

It is imported where there is a collector only. Environment variables of OpenTelemetry's say where it is, what it is
sent with, how many traces are sampled and how this process is called.
"""

from __future__ import annotations

import logging

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from .tracing import Tracer

log = structlog.get_logger(__name__)


def exporting_tracer(version: str) -> Tracer:
    reports = logging.getLogger("opentelemetry")
    if not reports.handlers:
        reports.addHandler(_ServiceLog(logging.WARNING))
        reports.propagate = False
    own = Resource({"service.name": "torchrelay", "service.version": version})
    provider = TracerProvider(
        resource=Resource.create().merge(own).merge(OTELResourceDetector().detect()), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracer(provider.get_tracer("torchrelay", version), provider.shutdown)


class _ServiceLog(logging.Handler):
    """Puts what the SDK reports, such as a collector that is down, into the service's own log."""

    def emit(self, record: logging.LogRecord) -> None:
        log.warning("spans_not_exported", error=record.getMessage())
