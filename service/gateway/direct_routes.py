"""What hits ask for, without the framework's routing, which took half of their time: POST /v1/compile and
GET /v1/artifacts/{key}.

The route's own function answers, after the same checks. A request with a query other than `wait=cache` takes the usual
way; the OpenAPI document has the routes as ever.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .http.authentication import authenticated
from .http.errors import error_response
from .parts import GatewayParts
from .routes.graphs.artifacts import artifact
from .routes.graphs.compile import compile_graph

_COMPILE = SimpleNamespace(path="/v1/compile")
_ARTIFACT = SimpleNamespace(path="/v1/artifacts/{key}")
"""As the log and the metrics name a route."""
_ARTIFACT_PATH = re.compile("/v1/artifacts/([0-9a-f]{64})")


class DirectRoutes:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            asked = scope["method"], scope["query_string"]
            if scope["path"] == _COMPILE.path and asked in (("POST", b""), ("POST", b"wait=cache")):
                scope["route"] = _COMPILE
            elif asked == ("GET", b"") and _ARTIFACT_PATH.fullmatch(scope["path"]):
                scope["route"] = _ARTIFACT
        if scope.get("route") is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        gateway: GatewayParts = scope["app"].state.gateway
        try:
            response = await _response(request, gateway)
        except Exception as error:
            response = error_response(request, error, gateway.settings.retry_after_seconds)
        await response(scope, receive, send)


async def _response(request: Request, gateway: GatewayParts) -> Response:
    """Raises what the route raises."""
    compiles = request.scope["route"] is _COMPILE
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    bearer = token if scheme.lower() == "bearer" else ""
    grant = await authenticated(request, bearer, "compile" if compiles else "read")
    tenant = await gateway.tenants.of(grant.namespace)
    if not compiles:
        return await artifact(request, request.scope["path"].rpartition("/")[2], gateway, tenant)
    wait: Literal["", "cache"] = "cache" if request.scope["query_string"] else ""
    return await compile_graph(request, gateway, grant, tenant, wait)
