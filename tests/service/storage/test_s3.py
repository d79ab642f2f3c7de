"""Large artifacts in S3, in moto's server and in SeaweedFS, and what happens when it is gone or silent."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import obstore
import pytest
from s3_parts import S3, WEED, SeaweedFS
from service_parts import (
    ArtifactPool,
    GatewayProcess,
    Running,
    StartGateway,
    client_of,
    compiled,
    follow,
    graph,
    post,
)
from torchrelay.service.storage import blobs, installation
from waiting import wait_until

LARGE = 100_000
"""Bytes of a member: more than `blob_inline_bytes` below, and incompressible."""
SIZE, CLIENTS = 64 << 20, 6
"""Of a very large artifact, and how many download it at one time."""


NO_SEAWEEDFS = pytest.mark.skipif(
    WEED is None, reason="SeaweedFS is not installed: `make test-all` fetches it"
)


EITHER = pytest.mark.parametrize("s3", ["moto", pytest.param("seaweedfs", marks=NO_SEAWEEDFS)], indirect=True)


@pytest.fixture
def s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3]:
    bucket = f"bucket-{time.monotonic_ns()}"
    seaweedfs = getattr(request, "param", "moto") == "seaweedfs"
    server = SeaweedFS(bucket, tmp_path / "seaweedfs") if seaweedfs else S3(bucket)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield server
    server.stop()


def on_s3(start_gateway: StartGateway, s3: S3, **changes: object) -> Running:
    return start_gateway(
        ArtifactPool(member_bytes=LARGE),
        blob_url=f"s3://{s3.bucket}/team/relay",
        blob_inline_bytes=10_000,
        blob_allow_http=True,
        **{"blob_timeout_seconds": 2, "publish_retry_seconds": 0.5, **changes},
    )


def ending(http: httpx2.Client, body: bytes) -> dict[str, object]:
    """The last event of a compile."""
    *_, (_, stage, data) = follow(http, post(http, body).json()["key"])
    return {"stage": stage, **data}


@EITHER
def test_a_large_artifact_is_kept_in_s3_and_served_by_every_gateway(
    start_gateway: StartGateway, s3: S3
) -> None:
    here, there = on_s3(start_gateway, s3), on_s3(start_gateway, s3)
    there.pool.idle = 0
    with here.http() as http, there.http() as other:
        data = compiled(http, graph())
        (key,) = here.pool.calls
        assert post(other, graph()).content == data
        assert other.get(f"/v1/cache/{key}").json()["entry"]["place"] == "store"
        (name,) = s3.objects()
        assert name.startswith(f"team/relay/artifacts/{key[:2]}/{key}/")
        assert http.delete(f"/v1/cache/{key}").status_code == 200
        assert s3.objects() == []
        assert compiled(other, graph()) != data


@EITHER
def test_an_artifact_in_many_parts_comes_back_whole(start_gateway: StartGateway, s3: S3) -> None:
    running = start_gateway(
        ArtifactPool(member_bytes=13 << 20), blob_url=f"s3://{s3.bucket}", blob_allow_http=True
    )
    with running.http() as http:
        data = compiled(http, graph())
        assert len(data) > 13 << 20
        assert post(http, graph()).content == data
        assert http.delete(f"/v1/cache/{running.pool.calls[0]}").status_code == 200
        assert http.post("/v1/cache", content=data).json()["outcome"] == "imported"
        assert post(http, graph()).content == data


@EITHER
@pytest.mark.parametrize(("memory", "most"), [(0, SIZE), (2 * SIZE, 3 * SIZE)], ids=["streamed", "shared"])
def test_simultaneous_downloads_of_a_large_artifact_do_not_each_hold_it_in_memory(
    start_gateway: StartGateway, s3: S3, settings: dict[str, Any], memory: int, most: int
) -> None:
    """What is streamed is nowhere held as a whole; what a gateway holds it has once, and twice as it arrives."""
    on = {"blob_url": f"s3://{s3.bucket}", "blob_allow_http": True, "memory_cache_bytes": memory}
    publisher = start_gateway(ArtifactPool(member_bytes=SIZE), **on)
    with publisher.http() as http:
        digest = hashlib.sha256(compiled(http, graph())).hexdigest()
    (key,) = publisher.pool.calls
    process = GatewayProcess({**settings, **on}, 0.0, "gateway")
    try:
        before = process.most_memory()
        with process.http() as http, contextlib.ExitStack() as opened:
            path = f"/v1/artifacts/{key}"
            answers = [opened.enter_context(http.stream("GET", path, timeout=60)) for _ in range(CLIENTS)]
            with ThreadPoolExecutor(CLIENTS) as threads:
                assert set(threads.map(_digest, answers)) == {digest}
        assert process.most_memory() - before < most
    finally:
        process.kill()


def _digest(answer: httpx2.Response) -> str:
    hashed = hashlib.sha256()
    for piece in answer.iter_raw():
        hashed.update(piece)
    return hashed.hexdigest()


@EITHER
def test_eviction_and_sweep_leave_nothing_in_s3_that_is_not_offered(
    start_gateway: StartGateway, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = on_s3(start_gateway, s3, cache_limit_bytes=2 * LARGE + LARGE // 2)
    with running.http() as http, client_of(s3.url, None) as direct:
        for size in range(1, 5):
            compiled(http, graph(size))
        assert http.get("/v1/stats").json()["entries"] == 2
        assert len(s3.objects()) == 2
        key = running.pool.calls[-1]
        stray = f"/{s3.bucket}/team/relay/artifacts/{key[:2]}/{key}/{'0' * 64}"
        assert direct.put(stray, content=b"left by a crash").status_code == 200
        assert (
            http.post("/v1/cache/gc").json()["swept"] == 0
        )  # it is young: somebody may be about to publish it
        monkeypatch.setattr(blobs, "ORPHAN_AGE", timedelta(seconds=-60))
        monkeypatch.setattr(installation, "MARKED", timedelta(seconds=-60))
        assert [http.post("/v1/cache/gc").json()["swept"] for _ in range(2)] == [0, 1]
        assert len(s3.objects()) == 2
        assert post(http, graph(4)).status_code == 200


@EITHER
def test_what_vanished_from_s3_or_changed_there_is_compiled_once_more(
    start_gateway: StartGateway, s3: S3
) -> None:
    here, there = on_s3(start_gateway, s3), on_s3(start_gateway, s3)
    there.pool.idle = 0
    bucket = blobs.open_store(f"s3://{s3.bucket}", timeout_seconds=60, allow_http=True)
    with here.http() as http, there.http() as other:
        first = compiled(http, graph())
        obstore.delete(bucket, s3.objects())
        assert post(http, graph()).content == first  # from memory
        second = compiled(other, graph())
        assert second != first
        (name,) = s3.objects()
        obstore.put(bucket, name, second[:-1] + bytes([second[-1] ^ 1]))
        third = compiled(http, graph())
        assert third not in (first, second)
        assert post(http, graph()).content == third
        assert len(here.pool.calls) == 3


def test_s3_that_is_gone_is_a_typed_answer_and_what_it_held_is_served_when_it_is_back(
    start_gateway: StartGateway, s3: S3
) -> None:
    running = on_s3(start_gateway, s3, memory_cache_bytes=0)
    with running.http() as http:
        data = compiled(http, graph(1))
        s3.stop()
        answer = post(http, graph(1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert len(answer.json()["error"]["message"].splitlines()) == 1
        failed = ending(http, graph(2))
        assert (failed["stage"], failed["error"]["code"]) == ("failed", "unavailable")  # type: ignore[index]
        assert http.post("/v1/cache/gc").status_code == 503
        s3.start()
        assert post(http, graph(1)).content == data
        assert compiled(http, graph(2))
        assert len(running.pool.calls) == 3
        assert "quarantined" not in http.get("/v1/audit").text


def _tries(http: httpx2.Client, key: str) -> Iterator[str]:
    """What the events say of each try to publish that failed."""
    for _, stage, data in follow(http, key):
        if stage == "publish" and data["detail"]:
            yield data["detail"]


def test_a_finished_compile_waits_for_s3_and_everyone_who_waits_gets_it(
    start_gateway: StartGateway, s3: S3
) -> None:
    changes = {"publish_retry_seconds": 60, "lease_seconds": 1, "blob_timeout_seconds": 1}
    here, there = on_s3(start_gateway, s3, **changes), on_s3(start_gateway, s3, **changes)
    with here.http() as http, there.http() as other, ThreadPoolExecutor() as threads:
        s3.stop()
        waiting = [threads.submit(compiled, each, graph()) for each in (http, other, http)]
        key = post(http, graph()).json()["key"]
        for detail in itertools.islice(_tries(http, key), 3):  # longer than a lease lives by itself
            assert "blob store" in detail and len(detail.splitlines()) == 1
        s3.start()
        data = {each.result(60) for each in waiting}
        assert data == {post(other, graph()).content}
        stages = [(stage, told["detail"]) for _, stage, told in follow(other, key)]
        assert stages[-1][0] == "done" and "the lease was taken again" not in dict(stages).values()
        assert here.pool.calls + there.pool.calls == [key]


def test_s3_that_stays_gone_costs_a_typed_answer_and_one_more_compile(
    start_gateway: StartGateway, s3: S3
) -> None:
    running = on_s3(start_gateway, s3, publish_retry_seconds=2)
    with running.http() as http:
        s3.stop()
        key = post(http, graph()).json()["key"]
        assert len(list(_tries(http, key))) >= 2
        *_, (_, stage, data) = follow(http, key)
        assert (stage, data["error"]["code"]) == ("failed", "unavailable")
        assert data["error"]["hint"]
        s3.start()
        assert compiled(http, graph())
        assert running.pool.calls == [key, key]


def test_what_was_compiled_is_published_though_nobody_waits_any_more(
    start_gateway: StartGateway, s3: S3
) -> None:
    running = on_s3(start_gateway, s3, publish_retry_seconds=60, abandon_seconds=0.5, lease_seconds=0.6)
    with running.http() as http:
        s3.stop()
        key = running.queue_for_job(graph())
        next(_tries(http, key))
        time.sleep(2)  # several times what it takes to be abandoned
        s3.start()
        wait_until(lambda: http.get(f"/v1/artifacts/{key}").status_code == 200, seconds=30)
        assert running.pool.calls == [key]


def test_a_refusal_that_waiting_does_not_mend_is_told_at_once(start_gateway: StartGateway, s3: S3) -> None:
    running = on_s3(start_gateway, s3, publish_retry_seconds=600)
    with running.http() as http, client_of(s3.url, None) as direct:
        store = blobs.open_store(f"s3://{s3.bucket}/team/relay", timeout_seconds=2, allow_http=True)
        wait_until(lambda: direct.delete(f"/{s3.bucket}").status_code == 409, seconds=20)  # there is its id
        obstore.delete(store, "installation")
        assert direct.delete(f"/{s3.bucket}").status_code == 204
        key = post(http, graph()).json()["key"]
        *others, (_, stage, data) = follow(http, key)
        assert (stage, data["error"]["code"]) == ("failed", "unavailable")
        assert [told["detail"] for _, stage, told in others if stage == "publish"] == [""]


def test_s3_that_says_nothing_is_given_up_in_time(
    start_gateway: StartGateway, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        running = on_s3(start_gateway, s3)
        with running.http() as http:
            began = time.monotonic()
            failed = ending(http, graph())
            assert (failed["stage"], failed["error"]["code"]) == ("failed", "unavailable")  # type: ignore[index]
            assert (
                time.monotonic() - began < 60
            )  # a hundred times what two seconds are, and no retry_timeout of 180
            assert http.get("/livez").status_code == 200
