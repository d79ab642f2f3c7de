"""The gateway: settings in, an ASGI app out. Wiring only; no torch is imported here or below."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import msgspec
import structlog
import uvicorn
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ..compiler import records, train_records, wire
from ..compiler.explain import Explanation
from ..compiler.trust_document import SignedDocument
from . import gateway as parts
from . import logs, problems, tls
from .dispatch import CompilePool
from .observe import Observe
from .patience import PatientProtocol
from .routes import (
    artifacts,
    audit,
    cache,
    compile,
    explain,
    health,
    jobs,
    keys,
    namespaces,
    prefetch,
    progress,
    status,
    tokens,
    trains,
    tunes,
    tunings,
)
from .settings import ServiceSettings
from .stats import StatsReply
from .tasks import end

log = structlog.get_logger(__name__)

SHUTDOWN_SECONDS = 5
"""How long answers in progress may take once the gateway is told to stop."""
_IDLE_SECONDS = 75
"""A connection without a request is closed after so long: later than by clients (httpx: 5 s) and balancers (60 s), who
would lose a request to one that is closed just then."""

_SCHEMAS = (
    wire.CompileStatus,
    wire.WorkerInfo,
    wire.Verdict,
    wire.ScriptUse,
    wire.ScriptArtifacts,
    Explanation,
    problems.ErrorReply,
    StatsReply,
    status.InfoReply,
    status.FallbackReport,
    health.ReadyReply,
    records.TokenRequest,
    records.TokenReply,
    records.TokenRecord,
    records.NamespaceReply,
    records.QuotaChange,
    records.KeysReply,
    keys.RotateRequest,
    SignedDocument,
    records.AuditReply,
    records.CacheReply,
    records.ArtifactReply,
    records.CollectReply,
    records.ImportReply,
    records.TuningsReply,
    records.TuningsRequest,
    records.TuningsTaken,
    records.TuneRequest,
    records.TuneJob,
    records.TunesReply,
    records.TuneReply,
    records.TuneResultsReply,
    records.GraphKept,
    train_records.TrainRequest,
    train_records.TrainJob,
    train_records.TrainsReply,
    train_records.PackageKept,
    train_records.TrainFile,
    train_records.TrainFilesReply,
    train_records.News,
)


def create_app(settings: ServiceSettings, pool: CompilePool | None = None) -> FastAPI:
    """The gateway as an ASGI app. `pool` replaces the Ray workers that the settings describe."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        logs.configure(settings)
        gateway = parts.build(settings, pool or parts.worker_pool(settings))
        app.state.gateway = gateway
        tasks = [
            asyncio.create_task(gateway.wakes.listen(), name="wake-ups"),
            asyncio.create_task(parts.start_pool(gateway), name="start workers"),
            asyncio.create_task(parts.sweep(gateway), name="sweep blobs"),
            asyncio.create_task(parts.drive_tunes(gateway), name="drive batch jobs"),
            asyncio.create_task(parts.drive_trains(gateway), name="drive training jobs"),
        ]
        log.info("gateway_started", version=version("torchrelay"), state_dir=str(settings.state_dir))
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
        version=version("torchrelay"),
        summary="Compile PyTorch graphs once, and hand the artifact to everyone",
        lifespan=lifespan,
    )
    for module in (
        compile,
        progress,
        artifacts,
        explain,
        status,
        health,
        keys,
        tokens,
        trains,
        tunes,
        tunings,
        audit,
        cache,
        jobs,
        namespaces,
        prefetch,
    ):
        app.include_router(module.router)
    problems.install(app, retry_after_seconds=settings.retry_after_seconds)
    app.add_middleware(Observe)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


class GatewayServer(uvicorn.Server):
    """Uvicorn waits for open answers before it stops the app; event streams end first, so that it can."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    @property
    def gateway(self) -> parts.Gateway:
        """Once it has started."""
        gateway: parts.Gateway = self._app.state.gateway
        return gateway

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.gateway.state.stopping = True
        self.gateway.tenants.wake_all()
        await super().shutdown(sockets)


def create_server(settings: ServiceSettings, pool: CompilePool | None = None) -> GatewayServer:
    """The app under uvicorn; `serve()` it, or `run()`. Raises SettingsError for a certificate that cannot be used."""
    tls.check(settings)
    app = create_app(settings, pool)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=functools.partial(PatientProtocol, head_seconds=settings.body_timeout_seconds),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        **tls.options(settings),
    )
    return GatewayServer(config, app)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the schemas of the msgspec structs that the routes answer with."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        _, found = msgspec.json.schema_components(_SCHEMAS, ref_template="#/components/schemas/{name}")
        document.setdefault("components", {}).setdefault("schemas", {}).update(found)
        app.openapi_schema = document
    return app.openapi_schema
