"""The public keys of one issuer: from its discovery document (OpenID Connect Discovery 1.0) and its key set (RFC 7517).

Known keys are looked up without a request. They are fetched again in the background now and then, and at once for an
unknown one, but never more often than every few seconds, whoever sends tokens. While the issuer cannot be reached,
known keys count for a day.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import jwt
import structlog
from msgspec import Struct

from ....compiler.errors import Unauthenticated, Unavailable
from .provider import SECONDS, ProviderHttp
from .sign_in_file import Issuer

log = structlog.get_logger(__name__)

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""All others are refused: `none`, and HMACs, whose key would be one that everyone knows."""
REFRESH_SECONDS = 300.0
USABLE_SECONDS = 86400.0
"""Known keys count for so long without a newer list."""
PAUSE_SECONDS = 10.0
"""The least time between two fetches, whatever they brought."""
_MOST_KEYS = 100


class _Discovery(Struct):
    issuer: str
    jwks_uri: str


class _KeySet(Struct):
    keys: list[dict[str, Any]]


class IssuerKeys:
    """Belongs to one event loop. Raises SettingsError."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self._http = ProviderHttp(issuer)
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched = self._tried = float("-inf")
        self._fetching: asyncio.Task[None] | None = None

    async def key(self, kid: str) -> jwt.PyJWK:
        """Raises Unauthenticated for a key that the issuer does not list; Unavailable where its keys cannot be had."""
        age = time.monotonic() - self._fetched
        known = self._keys.get(kid) if age < USABLE_SECONDS else None
        if known is None or age > REFRESH_SECONDS:
            self._start_fetch()
        if known is not None:
            return known
        if self._fetching is not None:
            await asyncio.shield(self._fetching)  # others wait for it too
        if time.monotonic() - self._fetched >= USABLE_SECONDS:
            raise Unavailable(
                "the keys of the sign-in provider cannot be fetched", hint="The gateway's log says why"
            )
        if kid not in self._keys:
            raise Unauthenticated("the key is not in the issuer's list")
        return self._keys[kid]

    def _start_fetch(self) -> None:
        if self._fetching is None and time.monotonic() - self._tried >= PAUSE_SECONDS:
            self._fetching = asyncio.create_task(self._fetch(), name=f"keys of {self._issuer.issuer}")
            self._fetching.add_done_callback(self._end_fetch)

    def _end_fetch(self, _: asyncio.Task[None]) -> None:
        self._fetching, self._tried = None, time.monotonic()

    async def _fetch(self) -> None:
        """The issuer's keys, in place of those known; if they cannot be had these stay, and the log says why."""
        try:
            async with asyncio.timeout(SECONDS):
                self._keys = await self._listed()
        except ProviderHttp.ERRORS as error:
            reason = str(error) or type(error).__name__
            log.warning("sign_in_keys_not_fetched", issuer=self._issuer.issuer, error=reason)
        else:
            self._fetched = time.monotonic()

    async def _listed(self) -> dict[str, jwt.PyJWK]:
        """Raises ProviderHttp.ERRORS."""
        uri = self._issuer.jwks_uri or (await self._http.discovered(_Discovery)).jwks_uri
        return _usable((await self._http.document(uri, _KeySet)).keys)


def _usable(listed: list[dict[str, Any]]) -> dict[str, jwt.PyJWK]:
    """Keys by `kid`: those that sign with one of ALGORITHMS. Others are there for other purposes. Raises ValueError."""
    if len(listed) > _MOST_KEYS:
        raise ValueError(f"it lists {len(listed)} keys")
    found = {}
    for each in listed:
        kid = each.get("kid")
        if not isinstance(kid, str) or each.get("use", "sig") != "sig":
            continue
        try:
            key = jwt.PyJWK(each)
        except (jwt.PyJWTError, TypeError, ValueError):
            continue
        if key.algorithm_name in ALGORITHMS:
            found[kid] = key
    if not found:
        raise ValueError("none of its keys can be used")
    return found
