"""Many clients at once, and large artifacts: how often a gateway reads the blob store, and how much memory it takes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import obstore
import pytest
from conftest import StartGateway
from service_parts import ArtifactPool, GatewayProcess, Running, busy_pool, compiled, graph, post
from torchrelay.compiler.artifact import container

CLIENTS = 50
MIB = 1 << 20
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

    def counted(store: object, path: str, **options: object) -> object:
        reads.extend([path] if path.endswith(digest) else [])
        return get(store, path, **options)

    monkeypatch.setattr(obstore, "get_async", counted)
    with fresh.http() as http:
        assert _at_once(CLIENTS, lambda: post(http, graph()).content) == {digest}
        assert http.get("/v1/stats").json()["hits"] == CLIENTS
    assert len(reads) == 1


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
