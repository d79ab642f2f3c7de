"""Artifacts of one site at another: exported to a file, verified and imported where the signer is trusted."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from command_line import torchrelay, user
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from service_parts import (
    NEEDS,
    TOKEN,
    ArtifactPool,
    RedisServer,
    Running,
    StartGateway,
    busy_pool,
    compiled,
    follow,
    graph,
    post,
    queue_and_take,
)
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.signing import Trust, key_text, read_key
from torchrelay.compiler.errors import SettingsError
from torchrelay.service.cache.artifact_cache import Offer
from torchrelay.service.compile.single_flight import Lease
from torchrelay.service.parts.shared import SharedParts, TenantParts
from torchrelay.service.signing import key_files
from waiting import wait_until

Site = Callable[..., Running]


@pytest.fixture
def other_site(start_gateway: StartGateway, tmp_path: Path) -> Site:
    """A second installation on the same Redis server: its own prefix, state folder and signing key."""

    def start(pool: ArtifactPool | None = None, **changes: object) -> Running:
        state = str(tmp_path / "other")
        return start_gateway(pool, redis_prefix="other:", state_dir=state, **changes)

    return start


def _own_key(http: httpx2.Client) -> str:
    key: str = http.get("/v1/info").json()["public_keys"][0]
    return key


def _origin(data: bytes) -> str:
    """Whose signature the site believed that serves this artifact."""
    return container.statements(data)[-1].origin


def _import(http: httpx2.Client, data: bytes) -> httpx2.Response:
    return http.post("/v1/cache", content=data)


@pytest.mark.parametrize("inline", [0, 1 << 20], ids=["store", "redis"])
def test_a_trusted_sites_artifact_is_a_hit_under_both_signatures(
    inline: int, gateway: Running, http: httpx2.Client, other_site: Site
) -> None:
    data = compiled(http, graph())
    (key,) = gateway.pool.calls
    there = other_site(trusted_public_keys=_own_key(http), blob_inline_bytes=inline)
    with there.http() as other:
        assert _import(other, data).json() == {"key": key, "outcome": "imported"}
        served = post(other, graph()).content
        assert _import(other, data).json() == {"key": key, "outcome": "exists"}
        assert post(other, graph()).content == served
        (own,) = other.get("/v1/info").json()["public_keys"]
        theirs = http.get("/v1/info").json()["key_ids"]
        for text, origin in ((own, theirs[0]), (_own_key(http), "")):
            opened = container.verify(served, Trust.of([read_key(text)], namespace="default"), key=key)
            assert opened.statement.origin == origin
            assert opened.manifest == container.read_manifest(data)
        stats = other.get("/v1/stats").json()
        assert (stats["compiles"], stats["entries"], stats["bytes_stored"]) == (0, 1, len(served))
        (entry,) = other.get("/v1/audit").json()["entries"]
        assert (entry["action"], entry["name"], entry["key"]) == ("imported", "owner", key)
        assert [entry["signer"]] == http.get("/v1/info").json()["key_ids"]
        assert other.get(f"/misses/{key}").status_code in (200, 404)
    assert there.pool.calls == []


def test_what_no_trusted_key_signed_is_refused(
    gateway: Running, http: httpx2.Client, other_site: Site
) -> None:
    data = compiled(http, graph())
    stranger = key_text(Ed25519PrivateKey.generate().public_key())
    with other_site(trusted_public_keys=stranger).http() as other:
        answer = _import(other, data)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "malformed")
        assert "TRUSTED_PUBLIC_KEYS" in answer.json()["error"]["hint"]
        assert post(other, graph(), wait="cache").status_code == 404


def test_no_changed_byte_gets_in(gateway: Running, http: httpx2.Client, other_site: Site) -> None:
    data = compiled(http, graph())
    with other_site(trusted_public_keys=_own_key(http)).http() as other:
        for position in (0, 9, 40, len(data) // 2, len(data) - 1):
            forged = bytearray(data)
            forged[position] ^= 1
            assert _import(other, bytes(forged)).status_code == 422
        for wrong in (b"", b"TRLYART1", data[:-1], data + b"\0"):
            assert _import(other, wrong).status_code == 422
        assert other.get("/v1/stats").json()["entries"] == 0
        assert other.get("/v1/audit").json()["entries"] == []


def test_a_signer_that_is_no_longer_trusted_is_no_longer_served(
    gateway: Running, http: httpx2.Client, other_site: Site
) -> None:
    data = compiled(http, graph())
    trusting = other_site(trusted_public_keys=_own_key(http))
    with trusting.http() as other:
        assert _import(other, data).status_code == 200
    trusting.stop()
    with other_site().http() as other:
        assert compiled(other, graph()) != data


def test_an_import_answers_those_who_wait_for_the_compile(
    gateway: Running, http: httpx2.Client, other_site: Site
) -> None:
    data = compiled(http, graph())
    slow = other_site(ArtifactPool(seconds=60), trusted_public_keys=_own_key(http))
    with slow.http() as other:
        key = post(other, graph()).json()["key"]
        wait_until(lambda: slow.pool.calls == [key], seconds=30)
        assert _import(other, data).json()["outcome"] == "imported"
        *_, (_, stage, _) = follow(other, key)
        assert stage == "done"
        assert _origin(post(other, graph()).content) == container.statements(data)[0].key_id
        wait_until(lambda: slow.pool.cancelled == [key], seconds=30)


def test_an_import_over_the_limit_is_refused(start_gateway: StartGateway) -> None:
    with start_gateway(import_bytes=1000).http() as http:
        answer = _import(http, b"x" * 1001)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "limit_exceeded")


@pytest.mark.parametrize("keys", ["x", "QUJD", "a" * 43 + "=,x"])
def test_a_trusted_key_that_is_none_stops_the_start(keys: str) -> None:
    with pytest.raises(SettingsError, match="trusted_public_keys"):
        key_files.read_trusted_keys(keys)


def test_publishing_again_after_a_lost_answer_leaves_the_blob_for_good(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    gateway = start_gateway(busy_pool())

    async def publish_twice() -> None:
        shared = SharedParts(gateway.settings)
        tenant = TenantParts(shared, "default")
        granted = await queue_and_take(tenant.leases, "a" * 64, b"body", NEEDS)
        assert isinstance(granted, Lease)
        offer = Offer("a" * 64, hashlib.sha256(b"data").hexdigest(), b"data", 1.0, {})
        assert await tenant.cache.publish(granted.token, offer)
        assert await tenant.cache.publish(granted.token, offer)
        await shared.redis.aclose()

    asyncio.run(publish_twice())
    redis = redis_server.client()
    (blob,) = redis.keys("torchrelay:blob:*")
    assert redis.ttl(blob) == -1


def test_a_blob_that_is_offered_again_is_not_deleted(start_gateway: StartGateway) -> None:
    """An eviction was under way, and the same artifact was imported meanwhile."""
    running = start_gateway(blob_inline_bytes=0)
    with running.http() as http:
        data = compiled(http, graph())
        (key,) = running.pool.calls

        async def late_deletion() -> None:
            shared = SharedParts(running.settings)
            await TenantParts(shared, "default").blobs.discard(key, hashlib.sha256(data).hexdigest())
            await shared.redis.aclose()

        asyncio.run(late_deletion())
        assert post(http, graph()).content == data


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    def run(site: Running, *arguments: str) -> subprocess.CompletedProcess[str]:
        return torchrelay("cache", *arguments, environment=user(tmp_path, site.url, TOKEN))

    return run


def test_one_file_carries_the_cache_to_a_site_that_trusts_this_one(
    command: Command, gateway: Running, http: httpx2.Client, other_site: Site, tmp_path: Path
) -> None:
    made = {size: compiled(http, graph(size)) for size in (1, 2, 3)}
    every, one = tmp_path / "every.tar", tmp_path / "one.tar"
    assert command(gateway, "export", str(every)).stdout == f"exported 3 artifacts to {every}\n"
    assert command(gateway, "export", str(one), gateway.pool.calls[0]).returncode == 0
    assert command(gateway, "export", str(one)).returncode == 2  # never overwrites
    stranger = other_site()
    refused = command(stranger, "import", str(every))
    assert (refused.returncode, "3 refused" in refused.stdout) == (1, True)
    stranger.stop()
    friend = other_site(trusted_public_keys=_own_key(http))
    assert "imported 1 artifacts; 0 were there already" in command(friend, "import", str(one)).stdout
    done = command(friend, "import", str(every))
    assert (done.returncode, done.stderr) == (0, "")
    assert "imported 2 artifacts; 1 were there already, 0 refused" in done.stdout
    with friend.http() as other:
        for size, data in made.items():
            assert _origin(post(other, graph(size)).content) == container.statements(data)[0].key_id
    kept = tmp_path / "kept.tar"
    assert command(gateway, "export", str(kept)).returncode == 0
    assert command(gateway, "rm", gateway.pool.calls[0]).returncode == 0
    assert "imported 1 artifacts; 2 were there already" in command(gateway, "import", str(kept)).stdout
    assert post(http, graph(1)).content == made[1]  # signed here and for here: as it was


def test_a_file_that_is_no_export_is_one_line(command: Command, gateway: Running, tmp_path: Path) -> None:
    text, foreign = tmp_path / "text", tmp_path / "foreign.tar"
    text.write_bytes(b"not a tar" * 100)
    with tarfile.open(foreign, "w") as archive:
        archive.add(text, arcname="../../escape")
    for path in (text, foreign, tmp_path / "absent"):
        done = command(gateway, "import", str(path))
        assert done.returncode in (1, 2)
        assert len(done.stderr.splitlines()) == 1
