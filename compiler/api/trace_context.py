"""W3C trace context: the header `traceparent`, by which one trace id goes from a client to the compile of its graph.

https://www.w3.org/TR/trace-context/ . Of its versions only 00 is read, whose form is closed;
anything else is not a trace.
"""

from __future__ import annotations

import re
import secrets

from msgspec import Struct

TRACE_HEADER = "traceparent"
_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


class TraceContext(Struct, frozen=True):
    """A span, as those that it causes know it. trace_id: 32 hex digits; span_id: 16. sampled: the trace is recorded."""

    trace_id: str
    span_id: str
    sampled: bool = True

    @property
    def header(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"


def new_trace() -> TraceContext:
    digits = secrets.token_hex(24)
    return TraceContext(digits[:32], digits[32:])


def parse_traceparent(header: str) -> TraceContext | None:
    """None for whatever is not exactly of the form."""
    found = _FORM.fullmatch(header)
    if found is None or found[1] == _NO_TRACE or found[2] == _NO_SPAN:
        return None
    return TraceContext(found[1], found[2], bool(int(found[3], 16) & 1))
