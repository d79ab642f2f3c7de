"""Many clients at once, large artifacts, large uploads: how often the blob store is read, how much memory it takes."""

from __future__ import annotations

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import obstore
import pytest
from service_parts import (
    ArtifactPool,
    GatewayProcess,
    RedisServer,
    Running,
    StartGateway,
    busy_pool,
    compiled,
    graph,
    post,
)
from signer_parts import SIGN_TOKEN, SignerProcess
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.signing import Trust, read_key
from waiting import wait_until

CLIENTS = 50
MIB = 1 << 20
BYTES = "application/octet-stream"
StartProcess = Callable[[float], GatewayProcess]


def _blob(running: Running) -> Path:
    folder = running.settings.state_dir / "blobs"
    (path,) = (path for path in folder.rglob("*") if path.is_file() and path.name != "installation")
    return path


def _at_once(count: int, fetch: Callable[[], bytes]) -> set[str]:
    """Digests of what simultaneous clients get."""
    with ThreadPoolExecutor(count) as threads:
        got = [threads.submit(lambda: hashlib.sha256(fetch()).hexdigest()) for _ in range(count)]
        return {each.result(120) for each in got}


def _publish(start_gateway: StartGateway, member_bytes: int) -> tuple[str, str, int]:
    """Key, digest and size of an artifact in the store, which other gateways have not in memory."""
    running = start_gateway(ArtifactPool(member_bytes=member_bytes))
    with running.http() as http:
        data = compiled(http, graph())
    return running.pool.calls[0], hashlib.sha256(data).hexdigest(), len(data)


