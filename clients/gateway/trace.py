"""The trace of a graph's requests: part of the program's own OpenTelemetry trace if there is one, else a new trace."""

from __future__ import annotations

import sys

from ...compiler.api.trace_context import TraceContext, new_trace


def trace_of_caller() -> TraceContext:
    """The program's active span, or the root of a new trace. OpenTelemetry is not imported: a program that has an
    active span has done so."""
    get_current_span = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    span = None if get_current_span is None else get_current_span().get_span_context()
    if span is None or not span.is_valid:
        return new_trace()
    return TraceContext(f"{span.trace_id:032x}", f"{span.span_id:016x}", bool(span.trace_flags.sampled))
