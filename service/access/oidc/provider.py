"""HTTP with one sign-in provider: its discovery document (OpenID Connect Discovery 1.0), and what that names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, TypeVar
from urllib.parse import urlsplit

import httpx2
import msgspec
from msgspec import Struct

from ....compiler import decoding
from .sign_in_file import Issuer, is_loopback

SECONDS = 5.0
"""For one document, and for all that a fetch of keys needs."""
_DOCUMENT_BYTES = 256 << 10
T = TypeVar("T", bound=Struct)


class ProviderHttp:
    """Follows no redirects. Its methods raise ERRORS. The constructor raises SettingsError."""

    ERRORS: ClassVar = (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError, ValueError, OSError)

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self._certificates = issuer.certificates()

    async def discovered(self, type: type[T]) -> T:
        """The discovery document; addresses in it are such as the issuer allows."""
        url = f"{self._issuer.issuer.rstrip('/')}/.well-known/openid-configuration"
        found = await self.document(url, type)
        for name in found.__struct_fields__:
            value = getattr(found, name)
            if name == "issuer" and value != self._issuer.issuer:
                raise ValueError(f"{url} is the document of {value[:200]!r}")
            if name != "issuer" and not self._issuer.allows(value):
                raise ValueError(f"{url} has {name} at {value[:200]!r}, which is no https:// address")
        return found

    async def document(self, url: str, type: type[T], form: Mapping[str, str] | None = None) -> T:
        """A JSON document; form: it is asked for by POST."""
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self._issuer.token_file and form is None:
            headers["Authorization"] = f"Bearer {Path(self._issuer.token_file).read_text('ascii').strip()}"
        loopback = is_loopback(urlsplit(self._issuer.issuer).hostname or "")
        body = bytearray()
        async with (
            asyncio.timeout(SECONDS),
            httpx2.AsyncClient(verify=self._certificates, headers=headers, trust_env=not loopback) as http,
            http.stream("GET" if form is None else "POST", url, data=form) as response,
        ):
            if response.status_code != 200:
                raise _status_error(url, response)
            async for part in response.aiter_raw():
                body += part
                if len(body) > _DOCUMENT_BYTES:
                    raise ValueError(f"{url} has more than {_DOCUMENT_BYTES} bytes")
        try:
            return decoding.from_json(bytes(body), type=type)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{url}: {error}") from None


def _status_error(url: str, response: httpx2.Response) -> httpx2.HTTPStatusError:
    return httpx2.HTTPStatusError(
        f"{url} answers HTTP {response.status_code}", request=response.request, response=response
    )
