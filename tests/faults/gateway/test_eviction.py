"""Eviction by quota and by the whole limit, over several namespaces, step by step against a model."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path

import pytest
from pydantic import SecretStr
from request_parts import manifest_of
from service_parts import NEEDS, TOKEN, RedisServer, queue_and_take
from torchrelay.compiler.artifact import container
from torchrelay.service.access.quotas import QuotaChange
from torchrelay.service.access.tokens import OWNER_ID, Grant
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.cache.artifact_cache import Offer
from torchrelay.service.compile.single_flight import Lease
from torchrelay.service.gateway.parts import GatewayParts, GatewayTenant

KEYS = [f"{n:x}" * 64 for n in range(1, 7)]
NAMES = ("default", "red", "blue")
SIZES = (500, 2000, 6000)
INLINE = 4000
"""The first two sizes lie in Redis, the last in the folder."""
LIMIT = 30_000
STEPS = 250
OWNER = Grant("owner", frozenset({"admin"}), OWNER_ID, everywhere=True)


class Model:
    """What should be offered: (namespace, key) to bytes, the least recently used first; and what is pinned."""

    def __init__(self) -> None:
        self.offered: dict[tuple[str, str], bytes] = {}
        self.pinned: set[tuple[str, str]] = set()
        self.quota = dict.fromkeys(NAMES, 0)

    def use(self, entry: tuple[str, str]) -> None:
        self.offered[entry] = self.offered.pop(entry)

    def trim(self, namespace: str) -> None:
        if self.quota[namespace]:
            self._evict({namespace}, self.quota[namespace], namespace)
        self._evict(set(NAMES), LIMIT, namespace)

    def _evict(self, names: set[str], limit: int, asking: str) -> None:
        """The least recently used of whoever holds the most, but never what the caller's namespace used last."""
        while True:
            held = {
                name: sum(len(data) for entry, data in self.offered.items() if entry[0] == name)
                for name in names
            }
            loose = [entry for entry in self.offered if entry[0] in names and entry not in self.pinned]
            newest = next((entry for entry in reversed(loose) if entry[0] == asking), None)
            loose = [entry for entry in loose if entry != newest]
            if sum(held.values()) <= limit or not loose:
                return
            whose = max({name for name, _ in loose}, key=lambda name: (held[name], name != "default", name))
            del self.offered[next(entry for entry in loose if entry[0] == whose)]


def signed(gateway: GatewayParts, namespace: str, key: str, size: int) -> bytes:
    files = {"code.py": random.randbytes(size)}
    packed = container.pack(manifest_of(key, files), files)
    return gateway.keyring.sign(packed, key=key, namespace=namespace)


async def compile_one(tenant: GatewayTenant, key: str, data: bytes) -> bool:
    """Whether it was there to be compiled."""
    granted = await queue_and_take(tenant.leases, key, b"body", NEEDS)
    if not isinstance(granted, Lease):
        return False
    offer = Offer(key, hashlib.sha256(data).hexdigest(), data, 1.0, {})
    assert await tenant.cache.publish(granted.token, offer)
    return True


async def check(gateway: GatewayParts, server: RedisServer, model: Model, folder: Path) -> None:
    """What the index offers is what the model says, byte for byte, and nothing else is kept."""
    raw = server.client()
    inline = 0
    for name in NAMES:
        tenant = await gateway.tenants.of(name)
        entries, following = await tenant.cache_admin.page(cursor=0, limit=100)
        expected = {key: data for (whose, key), data in model.offered.items() if whose == name}
        assert following == 0 and {entry.key for entry in entries} == set(expected)
        stored = raw.zscore(tenant.keys.namespace_bytes, tenant.keys.lru) or 0
        assert stored == sum(map(len, expected.values()))
        assert {entry.key for entry in entries if entry.pinned} == {k for n, k in model.pinned if n == name}
        for entry in entries:
            data = expected[entry.key]
            assert entry.digest == hashlib.sha256(data).hexdigest()
            if entry.place == "redis":
                assert raw.get(tenant.keys.blob(entry.digest)) == data
                inline += entry.bytes
    assert int(raw.get("torchrelay:inline") or 0) == inline
    files = {
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (folder / "blobs").rglob("*")
        if path.is_file() and path.name != "installation"
    }
    assert files == {
        hashlib.sha256(data).hexdigest() for data in model.offered.values() if len(data) > INLINE
    }
    raw.close()


async def simulate(server: RedisServer, folder: Path, seed: int) -> int:
    """Random steps; how many entries were evicted on the way."""
    dice, model = random.Random(seed), Model()
    settings = ServiceSettings(
        redis_url=server.url,
        state_dir=folder,
        token=SecretStr(TOKEN),
        blob_inline_bytes=INLINE,
        cache_limit_bytes=LIMIT,
    )
    gateway, evicted = GatewayParts(settings), 0
    for name in NAMES:
        await gateway.quotas.change(name, QuotaChange(bytes=0), by=OWNER)
    for _ in range(STEPS):
        await asyncio.sleep(0.002)  # last use is kept in milliseconds
        name, key = dice.choice(NAMES), dice.choice(KEYS)
        tenant, entry = await gateway.tenants.of(name), (name, key)
        match dice.choice(
            ["compile"] * 4 + ["lookup"] * 3 + ["trim"] * 2 + ["pin", "unpin", "remove", "quota"]
        ):
            case "compile":
                data = signed(gateway, name, key, dice.choice(SIZES))
                assert await compile_one(tenant, key, data) is (entry not in model.offered)
                model.offered.setdefault(entry, data)
            case "lookup":
                found = await tenant.cache.lookup(key, "hit")
                assert (found.data if found else None) == model.offered.get(entry)
                if entry in model.offered:
                    model.use(entry)
            case "trim":
                before = len(model.offered)
                model.trim(name)
                assert await tenant.cache.trim() == before - len(model.offered)
                evicted += before - len(model.offered)
            case "pin" | "unpin" as way if entry in model.offered:
                await tenant.cache_admin.pin(key, pinned=way == "pin", by=OWNER)
                (model.pinned.add if way == "pin" else model.pinned.discard)(entry)
            case "remove" if entry in model.offered:
                await tenant.cache_admin.remove(key, by=OWNER)
                del model.offered[entry]
                model.pinned.discard(entry)
            case "quota":
                model.quota[name] = dice.choice([0, 3000, 9000])
                await gateway.quotas.change(name, QuotaChange(bytes=model.quota[name]), by=OWNER)
        await check(gateway, server, model, folder)
    await gateway.redis.aclose()
    return evicted


@pytest.mark.parametrize("seed", [1, 2])
def test_namespaces_evict_what_the_model_says(redis_server: RedisServer, tmp_path: Path, seed: int) -> None:
    assert asyncio.run(simulate(redis_server, tmp_path, seed)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 40))
def test_namespaces_evict_what_the_model_says_at_length(
    redis_server: RedisServer, tmp_path: Path, seed: int
) -> None:
    assert asyncio.run(simulate(redis_server, tmp_path, seed)) > 10
