"""The gateway as an ASGI app: its parts, its background tasks, its routes, its OpenAPI document."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi

from ...compiler import VERSION
from ...workers.pool import WorkerPool
from ..base import logs
from ..base.async_tasks import end
from ..base.http_bodies import ErrorReply
from ..settings import ServiceSettings
from .http import errors
from .http.access_log import AccessLog
from .http.json_routes import SCHEMA_REFERENCE
from .routes import health, status
from .routes.admin import audit, cache, keys, namespaces, tokens
from .routes.graphs import artifacts, compile, prefetch, programs, progress, rank_agreement
from .routes.jobs import autotunes, training, tuning, tuning_database
from .wiring.background import start_background_tasks
from .wiring.gateway import GatewayParts
from .wiring.worker_pool import worker_pool

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
        rank_agreement,
        namespaces,
        prefetch,
        programs,
    )
)


def create_app(settings: ServiceSettings, pool: WorkerPool | None = None) -> FastAPI:
    """The gateway as an ASGI app. `pool` replaces the Ray workers that the settings describe."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        logs.configure(settings)
        gateway = GatewayParts(settings, pool or worker_pool(settings))
        app.state.gateway = gateway
        tasks = start_background_tasks(gateway)
        log.info("gateway_started", version=VERSION, state_dir=str(settings.state_dir))
        try:
            yield
        finally:
            gateway.state.stopping = True
            await gateway.tenants.close()
            await end(*tasks)
            await gateway.pool.close()
            await gateway.redis.aclose()
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
    app.add_middleware(AccessLog)
    app.openapi = lambda: _openapi_document(app)  # type: ignore[method-assign]
    _serve_description(app)
    return app


def _serve_description(app: FastAPI) -> None:
    """/openapi.json and /docs, for everyone: the document is encoded once."""
    encoded = functools.cache(lambda: msgspec.json.encode(app.openapi()))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(encoded(), media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return get_swagger_ui_html(openapi_url="openapi.json", title=app.title)


def _openapi_document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the schemas of the msgspec structs that routes take and answer. Made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        structs = [ErrorReply, *(struct for router in ROUTERS for struct in router.structs)]
        _, schemas = msgspec.json.schema_components(structs, ref_template=SCHEMA_REFERENCE)
        document.setdefault("components", {}).setdefault("schemas", {}).update(sorted(schemas.items()))
        app.openapi_schema = document
    return app.openapi_schema
