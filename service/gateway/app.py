"""The gateway as an ASGI app: its parts, its background tasks, its routes, its OpenAPI document."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from ...compiler import VERSION
from ...workers.pool import WorkerPool
from ..base import logs
from ..base.http_bodies import ErrorReply
from ..base.settings import ServiceSettings
from ..parts.background import running
from .direct_routes import DirectRoutes
from .http import errors
from .http.access_log import AccessLog
from .http.json_routes import SCHEMA_REFERENCE
from .http.page_bodies import page_response
from .pages import administration, jobs, kernels
from .pages import artifacts as artifact_pages
from .pages import routes as pages
from .pages import sign_in as page_sign_in
from .pages.views import described
from .parts import GatewayParts
from .routes import health, status
from .routes.admin import audit, cache, keys, namespaces, tokens
from .routes.graphs import artifacts, compile, prefetch, programs, progress
from .routes.jobs import autotunes, training, tuning, tuning_database

log = structlog.get_logger(__name__)

ROUTERS = tuple(
    module.router
    for module in (
        compile,
        progress,
        artifacts,
        status,
        health,
        keys,
        tokens,
        training,
        tuning,
        tuning_database,
        autotunes,
        audit,
        cache,
        namespaces,
        prefetch,
        programs,
        pages,
        artifact_pages,
        kernels,
        page_sign_in,
        jobs,
        administration,
    )
)


def create_app(settings: ServiceSettings, pool: WorkerPool | None = None) -> FastAPI:
    """The gateway as an ASGI app. With `pool` the process is a dispatcher too, with these workers; without it, the
    dispatchers of the settings' Redis run elsewhere."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        logs.configure(settings)
        app.state.gateway = gateway = GatewayParts(settings)
        log.info("gateway_started", version=VERSION, state_dir=str(settings.state_dir))
        try:
            async with running(gateway, pool) as app.state.dispatcher:
                yield
        finally:
            log.info("gateway_stopped")

    app = FastAPI(
        title="torchrelay",
        version=VERSION,
        summary="Compile PyTorch graphs once, and hand the artifact to everyone",
        lifespan=lifespan,
        openapi_url=None,
    )
    for router in ROUTERS:
        app.include_router(router)
    errors.install(app, retry_after_seconds=settings.retry_after_seconds)
    app.add_middleware(DirectRoutes)
    app.add_middleware(AccessLog)
    app.openapi = lambda: _openapi_document(app)  # type: ignore[method-assign]
    _serve_description(app)
    return app


def _serve_description(app: FastAPI) -> None:
    """/openapi.json, and /docs for people, for everyone: each is made once."""
    encoded = functools.cache(lambda: msgspec.json.encode(app.openapi()))
    page = ""

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(encoded(), media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        nonlocal page
        page = page or described(request, app.openapi())
        return page_response(page)


def _openapi_document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the schemas of the msgspec structs that routes take and answer. Made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        structs = [ErrorReply, *(struct for router in ROUTERS for struct in router.structs)]
        _, schemas = msgspec.json.schema_components(structs, ref_template=SCHEMA_REFERENCE)
        document.setdefault("components", {}).setdefault("schemas", {}).update(sorted(schemas.items()))
        app.openapi_schema = document
    return app.openapi_schema
