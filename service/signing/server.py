"""The signer's HTTP app: an unsigned artifact and a token in; a signature out, after the artifact was checked.

Two tokens: with one the bearer may have artifacts signed and read which keys there are, with the other change the keys
too. Nothing of a body is unpickled or run; its members are decompressed and hashed piece by piece.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import structlog
from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ...compiler import decoding
from ...compiler.artifact.manifest import MAX_ARTIFACT_BYTES
from ...compiler.artifact.signing import key_text
from ...compiler.errors import (
    ArtifactError,
    Forbidden,
    MalformedRequest,
    Overloaded,
    RelayError,
    SignatureError,
    Unauthenticated,
    Unavailable,
)
from ...compiler.request import codec
from ..base.http_bodies import declared_bytes, read_body, relay_error, reply
from ..base.settings import ServiceSettings
from ..base.tracing import TracedLogs
from .keyring import Keyring
from .messages import Revocation, RingReply, Rotation, SignQuery
from .trusted_keys import Ring

_JSON_BYTES = 4096
_RETRY_AFTER_SECONDS = 1

T = TypeVar("T")

log = structlog.get_logger(__name__)


class SignerTokens(Struct, frozen=True):
    """`admin`: '' if nobody may change the keys through this signer."""

    sign: str
    admin: str = ""

    def check(self, request: Request, *, admin: bool) -> None:
        """Raises Unauthenticated, Forbidden."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        token = given.strip().encode()
        may_sign = hmac.compare_digest(token, self.sign.encode())
        may_change = hmac.compare_digest(token, self.admin.encode()) and self.admin != ""
        if scheme.lower() != "bearer" or not (may_sign or may_change):
            raise Unauthenticated(
                "the request carries no token of this signer",
                hint="Set TORCHRELAY_SERVICE_SIGNER_TOKEN to the signer's own",
            )
        if admin and not may_change:
            raise Forbidden(
                "this token may have artifacts signed, and change no keys",
                hint="Give the gateway TORCHRELAY_SERVICE_SIGNER_ADMIN_TOKEN, as the signer has it",
            )


class _Routes:
    def __init__(self, keyring: Keyring, tokens: SignerTokens, settings: ServiceSettings) -> None:
        self._keyring = keyring
        self._tokens = tokens
        self._memory_bytes = settings.signer_memory_bytes
        self._body_seconds = settings.body_timeout_seconds
        self._bytes_here = 0
        """Bytes of artifacts here, those that are still to arrive included."""
        self._processors = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def livez(self, request: Request) -> Response:
        return Response(status_code=204)

    async def sign(self, request: Request) -> Response:
        self._tokens.check(request, admin=False)
        query = _checked(dict(request.query_params), SignQuery)
        limit = min(MAX_ARTIFACT_BYTES, self._memory_bytes)
        size = declared_bytes(request)
        if size is None:  # it would take all the room while it arrives
            raise MalformedRequest("the artifact comes without a Content-Length")
        with self._room(size if size <= limit else 0):  # one that is too large is not taken in
            data = await read_body(request, limit, seconds=self._body_seconds)
            async with self._processors:
                signature = await self._keyring.in_thread(
                    self._keyring.signature,
                    data,
                    key=query.key,
                    namespace=query.namespace,
                    origin=query.origin,
                )
        log.info(
            "signed", key=query.key, namespace=query.namespace, origin=query.origin, bytes=len(data),
            signer=signature.statement.key_id,
        )  # fmt: skip
        return _json(signature)

    async def ring(self, request: Request) -> Response:
        self._tokens.check(request, admin=False)
        return await self._ring_reply()

    async def rotate(self, request: Request) -> Response:
        rotation = await self._read(request, Rotation)
        return await self._change("key_rotated", self._keyring.rotate, rotation.overlap_seconds)

    async def revoke(self, request: Request) -> Response:
        revocation = await self._read(request, Revocation)
        return await self._change("key_revoked", self._keyring.revoke, revocation.key_id)

    async def disown(self, request: Request) -> Response:
        self._tokens.check(request, admin=True)
        return await self._change("all_disowned", self._keyring.disown)

    async def _read(self, request: Request, type: type[T]) -> T:
        self._tokens.check(request, admin=True)
        body = await read_body(request, _JSON_BYTES, seconds=self._body_seconds)
        try:
            return decoding.from_json(body, type=type)
        except msgspec.MsgspecError as error:
            raise MalformedRequest(str(error)) from None

    async def _change(self, event: str, change: Callable[..., Ring], *arguments: Any) -> Response:
        try:
            ring = await self._keyring.in_thread(change, *arguments)
        except OSError as error:
            raise Unavailable(
                f"the folder of keys cannot be written: {error.strerror}",
                hint="See to the signer's folder of keys, then do it again",
            ) from None
        log.info(event, arguments=arguments, signer=ring.keys[-1].id, serial=ring.serial, epoch=ring.epoch)
        return await self._ring_reply()

    async def _ring_reply(self) -> Response:
        document = self._keyring.document()
        sites = self._keyring.import_trust().sites
        return _json(RingReply(document, [key_text(site) for site in sites.values()]))

    @contextmanager
    def _room(self, size: int) -> Iterator[None]:
        """Raises Overloaded if there is none for so many bytes more."""
        if self._bytes_here + size > self._memory_bytes:
            raise Overloaded(
                f"the signer holds {self._bytes_here} bytes of artifacts, and has no room for {size}",
                hint="Try again in a second",
            )
        self._bytes_here += size
        try:
            yield
        finally:
            self._bytes_here -= size


def create_app(keyring: Keyring, tokens: SignerTokens, settings: ServiceSettings) -> Starlette:
    routes = _Routes(keyring, tokens, settings)
    failures = (RelayError, HTTPException, ClientDisconnect, Exception)
    handlers: dict[Any, Any] = dict.fromkeys(failures, _answer_error)
    return Starlette(
        routes=[
            Route("/livez", routes.livez),
            Route("/v1/sign", routes.sign, methods=["POST"]),
            Route("/v1/ring", routes.ring),
            Route("/v1/rotate", routes.rotate, methods=["POST"]),
            Route("/v1/revoke", routes.revoke, methods=["POST"]),
            Route("/v1/disown", routes.disown, methods=["POST"]),
        ],
        exception_handlers=handlers,
        middleware=[Middleware(TracedLogs)],
    )


def _checked(values: dict[str, str], type: type[T]) -> T:
    try:
        return decoding.convert(values, type=type)
    except msgspec.MsgspecError as error:
        raise MalformedRequest(f"the query is no {type.__name__}: {error}") from None


def _json(message: Any) -> Response:
    return Response(codec.to_json(message), 200, {"Cache-Control": "no-store"}, "application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else None
    if isinstance(error, ArtifactError | SignatureError):
        # elsewhere their cause is at the client; here it came with the body
        status = 422
        log.warning("refused", path=request.url.path, error=error.message)
    answer = relay_error(error, request.url.path)
    return reply(answer, retry_after_seconds=_RETRY_AFTER_SECONDS, status=status)