def test_clients_that_ask_at_one_time_cost_one_read_of_the_store(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, digest, _ = _publish(start_gateway, 8 * MIB)
    fresh, reads = start_gateway(), []
    get = obstore.get_async

    def counted(store: Any, path: str, **options: Any) -> object:
        reads.extend([path] if path.endswith(digest) else [])
        return get(store, path, **options)

    monkeypatch.setattr(obstore, "get_async", counted)
    with fresh.http() as http:
        assert _at_once(CLIENTS, lambda: post(http, graph()).content) == {digest}
        assert http.get("/v1/stats").json()["hits"] == CLIENTS
    assert len(reads) == 1


@pytest.mark.parametrize("memory", [0, 64 * MIB], ids=["streamed", "from memory"])
def test_who_has_an_artifact_is_told_so_without_a_read_of_the_store(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    key, digest, size = _publish(start_gateway, 8 * MIB)
    fresh, reads = start_gateway(memory_cache_bytes=memory), []
    for name in ("get_async", "get_range_async"):
        read = getattr(obstore, name)
        monkeypatch.setattr(obstore, name, lambda *a, _read=read, **o: reads.append(a) or _read(*a, **o))
    with fresh.http() as http:
        path = f"/v1/artifacts/{key}"
        first = http.get(path)
        tag, count = first.headers["ETag"], len(reads)
        assert (first.status_code, len(first.content), tag.startswith(f'"{digest}')) == (200, size, True)
        assert first.headers["Cache-Control"].startswith("private, max-age=5")
        assert "Authorization" in first.headers["Vary"]
        for tags in (tag, f'"other", W/{tag}'):
            again = http.get(path, headers={"If-None-Match": tags})
            assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)
        assert count > 0 and len(reads) == count
        stats = http.get("/v1/stats").json()
        assert stats["fetches"] >= 3  # with that of the process that has compiled it
        assert stats["bytes_served"] < 3 * size
        assert http.get(path, headers={"If-None-Match": f'"{digest}"'}).status_code == 200


def test_a_new_list_of_keys_is_another_answer_and_a_disowned_artifact_none(
    start_gateway: StartGateway,
) -> None:
    """Or a cache would go on to say the old list's serial, by which clients notice a new one."""
    gateway = start_gateway()
    with gateway.http() as http:
        compiled(http, graph())
        path = f"/v1/artifacts/{gateway.pool.calls[0]}"
        first = http.get(path).headers
        assert http.post("/v1/keys", json={"overlap_seconds": 3600}).is_success
        second = http.get(path, headers={"If-None-Match": first["ETag"]})
        assert second.status_code == 200
        assert int(second.headers["X-Torchrelay-Trust"]) > int(first["X-Torchrelay-Trust"])
        assert http.get(path, headers={"If-None-Match": second.headers["ETag"]}).status_code == 304
        assert http.post("/v1/keys/epoch").is_success
        serial = http.get("/livez").headers["X-Torchrelay-Trust"]
        tag = re.sub(r"\.\d+", f".{serial}", second.headers["ETag"])
        assert http.get(path, headers={"If-None-Match": tag}).status_code == 404


def test_redis_sends_a_small_artifact_once(start_gateway: StartGateway, redis_server: RedisServer) -> None:
    gateway, size = start_gateway(ArtifactPool(member_bytes=200_000)), 200_000
    redis = redis_server.client()
    with gateway.http() as http:
        compiled(http, graph())
        fresh = start_gateway(busy_pool())
        sent = redis.info("stats")["total_net_output_bytes"]
        with fresh.http() as other:
            answers = {post(other, graph()).content for _ in range(5)}
        assert [len(each) > size for each in answers] == [True]
        assert size < redis.info("stats")["total_net_output_bytes"] - sent < 2 * size
        # another process writes what it has counted within a second
        wait_until(lambda: http.get("/v1/stats").json()["hits"] >= 5, seconds=10)


def test_slow_clients_of_one_artifact_share_its_bytes(
    start_gateway: StartGateway, start_process: StartProcess
) -> None:
    key, digest, size = _publish(start_gateway, 8 * MIB)
    process = start_process(0)
    before = process.most_memory()
    with process.http() as http, contextlib.ExitStack() as opened:
        answers = [
            opened.enter_context(http.stream("GET", f"/v1/artifacts/{key}", timeout=60))
            for _ in range(CLIENTS)
        ]
        assert {answer.headers["Content-Length"] for answer in answers} == {str(size)}
        assert process.most_memory() - before < 5 * size
        assert {hashlib.sha256(answer.read()).hexdigest() for answer in answers} == {digest}
    assert process.most_memory() - before < 5 * size


def test_an_artifact_larger_than_the_memory_for_artifacts_is_streamed_and_shown_from_its_head(
    start_gateway: StartGateway, start_process: StartProcess
) -> None:
    key, digest, size = _publish(start_gateway, 80 * MIB)
    process = start_process(0)
    before = process.most_memory()
    with process.http() as http:
        assert http.get(f"/v1/cache/{key}").json()["manifest"]["key"] == key
        for _ in range(2):
            with http.stream("GET", f"/v1/artifacts/{key}") as answer:
                assert answer.headers["Content-Length"] == str(size)
                hashed = hashlib.sha256()
                for piece in answer.iter_raw():
                    hashed.update(piece)
            assert hashed.hexdigest() == digest
    assert process.most_memory() - before < 30 * MIB


@pytest.mark.parametrize("known", [True, False], ids=["served before", "not served before"])
@pytest.mark.parametrize(
    "harm", ["lost", "emptied", "cut short", "damaged at the end", "damaged in its head"]
)
def test_no_client_gets_the_whole_of_a_damaged_stream_and_the_next_one_a_new_compile(
    harm: str, known: bool, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(ArtifactPool(member_bytes=MIB), memory_cache_bytes=0)
    asked = gateway if known else start_gateway(busy_pool(), memory_cache_bytes=0)
    with gateway.http() as http, asked.http() as other:
        good = compiled(http, graph())
        (key,) = gateway.pool.calls
        path, middle = _blob(gateway), container.head_bytes(good) // 2
        match harm:
            case "lost":
                path.unlink()
            case "emptied":
                path.write_bytes(b"")
            case "cut short":
                path.write_bytes(good[:-1])
            case "damaged at the end":
                path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
            case _:
                path.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
        with contextlib.suppress(httpx2.RemoteProtocolError):  # what breaks off
            assert other.get(f"/v1/artifacts/{key}").status_code == 404
        assert other.get(f"/v1/artifacts/{key}").status_code == 404
        fresh = compiled(http, graph())
        assert fresh != good
        assert post(http, graph()).content == fresh
        assert http.get("/v1/stats").json()["damaged"] == 1


def test_a_stranger_s_artifact_is_not_streamed(start_gateway: StartGateway, tmp_path: Path) -> None:
    there = {"state_dir": str(tmp_path / "other"), "redis_prefix": "other:"}
    foreign = start_gateway(ArtifactPool(member_bytes=MIB), **there)
    with foreign.http() as http:
        data = compiled(http, graph())
    here = start_gateway(**there, keys_dir=str(tmp_path / "keys"), memory_cache_bytes=0)
    with here.http() as http:
        assert http.get(f"/v1/artifacts/{container.read_manifest(data).key}").status_code == 404


def test_a_large_upload_is_on_disk_and_not_in_memory(
    start_process: StartProcess, settings: dict[str, Any], tmp_path: Path
) -> None:
    data = bytes(256 * MIB)  # 30 to 50 MiB are taken for any size, in parts that are on their way
    process = start_process(0)
    before = process.most_memory()
    with process.http() as http:
        stored = http.post("/v1/trains/packages", content=data, headers={"Content-Type": BYTES}, timeout=60)
    digest = hashlib.sha256(data).hexdigest()
    assert (stored.status_code, stored.json()) == (200, {"package": digest, "bytes": len(data)})
    path = Path(settings["state_dir"]) / "blobs" / "trains" / "default" / "packages" / digest
    assert path.read_bytes() == data
    assert process.most_memory() - before < len(data) // 2


@pytest.mark.parametrize("signer", [False, True], ids=["own keys", "a signer"])
def test_a_large_import_is_on_disk_and_not_in_memory(
    start_gateway: StartGateway, settings: dict[str, Any], tmp_path: Path, signer: bool
) -> None:
    running = start_gateway(ArtifactPool(member_bytes=64 * MIB))
    with running.http() as http:
        data = compiled(http, graph())
        (key,) = running.pool.calls
        own = http.get("/v1/info").json()["public_keys"][0]
    trusting = {"trusted_public_keys": own}
    there = {**settings, "redis_prefix": "other:", "state_dir": str(tmp_path / "other")}
    with contextlib.ExitStack() as stack:
        if signer:
            (tmp_path / "signer").mkdir()
            apart = SignerProcess(tmp_path / "signer", **trusting).start()
            stack.callback(apart.kill)
            trusting = {"signer_url": apart.url, "signer_token": SIGN_TOKEN}
        process = GatewayProcess({**there, **trusting}, 0.0)
        stack.callback(process.kill)
        http = stack.enter_context(process.http())
        before = process.most_memory()
        imported = http.post("/v1/cache", content=data, headers={"Content-Type": BYTES}, timeout=60)
        assert imported.json() == {"key": key, "outcome": "imported"}
        assert process.most_memory() - before < 3 * len(data) // 4
        served = http.get(f"/v1/artifacts/{key}", timeout=60).content
        public = read_key(http.get("/v1/info").json()["public_keys"][0])
    opened = container.verify(served, Trust.of([public], namespace="default"), key=key)
    assert opened.statement.origin == container.statements(data)[-1].key_id
    assert served[container.head_bytes(served) :] == data[container.head_bytes(data) :]


@pytest.mark.parametrize("harm", ["full", "gone"])
def test_an_upload_that_no_disk_takes_is_refused(
    harm: str, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gateway = start_gateway()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    if harm == "full":
        monkeypatch.setattr(tempfile, "TemporaryFile", partial(Path("/dev/full").open, "w+b"))
    with gateway.http() as http:
        refused = http.post("/v1/trains/packages", content=bytes(4 * MIB), headers={"Content-Type": BYTES})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert str(tmp_path / "gone") in refused.json()["error"]["message"]
        assert http.get("/v1/stats").status_code == 200
