"""Runs the signer: a process that holds the signing keys and nothing else. It knows no Redis, no Ray and no torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
import uvicorn

from ...compiler import VERSION
from ...compiler.errors import SettingsError
from ..base import logs
from ..base.settings import ServiceSettings
from ..gateway.http import tls
from ..gateway.http.slow_clients import server_options
from ..signing.open import open_folder
from ..signing.server import SignerTokens, create_app
from .listening import Listener, listen

log = structlog.get_logger(__name__)


def run(settings: ServiceSettings, *, host: str, port: int, uds: Path | None) -> None:
    """Serves until SIGINT or SIGTERM, on a Unix socket if `uds` is given. Raises SettingsError, Unavailable."""
    tokens = _tokens(settings)
    if uds is None:
        tls.check(settings)
    logs.configure(settings)
    try:
        keyring = open_folder(settings)
    except OSError as error:
        raise SettingsError(
            f"the folder of keys, {settings.keys_location}, cannot be used: {error.strerror}",
            hint="Give the signer's user a folder of its own: TORCHRELAY_SERVICE_KEYS_DIR",
        ) from None
    config = uvicorn.Config(
        create_app(keyring, tokens, settings),
        **server_options(settings),
        **(tls.options(settings) if uds is None else {}),
    )
    with listen(host, port, any_port_will_do=False) if uds is None else _listen_on_path(uds) as listener:
        name = listener.getsockname()
        log.info("signer_started", version=VERSION, listens=str(name), keys=str(keyring.folder))
        uvicorn.Server(config).run(sockets=[listener])
    log.info("signer_stopped")


def _tokens(settings: ServiceSettings) -> SignerTokens:
    if settings.signer_token is None:
        raise SettingsError(
            "the signer needs a token for those who may ask it",
            hint="Set TORCHRELAY_SERVICE_SIGNER_TOKEN: 32 characters or more, from a random source",
        )
    token = settings.signer_token.get_secret_value()
    admin = settings.signer_admin_token.get_secret_value() if settings.signer_admin_token else ""
    if token == admin:
        raise SettingsError(
            "signer_token and signer_admin_token are the same", hint="Whoever may sign could change keys too"
        )
    return SignerTokens(token, admin)


@contextmanager
def _listen_on_path(path: Path) -> Iterator[socket.socket]:
    """A Unix socket for this user and its group. One that a killed signer has left is replaced."""
    listener = Listener(socket.AF_UNIX)
    try:
        if path.is_socket() and _is_dead(path):
            path.unlink()
        before = os.umask(0o117)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {path}: {error.strerror or error}", hint="Give another --uds"
        ) from None
    try:
        yield listener
    finally:
        path.unlink(missing_ok=True)


def _is_dead(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False
