"""Stage 4: tokens and what each may do, with its rate limit. Redis holds digests of tokens, never tokens.

Tokens are 256 random bits, so a plain SHA-256 cannot be reversed by search, and the time of a look-up by digest reveals
nothing about a token. The token from the settings is a digest in memory and works without Redis.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct
from redis.asyncio.client import Pipeline

from ...compiler import decoding
from ...compiler.api.admin import Role, TokenRecord
from ...compiler.api.sign_in import SignInReply
from ...compiler.errors import Forbidden, RateLimited, Unauthenticated
from ..base.async_tasks import Recent
from ..base.settings import ServiceSettings
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import DEFAULT_NAMESPACE, Keys
from ..storage.redis.scripts import Scripts
from .audit import AuditEvent, AuditLog
from .namespaces import EVERY, Namespaces
from .unknown_tokens import UnknownTokens

if TYPE_CHECKING:
    from .oidc.code_flow import CodeFlow
    from .oidc.jwt_tokens import JwtTokens

OWNER_ID = "owner"
_DOMAIN = b"torchrelay token v1\0"
_ISSUED = re.compile("[A-Za-z0-9_-]{43}")
_ID_BYTES = 6
_REMEMBERED_SECONDS = 30 * 86400
"""A token that expired or was revoked is still listed, and refused with the reason, for this long."""
_LISTED_SECONDS = 2.0
_PAGE = 300
_RENEW = "Ask an administrator for a new token, then run `torchrelay login`"
_DELETED = "The service's owner can make it anew: `torchrelay namespace set`"
_ELSEWHERE = "Ask an administrator of that namespace for a token"


class Grant(Struct, frozen=True):
    """What a checked token allows, in which namespace; `name` and public `id` of the token.

    `everywhere`: the token is for all namespaces, and the request has named none; it acts in `namespace`.
    """

    name: str
    roles: frozenset[Role]
    id: str
    namespace: str = DEFAULT_NAMESPACE
    everywhere: bool = False
    source: bool = False
    """Whether it may send source that runs at compile time. No role includes this."""
    programs: bool = False
    """Whether it may give programs to the namespace's clients. No role includes this."""
    expires: int | None = None

    def within(self, namespace: str) -> Grant:
        """The same grant in a namespace that the request names. Raises Forbidden."""
        if self.everywhere or namespace == self.namespace:
            return msgspec.structs.replace(self, namespace=namespace, everywhere=False)
        raise Forbidden(f"the token of {self.name!r} is for another namespace", hint=_ELSEWHERE)

    def allows(self, role: Role) -> bool:
        """An administrator may do everything but train: a training job is its holder's code on the nodes."""
        if role in self.roles or (role == "read" and self.roles):
            return True
        return "admin" in self.roles and role != "train"


class IssuedToken(Struct, frozen=True):
    """A new token. `secret` is what clients send; it is stored nowhere else."""

    secret: str
    record: TokenRecord


def rank_token_name(job: str) -> str:
    """The name of the tokens of a training job's ranks. Only an administrator could give it to another token."""
    return f"train job {job}"


def new_token() -> str:
    return secrets.token_urlsafe(32)


def digest(token: str) -> str:
    return hashlib.sha256(_DOMAIN + token.encode()).hexdigest()


