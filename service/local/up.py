"""Runs a whole service from one command: redis-server, Ray with warm workers, and a gateway that is a dispatcher too.

The process ends what it has started: in order after Ctrl-C or SIGTERM, through supervisor.py when it is killed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ...workers.pool import EarlyServer, WorkerPool
from ..base.settings import ServiceSettings
from ..gateway.http import tls
from ..parts.worker_pool import worker_pool
from . import state_folder
from .gateway import serve_on, stop_at_signal, with_public_url
from .listening import listen, say
from .redis_server import RedisServer


def serve_all(settings: ServiceSettings, *, credentials: Path, early_server: EarlyServer) -> None:
    """Serves until SIGINT or SIGTERM. early_server: see PoolSettings. Raises RelayError."""
    tls.check(settings)
    listener = listen(settings.host, settings.port, any_port_will_do="port" not in settings.model_fields_set)
    with listener:
        asyncio.run(_serve_all(settings, listener, credentials, early_server))


async def _serve_all(
    settings: ServiceSettings, listener: socket.socket, credentials: Path, early_server: EarlyServer
) -> None:
    stop = stop_at_signal()
    async with _start_parts(settings, stop, early_server) as (complete, pool):
        if not stop.is_set():
            await serve_on(with_public_url(complete, listener), pool, listener, credentials, stop)
    say("stopped")


@asynccontextmanager
async def _start_parts(
    settings: ServiceSettings, stop: asyncio.Event, early_server: EarlyServer
) -> AsyncIterator[tuple[ServiceSettings, WorkerPool]]:
    """Starts what the gateway needs. Yields the settings to reach it, and the pool."""
    async with state_folder.exclusive(settings.state_dir) as lock:
        if settings.token is None:
            settings = settings.model_copy(update={"token": state_folder.owner_token(settings.state_dir)})
        for permission in ("token_allow_source", "token_allow_programs", "training"):
            if getattr(settings, permission) is None:
                settings = settings.model_copy(update={permission: True})
        with state_folder.runtime_directory(settings.state_dir) as runtime:
            redis = RedisServer(
                settings.state_dir / "redis", runtime / "redis.sock", settings.state_dir / "redis.log", lock
            )
            try:
                if not stop.is_set():
                    await redis.start()
                settings = settings.model_copy(
                    update={"redis_url": redis.url, "ray_temp_dir": settings.ray_temp_dir or str(runtime)}
                )
                yield settings, worker_pool(settings, early_server=early_server)
            finally:
                await redis.stop()
