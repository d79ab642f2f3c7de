"""Who may do what: a bearer token in, a Grant out. Redis holds digests of tokens, never tokens.

Tokens are 256 random bits, so a plain SHA-256 cannot be searched, and finding a digest by its value tells an
attacker nothing about a token. The token from the settings is kept as a digest in memory and works without
Redis.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

import msgspec
from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from msgspec import Struct
from redis.asyncio import Redis

from ..compiler.errors import Forbidden, Unauthenticated
from .scripts import Keys
from .settings import ServiceSettings

Role = Literal["read", "compile", "admin"]
"""read: artifacts, progress, stats. compile: ask for compiles. admin: everything."""

_DOMAIN = b"torchrelay token v1\0"
_TOKEN_LIMIT = 512

_bearer = HTTPBearer(auto_error=False, description="A token of `torchrelay up`, or one that an admin issued")


class Grant(Struct, frozen=True):
    """Whose token it is, and what it opens."""

    name: str
    roles: frozenset[Role]

    def allows(self, role: Role) -> bool:
        return role in self.roles or "admin" in self.roles


def new_token() -> str:
    return secrets.token_urlsafe(32)


def digest(token: str) -> str:
    return hashlib.sha256(_DOMAIN + token.encode()).hexdigest()


class Tokens:
    def __init__(self, redis: Redis, keys: Keys, settings: ServiceSettings) -> None:
        self._redis = redis
        self._keys = keys
        self._owner = digest(settings.token.get_secret_value()) if settings.token else None

    async def check(self, token: str) -> Grant:
        """Raises Unauthenticated, or RedisError for a token that only Redis knows."""
        if len(token) > _TOKEN_LIMIT:
            raise Unauthenticated("the token is too long to be one")
        found = digest(token)
        if self._owner is not None and hmac.compare_digest(found, self._owner):
            return Grant("owner", frozenset({"admin"}))
        record = await self._redis.hget(self._keys.tokens, found)
        if record is None:
            raise Unauthenticated("the token is not known")
        return msgspec.json.decode(record, type=Grant)

    async def issue(self, name: str, roles: frozenset[Role]) -> str:
        """A new token for `name`; it is shown once and cannot be read back."""
        token = new_token()
        await self._redis.hset(self._keys.tokens, digest(token), msgspec.json.encode(Grant(name, roles)))
        return token

    async def revoke(self, token: str) -> bool:
        return bool(await self._redis.hdel(self._keys.tokens, digest(token)))


def requires(role: Role) -> Callable[..., Awaitable[Grant]]:
    """A FastAPI dependency: the caller's Grant, which allows `role`. Raises Unauthenticated or Forbidden."""

    async def check(
        request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]
    ) -> Grant:
        if credentials is None:
            raise Unauthenticated("the request carries no bearer token")
        tokens: Tokens = request.app.state.gateway.tokens
        grant = await tokens.check(credentials.credentials)
        if not grant.allows(role):
            raise Forbidden(f"the token of {grant.name!r} lacks the role {role!r}")
        return grant

    return check
