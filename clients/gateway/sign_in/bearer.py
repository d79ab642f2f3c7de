"""The token in a file: one that somebody else rotates, or one that is renewed here.

Processes of one user share the credentials file, and a provider may take each refresh token once: who renews holds the
file's lock, and reads the file again first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import structs

from ....compiler.errors import DeadlineExceeded, RelayError, SettingsError, Unauthenticated
from ....compiler.process.fork_safe_lock import ForkSafeLock
from ...atomic_file import locked
from ...settings import ClientSettings, same_gateway
from ..credentials import SignedIn, read_token_file, write_credentials
from .provider_client import ProviderClient, signed_in

_PAUSE_SECONDS = 30.0
"""After a token could not be renewed: until then nobody waits for the provider again."""
_LOCK_SECONDS = 15.0
_LOCK_PAUSE_SECONDS = 0.05


class Bearer:
    """Safe for threads, and after a fork."""

    def __init__(self, settings: ClientSettings, path: Path) -> None:
        self._settings = settings
        self._path = path
        self._lock = ForkSafeLock()
        self._known: str | SignedIn = ""
        self._file_state: tuple[int, ...] = ()
        self._tried = float("-inf")
        self._problem = ""

    def token(self) -> str:
        """May ask the provider first, for seconds. Raises Unauthenticated if no token holds any longer."""
        path = self._path
        with self._lock:
            held = self._read(path)
            if isinstance(held, str):
                return held
            if held.sign_in.renew <= time.time() and self._tried + _PAUSE_SECONDS <= time.monotonic():
                held = self._renewed(path, held)
            if time.time() < held.sign_in.expires:
                return held.token
            reason = f" and cannot be renewed: {self._problem}" if self._problem else ""
            raise Unauthenticated(
                f"the sign-in has expired{reason}", hint=f"Run `torchrelay login {held.url}`"
            )

    def _read(self, path: Path) -> str | SignedIn:
        """What the file holds. Raises Unauthenticated."""
        try:
            found = path.stat()
            state = (found.st_mtime_ns, found.st_ino, found.st_dev, found.st_size)
            if state != self._file_state:
                self._known, self._file_state = read_token_file(path), state
        except OSError as error:
            raise Unauthenticated(f"the token in {path} cannot be read: {error.strerror}") from None
        except SettingsError as error:
            raise Unauthenticated(error.message, hint=error.advice) from None
        if isinstance(self._known, SignedIn) and not same_gateway(self._known.url, self._settings.url):
            raise Unauthenticated(
                f"{path} is for another gateway by now",
                hint="Run `torchrelay login`, and restart this process",
            )
        return self._known

    def _renewed(self, path: Path, signed_in: SignedIn) -> SignedIn:
        """A token with a longer life if there can be one, else the same. Raises Unauthenticated if the file is gone."""
        try:
            with _alone(path):
                found = self._read(path)
                if isinstance(found, SignedIn):
                    signed_in = found
                if signed_in.sign_in.renew <= time.time():
                    signed_in = self._refreshed(signed_in)
                    write_credentials(path, **structs.asdict(signed_in))
        except RelayError as error:
            self._tried, self._problem = time.monotonic(), error.message
        except OSError as error:
            self._tried, self._problem = time.monotonic(), f"{path.parent}: {error.strerror}"
        return signed_in

    def _refreshed(self, before: SignedIn) -> SignedIn:
        """Raises Unauthenticated, GatewayUnreachable, SettingsError."""
        known = before.sign_in
        if not known.refresh_token:
            raise Unauthenticated("the sign-in provider gave nothing to renew it with")
        with ProviderClient(self._settings, known.issuer, known.client_id) as client:
            answer = client.refresh(known.refresh_token)
        token, renewed = signed_in(
            answer,
            issuer=known.issuer,
            client_id=known.client_id,
            bearer=known.bearer,
            refresh_token=known.refresh_token,
        )
        return structs.replace(before, token=token, sign_in=renewed)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process of this user renews meanwhile. Raises OSError, DeadlineExceeded."""
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        with locked(path.with_suffix(".lock"), wait=False) as held:
            if held:
                yield
                return
        if time.monotonic() >= until:
            raise DeadlineExceeded("another process renews it, and does not finish", hint="")
        time.sleep(_LOCK_PAUSE_SECONDS)
