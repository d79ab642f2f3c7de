"""The public keys of one issuer: from its discovery document (OpenID Connect Discovery 1.0) and its key set (RFC 7517).

Known keys are looked up without a request. They are fetched again in the background now and then, and at once for an
unknown one, but never more often than every few seconds, whoever sends tokens. While the issuer cannot be reached,
known keys count for a day.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import jwt
import msgspec
import structlog
from msgspec import Struct

from ....compiler import decoding
from ....compiler.errors import Unauthenticated, Unavailable
from .sign_in_file import Issuer, is_loopback

log = structlog.get_logger(__name__)

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""All others are refused: `none`, and HMACs, whose key would be one that everyone knows."""
REFRESH_SECONDS = 300.0
USABLE_SECONDS = 86400.0
"""Known keys count for so long without a newer list."""
PAUSE_SECONDS = 10.0
"""The least time between two fetches, whatever they brought."""
_FETCH_SECONDS = 5.0
_DOCUMENT_BYTES = 256 << 10
_MOST_KEYS = 100
T = TypeVar("T")


class _Discovery(Struct):
    issuer: str
    jwks_uri: str


class _KeySet(Struct):
    keys: list[dict[str, Any]]


class IssuerKeys:
    """Belongs to one event loop. Raises SettingsError."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self._certificates = issuer.certificates()
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
            async with asyncio.timeout(_FETCH_SECONDS):
                self._keys = await self._listed()
        except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError, ValueError, OSError) as error:
            reason = str(error) or type(error).__name__
            log.warning("sign_in_keys_not_fetched", issuer=self._issuer.issuer, error=reason)
        else:
            self._fetched = time.monotonic()

    async def _listed(self) -> dict[str, jwt.PyJWK]:
        """Raises httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError."""
        loopback = is_loopback(urlsplit(self._issuer.issuer).hostname or "")
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self._issuer.token_file:
            headers["Authorization"] = f"Bearer {Path(self._issuer.token_file).read_text('ascii').strip()}"
        async with httpx2.AsyncClient(
            verify=self._certificates, headers=headers, trust_env=not loopback, follow_redirects=False
        ) as http:
            uri = self._issuer.jwks_uri or await self._discovered(http)
            return _usable((await _get(http, uri, _KeySet)).keys)

    async def _discovered(self, http: httpx2.AsyncClient) -> str:
        issuer = self._issuer
        url = f"{issuer.issuer.rstrip('/')}/.well-known/openid-configuration"
        found = await _get(http, url, _Discovery)
        if found.issuer != issuer.issuer:
            raise ValueError(f"{url} is the document of {found.issuer[:200]!r}")
        if not issuer.allows(found.jwks_uri):
            raise ValueError(f"{url} has its keys at {found.jwks_uri[:200]!r}, which is no https:// address")
        return found.jwks_uri


async def _get(http: httpx2.AsyncClient, url: str, type: type[T]) -> T:
    """A JSON document. Raises httpx2.HTTPError, ValueError."""
    body = bytearray()
    async with http.stream("GET", url) as response:
        if response.status_code != 200:
            raise ValueError(f"{url} answers HTTP {response.status_code}")
        async for part in response.aiter_raw():
            body += part
            if len(body) > _DOCUMENT_BYTES:
                raise ValueError(f"{url} has more than {_DOCUMENT_BYTES} bytes")
    try:
        return decoding.from_json(bytes(body), type=type)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{url}: {error}") from None


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
