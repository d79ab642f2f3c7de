"""Runs a dispatcher, and answers what a cluster's probes and Prometheus ask of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...compiler import VERSION
from ...workers.pool import WorkerPool
from ..base import logs
from ..base.settings import ServiceSettings
from ..compile.slot_claims import SlotClaims
from ..gateway.http.slow_clients import server_options
from ..parts.background import running
from ..parts.dispatcher import DispatcherParts
from ..parts.shared import SharedParts
from ..parts.worker_pool import worker_pool
from .listening import listen, say, url_of

log = structlog.get_logger(__name__)


def serve(settings: ServiceSettings) -> None:
    """Gives work to workers until SIGINT or SIGTERM. Raises SettingsError."""
    listener = listen(settings.host, settings.port, any_port_will_do=False)
    with listener:
        app = create_dispatcher_app(settings)
        config = uvicorn.Config(app, **server_options(settings))
        say(f"dispatcher {url_of(listener)}")
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
    say("stopped")


def create_dispatcher_app(settings: ServiceSettings, pool: WorkerPool | None = None) -> Starlette:
    """The dispatcher as an ASGI app: it works from the app's start to its end. pool: in place of the workers of the Ray
    cluster, which it shares with other dispatchers."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        logs.configure(settings)
        log.info("dispatcher_started", version=VERSION)
        shared = SharedParts(settings)
        workers = pool or worker_pool(settings, SlotClaims(shared.keys, shared.scripts, settings))
        async with running(shared, workers) as app.state.dispatcher:
            yield
        log.info("dispatcher_stopped")

    routes = [Route("/livez", _livez), Route("/readyz", _readyz), Route("/metrics", _metrics)]
    return Starlette(routes=routes, lifespan=lifespan)


async def _livez(request: Request) -> Response:
    return Response(b"ok\n", media_type="text/plain")


async def _readyz(request: Request) -> Response:
    """Whether compiles can begin: Redis answers, and Ray has started. Texts of errors are in the log."""
    dispatcher: DispatcherParts = request.app.state.dispatcher
    parts = {
        "redis": "cannot be reached" if await dispatcher.shared.redis_problem() else "ok",
        "workers": "ok",
    }
    if dispatcher.shared.stopping:
        parts["workers"] = "stopping"
    elif not dispatcher.pool_started or dispatcher.pool_error:
        parts["workers"] = "cannot be started" if dispatcher.pool_error else "starting"
    ready = set(parts.values()) == {"ok"}
    body = {"ready": ready, "parts": parts, "failing": dispatcher.shared.supervisor.failing()}
    return JSONResponse(body, 200 if ready else 503, {"Cache-Control": "no-store"})


async def _metrics(request: Request) -> Response:
    dispatcher: DispatcherParts = request.app.state.dispatcher
    return Response(await dispatcher.shared.render_metrics(None), media_type=CONTENT_TYPE_LATEST)
