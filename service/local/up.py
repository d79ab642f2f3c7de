"""Runs a whole service from one command: redis-server, Ray with warm workers, and the gateway.

Or the gateway alone, with a Redis and a Ray that run elsewhere. The process ends what it has started: in order after
Ctrl-C or SIGTERM, through supervisor.py when it is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import SecretStr

from ...compiler.artifact.signing import key_text
from ...compiler.errors import SettingsError
from ...workers.pool import WorkerPool
from ..base.async_tasks import end
from ..gateway.routes.health import ready_parts
from ..gateway.server import GatewayServer, create_server
from ..gateway.wiring.worker_pool import worker_pool
from ..settings import ServiceSettings
from ..storage.redis.keys import DEFAULT_NAMESPACE
from . import state_folder
from .redis_server import RedisServer


def default_cpu_slots() -> int:
    """Half the cores, at most 8: a compile is serial for a good part, and uses every core for the rest."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


async def run(
    settings: ServiceSettings, *, listener: socket.socket, credentials: Path, embedded: bool
) -> None:
    """Serve until SIGINT or SIGTERM. `embedded`: start redis-server and Ray too. Raises RelayError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with _start_parts(settings, stop, embedded=embedded) as (complete, pool):
        if not complete.public_url:  # the port may be any
            url = url_of(listener, "http" if complete.tls_cert_file is None else "https")
            complete = complete.model_copy(update={"public_url": url})
        if not stop.is_set():
            await _serve(create_server(complete, pool), complete, listener, credentials, stop)
    _say("stopped")


def listen(host: str, port: int, *, any_port_will_do: bool) -> socket.socket:
    """A listening socket. any_port_will_do: on any free port if `port` is taken. Raises SettingsError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # fails at once if another process has bound the port and does not listen yet
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if any_port_will_do and port:
            return listen(host, 0, any_port_will_do=False)
        raise SettingsError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="Give another --port; 0 finds a free one",
        ) from None
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """The URL for a client on this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@asynccontextmanager
async def _start_parts(
    settings: ServiceSettings, stop: asyncio.Event, *, embedded: bool
) -> AsyncIterator[tuple[ServiceSettings, WorkerPool]]:
    """Starts what the gateway needs. Yields the settings to reach it, and the pool."""
    async with state_folder.exclusive(settings.state_dir) as lock:
        if settings.token is None:
            settings = settings.model_copy(
                update={"token": SecretStr(state_folder.owner_token(settings.state_dir))}
            )
        if not embedded:
            yield settings, worker_pool(settings)
            return
        for permission in ("token_allow_source", "token_allow_programs"):
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
                yield settings, worker_pool(settings)
            finally:
                await redis.stop()


async def _serve(
    server: GatewayServer,
    settings: ServiceSettings,
    listener: socket.socket,
    credentials: Path,
    stop: asyncio.Event,
) -> None:
    async def end_after_stop() -> None:
        await stop.wait()
        server.should_exit = True

    url = url_of(listener, "http" if settings.tls_cert_file is None else "https")
    tasks = [
        asyncio.create_task(end_after_stop(), name="end after a signal"),
        asyncio.create_task(_announce(server, settings, url, credentials), name="say when ready"),
    ]
    try:
        await server.serve(sockets=[listener])
    finally:
        await end(*tasks)
    if not stop.is_set() and not server.started:
        raise SettingsError("the gateway did not start", hint="Its log above says why")


async def _announce(server: GatewayServer, settings: ServiceSettings, url: str, credentials: Path) -> None:
    """Write the credentials once the gateway answers; say what to do next once a worker is warm."""
    while not server.started:
        await asyncio.sleep(0.05)
    assert settings.token is not None
    keyring = server.gateway.keyring
    state_folder.write_credentials(
        credentials,
        url=settings.public_url or url,
        token=settings.token.get_secret_value(),
        public_keys=[key_text(key) for key in keyring.public],
        namespace=DEFAULT_NAMESPACE,
    )
    _say(f"gateway {url}")
    _say(f"credentials {credentials}")
    _say(f"state {settings.state_dir}")
    _say("warming workers, some seconds")
    while set((await ready_parts(server.gateway, details=False)).values()) != {"ok"}:
        await asyncio.sleep(0.25)
    _say(f"ready {url}")
    _say('next: torch.compile(model, backend="torchrelay") in any script of this user')
    _say("check: torchrelay doctor; stop: Ctrl-C")


def _say(text: str) -> None:
    print(f"torchrelay: {text}", flush=True)
