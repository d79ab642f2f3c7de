"""The ASGI app under uvicorn, which ends event streams before it stops."""

from __future__ import annotations

import socket
import sys

import uvicorn
from fastapi import FastAPI

from ...workers.pool import WorkerPool
from ..access.oidc.sign_in_file import read_issuers
from ..base.settings import ServiceSettings
from .app import create_app
from .http import tls
from .http.slow_clients import server_options
from .parts import GatewayParts

_SWITCH_SECONDS = 0.0005
"""How long the event loop waits for a thread that runs Python, as those that make pages do: a tenth of the default."""


class GatewayServer(uvicorn.Server):
    """Uvicorn waits for open answers before it stops the app; event streams end first, so that it can."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    @property
    def gateway(self) -> GatewayParts:
        """Once it has started."""
        gateway: GatewayParts = self._app.state.gateway
        return gateway

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.gateway.stop()
        await super().shutdown(sockets)


def create_server(settings: ServiceSettings, pool: WorkerPool | None = None) -> GatewayServer:
    """The app under uvicorn, `pool` as in create_app; `serve()` it, or `run()`. Raises SettingsError for a certificate
    or a sign-in file that cannot be used."""
    tls.check(settings)
    if settings.sign_in_file is not None:
        read_issuers(settings.sign_in_file)
    app = create_app(settings, pool)
    sys.setswitchinterval(_SWITCH_SECONDS)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        **server_options(settings),
        **tls.options(settings),
    )
    return GatewayServer(config, app)
