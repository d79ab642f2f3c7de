"""The primary of a Redis that fails over: sentinels, or the nodes of a Redis Cluster, name it at each new connection.

URLs, where `rediss` stands for TLS to all of them:

- `redis+sentinel://[user:password@]host[:26379],host2/service[/db]`. User and password are those of Redis; those of the
  sentinels, if they have any, are `?sentinel_username=` and `?sentinel_password=`.
- `redis+cluster://[user:password@]host[:6379],host2`. All keys of an installation are in one shard: the prefix of their
  names must have a hash tag.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisError

from ....compiler.errors import SettingsError
from .fair_pool import FairConnectionPool

_KINDS = {"sentinel": 26379, "cluster": 6379}
"""The kinds of URLs, and their default ports."""
_HASH_TAG = re.compile(r"[^{]*\{[^}]+\}")


class PrimaryConnectionPool(FairConnectionPool, SentinelConnectionPool):
    """Connections to the primary as it is when each is made. Those to a former one are replaced."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:  # the end
            for server in self.sentinel_manager.sentinels:
                await server.aclose()


class ClusterNodes(Sentinel):
    """The nodes of a Redis Cluster, where sentinels are expected. The service's name is the prefix of all keys."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """The node that has these keys. Raises MasterNotFoundError."""
        slot, problems = key_slot(service_name.encode()), []
        for _ in range(len(self.sentinels)):
            node: Any = self.sentinels[0]
            self.sentinels.append(self.sentinels.pop(0))  # what one says may be old: the next is asked next
            try:
                ranges = await node.execute_command("CLUSTER SLOTS")
            except RedisError as error:
                problems.append(str(error))
                continue
            for first, last, (host, port, *_), *_ in ranges:
                if first <= slot <= last:  # a node may not know its own name
                    own = node.connection_pool.connection_kwargs["host"]
                    return (host.decode() if isinstance(host, bytes) else host) or own, port
            problems.append(f"no node has slot {slot}")
        raise MasterNotFoundError(
            f"no node of the Redis Cluster has this installation's keys: {'; '.join(problems)}"
        )


def names_primary(url: str) -> bool:
    """Whether it is one of the URLs above."""
    return _kind(url) in _KINDS


def names_replicas(url: str) -> bool:
    return _kind(url) == "sentinel"


def _kind(url: str) -> str:
    return urlsplit(url).scheme.partition("+")[2]


def primary_pool(url: str, *, prefix: str, **options: Any) -> PrimaryConnectionPool:
    """prefix: of all keys. options: of the pool; with `is_master=False` it is one of replicas. Raises SettingsError."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    credentials, _, servers = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    try:
        given = dict(parse_url(f"{scheme}://{credentials}@host/{database}?{parts.query}"))
        named = [urlsplit(f"//{server}") for server in servers.split(",")]
        addresses = [(server.hostname or "", server.port or _KINDS[kind]) for server in named]
    except ValueError as error:
        raise SettingsError(f"the URL of Redis cannot be read: {error}", hint=_hint(kind)) from None
    if not all(host for host, _ in addresses) or bool(service) != (kind == "sentinel"):
        raise SettingsError(f"the URL of Redis is no {parts.scheme}:// URL", hint=_hint(kind))
    if kind == "cluster" and not _HASH_TAG.match(prefix):
        raise SettingsError(
            f"the keys of an installation on a Redis Cluster need a hash tag, and their prefix {prefix!r} has none",
            hint="TORCHRELAY_SERVICE_REDIS_PREFIX={torchrelay}:",
        )
    encrypted = given.pop("connection_class", None) is SSLConnection
    given.pop("host")
    own = {name: given.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    theirs = own if kind == "sentinel" else {name: given.get(name) for name in own}
    manager_class: type[Any] = Sentinel if kind == "sentinel" else ClusterNodes
    manager = manager_class(
        addresses,
        sentinel_kwargs={
            **theirs,
            **{name: value for name, value in {**options, **given}.items() if name.startswith("ssl_")},
            "ssl": encrypted,
            **{name: options[name] for name in ("socket_timeout", "socket_connect_timeout")},
            "retry": Retry(NoBackoff(), 0),  # the next one is asked instead
        },
    )
    return PrimaryConnectionPool(
        service_name=service or prefix,
        sentinel_manager=manager,
        connection_class=SentinelManagedSSLConnection if encrypted else SentinelManagedConnection,
        **{**options, **given},
    )


def _hint(kind: str) -> str:
    return {
        "sentinel": "redis+sentinel://user:password@host:26379,host2:26379/service/0",
        "cluster": "redis+cluster://user:password@host:6379,host2:6379",
    }[kind]
