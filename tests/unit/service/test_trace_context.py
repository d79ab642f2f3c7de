"""A traceparent is read if it has exactly the form of W3C's version 00; the log of whoever has a trace names it."""

from __future__ import annotations

import json

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from torchrelay.clients.gateway.compile_client import trace_of_caller
from torchrelay.compiler.api.trace_context import TraceContext, new_trace, parse_traceparent
from torchrelay.service.base import logs
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.base.tracing import in_trace, trace_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_header_is_read_and_written_again() -> None:
    assert parse_traceparent(GOOD) == TraceContext(TRACE, SPAN, sampled=True)
    assert parse_traceparent(GOOD[:-2] + "00") == TraceContext(TRACE, SPAN, sampled=False)
    for context in (new_trace(), TraceContext(TRACE, SPAN, sampled=False)):
        assert parse_traceparent(context.header) == context
    assert new_trace().trace_id != new_trace().trace_id


@pytest.mark.parametrize(
    "header",
    [
        "",
        GOOD + "\n",
        " " + GOOD,
        GOOD + "-00",
        GOOD.upper(),
        GOOD.replace("00-", "01-", 1),
        GOOD.replace("00-", "ff-", 1),
        GOOD.replace(TRACE, "0" * 32),
        GOOD.replace(SPAN, "0" * 16),
        GOOD.replace(TRACE, TRACE[:-1]),
        GOOD.replace(TRACE, TRACE[:-1] + "g"),
        GOOD.replace(TRACE, TRACE[:-1] + "\u0661"),
        GOOD[:-1] + "x",
        "0" * 100_000,
    ],
)
def test_whatever_else_a_header_has_is_no_trace(header: str) -> None:
    assert parse_traceparent(header) is None


def test_two_headers_are_none() -> None:
    header = (b"traceparent", GOOD.encode())
    assert trace_of({"type": "http", "headers": [header]}) == TraceContext(TRACE, SPAN)
    assert trace_of({"type": "http", "headers": [header, header]}) is None
    assert trace_of({"type": "http", "headers": [(b"traceparent", b"\xff" * 55)]}) is None


def test_the_programs_own_active_span_is_the_parent() -> None:
    alone = trace_of_caller()
    with TracerProvider().get_tracer("a program").start_as_current_span("a step") as span:
        within, own = trace_of_caller(), span.get_span_context()
    assert within == TraceContext(trace.format_trace_id(own.trace_id), trace.format_span_id(own.span_id))
    assert len({alone.trace_id, within.trace_id, trace_of_caller().trace_id}) == 3


def test_lines_of_the_log_have_the_trace_id_only_within_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    try:
        logs.configure(ServiceSettings(log_format="json"))
        log = structlog.get_logger()
        with in_trace(TraceContext(TRACE, SPAN)):
            log.info("one")
        log.info("other")
    finally:
        structlog.configure(**before)
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["trace_id"], "trace_id" in second) == (TRACE, False)
