"""One log line, two measurements and a span for each HTTP request, as plain ASGI: streams pass untouched."""

from __future__ import annotations

import time
import uuid

import structlog
from opentelemetry.trace import Span, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....compiler.api.protocols import CLIENTS, PROTOCOL_HEADER
from ...base.budgets import HELD, Held
from ...base.metrics import GatewayMetrics
from ...base.tracing import Tracer, trace_of
from ...signing.trusted_keys import TrustedKeys

log = structlog.get_logger(__name__)
TRUST_HEADER = "X-Torchrelay-Trust"
"""On every answer: the serial of /v1/trust, so that a client fetches that only when it has changed."""
_TRUST_NAME = TRUST_HEADER.lower().encode()
_PROTOCOL = PROTOCOL_HEADER.lower().encode(), str(CLIENTS.number).encode()
_QUIET = frozenset({"/livez", "/readyz", "/metrics"})


class AccessLog:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        keyring: TrustedKeys = scope["app"].state.gateway.keyring
        began, status, request_id = time.perf_counter(), 500, uuid.uuid4().hex[:16]

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                serial = str(keyring.ring.serial).encode()
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    (_TRUST_NAME, serial),
                    _PROTOCOL,
                ]
            await send(message)

        tracer: Tracer = scope["app"].state.gateway.tracer
        held = scope[HELD] = Held(scope["app"].state.gateway.budgets)
        with (
            tracer.begin(_method(scope["method"]), trace_of(scope), server=True) as span,
            structlog.contextvars.bound_contextvars(request=request_id),
        ):
            try:
                await self._app(scope, receive, watched)
            finally:
                held.give_back()
                seconds = time.perf_counter() - began
                route = getattr(scope.get("route"), "path", "(none)")
                metrics: GatewayMetrics = scope["app"].state.gateway.metrics
                metrics.http_requests.labels(_method(scope["method"]), route, str(status)).inc()
                metrics.http_seconds.labels(route).observe(seconds)
                _finish(span, _method(scope["method"]), route, status)
                level = log.debug if route in _QUIET else log.info
                level(
                    "http",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    milliseconds=round(seconds * 1000, 2),
                )


def _finish(span: Span, method: str, route: str, status: int) -> None:
    """Probes leave no span, nor does who has no token."""
    if route in _QUIET or status == 401:
        return
    span.update_name(f"{method} {route}")
    span.set_attribute("torchrelay.status", status)
    if status >= 500:
        span.set_status(StatusCode.ERROR, str(status))
    span.end()


def _method(name: str) -> str:
    """A bounded label: anyone can send any method."""
    return name if name in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} else "OTHER"