class Tokens:
    def __init__(
        self, redis: RedisClient, keys: Keys, scripts: Scripts, audit: AuditLog, settings: ServiceSettings
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts
        self._rate = settings.token_requests_per_second
        self._burst_seconds = settings.token_burst_seconds
        self._audit = audit
        self._namespaces = Namespaces(redis, keys, scripts)
        self._unknown = UnknownTokens()
        self._listed: Recent[set[str]] = Recent(_LISTED_SECONDS)
        self._jwts: JwtTokens | None = None
        if settings.sign_in_file is not None:
            from .oidc.jwt_tokens import JwtTokens  # most services need nothing of it

            self._jwts = JwtTokens(settings.sign_in_file)
        self._owner = digest(settings.token.get_secret_value()) if settings.token else None
        self._owner_grant = Grant(
            "owner",
            frozenset({"admin", "train"}),
            OWNER_ID,
            everywhere=True,
            source=bool(settings.token_allow_source),
            programs=bool(settings.token_allow_programs),
        )

    def is_owner(self, token: str) -> bool:
        """Whether it is the token of the settings; asks nobody."""
        return self._owner is not None and hmac.compare_digest(digest(token), self._owner)

    async def check(self, token: str, address: str) -> Grant:
        """address: the client's. Raises Unauthenticated, RateLimited, RedisError for all tokens but the owner's; for
        one that another issuer signed also Forbidden, Unavailable."""
        if self.is_owner(token):
            return self._owner_grant
        found = digest(token)
        if _ISSUED.fullmatch(token):
            async with self._unknown.look_up(address, found, lambda: self._is_listed(found)):
                return await self._admit(found)
        if (jwts := self._jwts) is not None and jwts.looks_like_one(token):
            async with self._unknown.look_up(address, found, lambda: jwts.holds(token)):
                record = await jwts.check(token)
                return await self._admit(record.id, msgspec.json.encode(record))
        raise Unauthenticated("the token is not known")

    async def _is_listed(self, digest: str) -> bool:
        """Whether an issued token that has not ended has this digest, or had a moment ago. Raises RedisError."""

        async def read() -> set[str]:
            now = time.time()
            return {field for field, record in await self._all() if record.over(now) is None}

        return digest in await self._listed.get(read)

    def sign_in(self) -> SignInReply:
        """Where people get tokens that are accepted here, other than from an administrator."""
        return SignInReply([]) if self._jwts is None else self._jwts.sign_in()

    @property
    def code_flows(self) -> Sequence[CodeFlow]:
        """How a browser gets one of these tokens."""
        return () if self._jwts is None else self._jwts.code_flows

    async def _admit(self, identity: str, record_json: bytes = b"") -> Grant:
        """Counts one request. identity: an issued token's digest; or the id of a record that Redis does not have, with
        that record. Raises what `check` does."""
        admitted = await self._scripts.authenticate(
            keys=[
                self._keys.tokens,
                self._keys.bucket(identity),
                self._keys.namespaces,
                self._keys.deleted,
            ],
            args=[
                *(identity, self._rate, self._burst_seconds, self._keys.installation, DEFAULT_NAMESPACE),
                record_json,
            ],
        )
        if admitted is None:
            raise Unauthenticated("the token is not known")
        record = decoding.from_json(admitted[0], type=TokenRecord)
        now = time.time()
        if record.revoked is not None:  # whatever this gateway's clock says
            raise Unauthenticated(f"the token {record.id} was revoked on {_day(record.revoked)}", hint=_RENEW)
        if record.expires is not None and record.expires <= now:
            raise Unauthenticated(f"the token {record.id} expired on {_day(record.expires)}", hint=_RENEW)
        if admitted[1] < 0:
            raise Forbidden(f"the namespace {record.namespace} was deleted", hint=_DELETED)
        if admitted[1]:
            rate = self._rate if record.rate is None else record.rate
            raise RateLimited(
                f"the token {record.id} may ask {rate:g} times a second, and asked more often",
                retry_after=-(-admitted[1] // 1000),
            )
        everywhere = record.namespace == EVERY
        home = DEFAULT_NAMESPACE if everywhere else record.namespace
        return Grant(
            record.name,
            record.roles,
            record.id,
            home,
            everywhere,
            source=record.allow_source,
            programs=record.allow_programs,
            expires=record.expires,
        )

    async def issue(
        self,
        name: str,
        roles: frozenset[Role],
        *,
        by: Grant,
        namespace: str = DEFAULT_NAMESPACE,
        rate: float | None = None,
        lifetime_seconds: int | None = None,
        allow_source: bool = False,
        allow_programs: bool = False,
    ) -> IssuedToken:
        """A new token for `name`; it is shown once and cannot be read back. None: it does not expire."""
        secret, now = new_token(), int(time.time())
        record = TokenRecord(
            id=secrets.token_hex(_ID_BYTES),
            name=name,
            roles=roles,
            namespace=namespace,
            created=now,
            rate=rate,
            expires=None if lifetime_seconds is None else now + lifetime_seconds,
            allow_source=allow_source,
            allow_programs=allow_programs,
        )
        await self._store(digest(secret), record, "token_created", by)
        return IssuedToken(secret, record)

    async def restore(self, issued: IssuedToken, *, lifetime_seconds: int) -> None:
        """Writes a token again that Redis has lost; one that it knows stays as it is."""
        record = msgspec.structs.replace(issued.record, expires=int(time.time()) + lifetime_seconds)
        field = digest(issued.secret)
        async with self._redis.pipeline(transaction=True) as transaction:
            transaction.hsetnx(self._keys.tokens, field, msgspec.json.encode(record))
            self._add_to_named(field, record, within=transaction)
            await transaction.execute()

    async def extend(self, name: str, *, namespace: str, lifetime_seconds: int) -> None:
        """Tokens of this name that expire, and were not revoked, expire so many seconds from now."""
        expires = int(time.time()) + lifetime_seconds
        fields = await self._named(name, namespace)

        async def write(transaction: Pipeline) -> None:
            found = await transaction.hmget(self._keys.tokens, fields)
            transaction.multi()  # type: ignore[no-untyped-call]  # of redis-py
            for field, data in zip(fields, found, strict=True):
                record = decoding.from_json(data, type=TokenRecord) if data else None
                if record is not None and record.revoked is None and record.expires is not None:
                    record = msgspec.structs.replace(record, expires=expires)
                    transaction.hset(self._keys.tokens, field, msgspec.json.encode(record))
                    self._add_to_named(field, record, within=transaction)

        if fields:
            await self._redis.transaction(write, self._keys.tokens)

    async def revoke_named(self, name: str, *, by: Grant) -> None:
        """Revokes the tokens of this name that expire, in the namespace of `by`. Raises RedisError."""
        for field in await self._named(name, by.namespace):
            data = await self._redis.hget(self._keys.tokens, field)
            if data is not None:
                await self._revoke(field, decoding.from_json(data, type=TokenRecord), by)

    async def records(self, *, by: Grant) -> list[TokenRecord]:
        """Every issued token that `by` administers, oldest first; the settings' own is not among them."""
        records = [record for _, record in await self._all() if _administers(by, record)]
        return sorted(records, key=lambda record: (record.created, record.id))

    async def revoke(self, token_id: str, *, by: Grant) -> TokenRecord | None:
        """Revokes a token and returns its record; None for an id that is unknown or another namespace's."""
        for field, record in await self._all():
            if record.id == token_id and _administers(by, record):
                return await self._revoke(field, record, by)
        return None

    async def revoke_all(self, namespace: str, *, by: Grant) -> None:
        """Revokes every token of a namespace. Raises RedisError."""
        for field, record in await self._all():
            if record.namespace == namespace:
                await self._revoke(field, record, by)

    async def _revoke(self, field: str, record: TokenRecord, by: Grant) -> TokenRecord:
        """The record of the token, which is revoked now if it was not before."""
        if record.revoked is None:
            record = msgspec.structs.replace(record, revoked=int(time.time()))
            await self._store(field, record, "token_revoked", by)
        return record

    async def _named(self, name: str, namespace: str) -> list[str]:
        """Digests of the tokens of this name that expire."""
        return [
            field.decode()
            for field in await self._redis.smembers(self._keys.of(namespace).tokens_named(name))
        ]

    def _add_to_named(self, field: str, record: TokenRecord, *, within: Pipeline) -> None:
        if record.expires is not None and record.namespace != EVERY:
            named = self._keys.of(record.namespace).tokens_named(record.name)
            within.sadd(named, field)
            within.pexpire(named, max(1, record.expires + _REMEMBERED_SECONDS - int(time.time())) * 1000)

    async def _store(
        self, field: str, record: TokenRecord, action: Literal["token_created", "token_revoked"], by: Grant
    ) -> None:
        roles = ", ".join(record.permissions)
        audit = self._audit.of(DEFAULT_NAMESPACE if record.namespace == EVERY else record.namespace)
        event = AuditEvent(
            action=action, name=by.name, token=by.id, detail=f"{record.id} for {record.name}: {roles}"
        )
        async with self._redis.pipeline(transaction=True) as transaction:
            transaction.hset(self._keys.tokens, field, msgspec.json.encode(record))
            if action == "token_created" and record.namespace != EVERY:
                self._namespaces.add(record.namespace, within=transaction)
            self._add_to_named(field, record, within=transaction)
            await audit.append(event, within=transaction)
            await transaction.execute()

    async def _all(self) -> list[tuple[str, TokenRecord]]:
        """Some hundreds at a time, so that Redis answers others meanwhile."""
        found = {
            field.decode(): decoding.from_json(data, type=TokenRecord)
            async for field, data in self._redis.hscan_iter(self._keys.tokens, count=_PAGE)
        }
        return list(found.items())

    async def forget_old(self) -> None:
        """Drops the records of tokens that were over long ago. Raises RedisError."""
        before = time.time() - _REMEMBERED_SECONDS
        old = [field for field, record in await self._all() if record.over(before) is not None]
        if old:
            await self._redis.hdel(self._keys.tokens, *old)


def _administers(grant: Grant, record: TokenRecord) -> bool:
    return grant.everywhere or record.namespace == grant.namespace


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
