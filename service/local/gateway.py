"""Runs gateways: in this process, or in several that share its port."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import structlog
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.loops.auto import auto_loop_factory

from ...compiler.artifact.signing import key_text
from ...compiler.errors import SettingsError
from ...workers.pool import WorkerPool, die_with_parent
from ..base.async_tasks import end
from ..base.settings import ServiceSettings, default_credentials_file
from ..gateway.http import tls
from ..gateway.routes.health import ready_parts
from ..gateway.server import GatewayServer, create_server
from ..storage.redis.keys import DEFAULT_NAMESPACE
from . import state_folder
from .listening import listen, say, url_of
from .supervisor import run_and_exit

log = structlog.get_logger(__name__)

_RESTART_SECONDS = 1.0
"""Until a process that ended by itself is replaced."""


def serve(settings: ServiceSettings, *, credentials: Path, processes: int) -> None:
    """Answers clients until SIGINT or SIGTERM. Raises SettingsError."""
    if processes < 1:
        raise SettingsError(f"--workers is {processes}", hint="Give 1 or more")
    tls.check(settings)
    if settings.token is None:
        settings = settings.model_copy(update={"token": state_folder.owner_token(settings.state_dir)})
    listener = listen(settings.host, settings.port, any_port_will_do="port" not in settings.model_fields_set)
    with listener:
        settings = with_public_url(settings, listener)
        if processes == 1:
            _run(_serve_until_signal(settings, listener, credentials))
            return
        _keep_processes(
            processes,
            lambda n: _run(_serve_until_signal(settings, listener, credentials if n == 0 else None)),
        )


def _run(serving: Coroutine[Any, Any, None]) -> None:
    """On uvloop's event loop, or where that is missing on asyncio's, which is slower."""
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(serving)


def with_public_url(settings: ServiceSettings, listener: socket.socket) -> ServiceSettings:
    """The port may be any."""
    if settings.public_url:
        return settings
    url = url_of(listener, "http" if settings.tls_cert_file is None else "https")
    return settings.model_copy(update={"public_url": url})


async def serve_on(
    settings: ServiceSettings,
    pool: WorkerPool | None,
    listener: socket.socket,
    credentials: Path | None,
    stop: asyncio.Event,
) -> None:
    """Answers clients until `stop`. credentials: where to write what a client needs; None: nowhere, and say nothing."""
    server = create_server(settings, pool)

    async def end_after_stop() -> None:
        await stop.wait()
        server.should_exit = True

    tasks = [asyncio.create_task(end_after_stop(), name="end after a signal")]
    if credentials is not None:
        url = url_of(listener, "http" if settings.tls_cert_file is None else "https")
        announce = _announce(server, settings, url, credentials)
        tasks.append(asyncio.create_task(announce, name="say when ready"))
    try:
        await server.serve(sockets=[listener])
    finally:
        await end(*tasks)
    if not stop.is_set() and not server.started:
        raise SettingsError("the gateway did not start", hint="Its log above says why")


def stop_at_signal() -> asyncio.Event:
    """Is set at SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _serve_until_signal(
    settings: ServiceSettings, listener: socket.socket, credentials: Path | None
) -> None:
    await serve_on(settings, None, listener, credentials, stop_at_signal())


async def _announce(server: GatewayServer, settings: ServiceSettings, url: str, credentials: Path) -> None:
    """Write the credentials once the gateway answers; say what to do next once a worker is warm."""
    while not server.started:
        await asyncio.sleep(0.05)
    assert settings.token is not None
    public_keys = [key_text(key) for key in server.gateway.keyring.public]
    place, reached = credentials, settings.public_url or url
    if credentials == default_credentials_file():
        place = state_folder.place_for_credentials(credentials, reached, public_keys)
    state_folder.write_credentials(
        place,
        url=reached,
        token=settings.token.get_secret_value(),
        public_keys=public_keys,
        namespace=DEFAULT_NAMESPACE,
    )
    say(f"gateway {url}")
    say(f"credentials {place}")
    if place != credentials:
        say(f"{credentials} is for another service and stays as it is")
        say(f"scripts use this service with TORCHRELAY_PROFILE={place.stem}")
    say(f"state {settings.state_dir}")
    say("warming workers, some seconds")
    while set((await ready_parts(server.gateway, details=False)).values()) != {"ok"}:
        await asyncio.sleep(0.25)
    say(f"ready {url}")
    profile = "" if place == credentials else f" with TORCHRELAY_PROFILE={place.stem}"
    say(f'next: torch.compile(model, backend="torchrelay") in any script of this user{profile}')
    say("check: torchrelay doctor; look: torchrelay open; stop: Ctrl-C")


def _keep_processes(count: int, run: Callable[[int], None]) -> None:
    """Runs `run` in `count` processes until SIGINT or SIGTERM; one that ends by itself is replaced."""
    stopping = False
    running: dict[int, int] = {}  # number by process

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True
        for process in running:
            os.kill(process, signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    for n in range(count):
        running[_start(run, n)] = n
    if stopping:  # since then
        stop()
    while running:
        process, status = os.wait()
        n = running.pop(process, -1)
        mark_process_dead(process)  # type: ignore[no-untyped-call]
        if n < 0 or stopping:
            continue
        log.error("gateway_process_ended", number=n, status=os.waitstatus_to_exitcode(status))
        time.sleep(_RESTART_SECONDS)
        if not stopping:
            running[_start(run, n)] = n
        if stopping:  # since then
            stop()


def _start(run: Callable[[int], None], n: int) -> int:
    parent = os.getpid()
    process = os.fork()
    if process == 0:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(parent, signal.SIGTERM)
        run_and_exit(lambda: run(n))
    return process
