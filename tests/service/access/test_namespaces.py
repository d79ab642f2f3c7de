"""Namespaces: what one team compiles, counts, pins and issues is its own; the owner sees all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from service_parts import (
    ArtifactPool,
    RedisServer,
    Running,
    StartGateway,
    busy_pool,
    client_of,
    compiled,
    follow,
    graph,
    post,
)
from torchrelay.compiler.artifact import container
from waiting import wait_until

ClientOf = Callable[..., httpx2.Client]


@pytest.fixture
def tenant(gateway: Running, http: httpx2.Client) -> Any:
    """A client with a token of a namespace; default role: compile."""
    opened: list[httpx2.Client] = []

    def open_client(namespace: str, *roles: str) -> httpx2.Client:
        body = {"name": "ada", "roles": roles or ["compile"], "namespace": namespace}
        made = http.post("/v1/tokens", json=body)
        assert made.status_code == 201, made.text
        opened.append(client_of(gateway.url, made.json()["token"]))
        return opened[-1]

    yield open_client
    for client in opened:
        client.close()


def _key(answer: httpx2.Response) -> str:
    return answer.headers["X-Torchrelay-Key"]


def test_what_one_namespace_compiled_the_other_compiles_again(gateway: Running, tenant: ClientOf) -> None:
    red, blue = tenant("red"), tenant("blue")
    first = compiled(red, graph())
    key = _key(post(red, graph()))
    for path in ("v1/artifacts", "v1/compiles", "misses", "v1/cache"):
        assert red.get(f"/{path}/{key}").status_code == 200, path
        assert blue.get(f"/{path}/{key}").status_code == 404, path
    with pytest.raises(AssertionError):
        list(follow(blue, key))
    second = compiled(blue, graph())
    assert first != second
    assert gateway.pool.calls == [key, key]
    assert gateway.pool.namespaces == ["red", "blue"]
    assert (post(red, graph()).content, post(blue, graph()).content) == (first, second)
    signed_for = [container.statements(data)[-1].namespace for data in (first, second)]
    assert signed_for == ["red", "blue"]


def test_compiles_of_two_namespaces_do_not_wait_for_each_other(
    start_gateway: StartGateway, settings: dict[str, Any]
) -> None:
    gateway = start_gateway(ArtifactPool(seconds=1.0))
    with gateway.http() as owner:
        for name in ("red", "blue"):
            assert owner.post("/v1/tokens", json=_token(name)).status_code == 201
        with ThreadPoolExecutor(2) as users:
            both = users.map(lambda name: _compile_in(gateway, name), ("red", "blue"))
            assert len(set(both)) == 2
    assert len(gateway.pool.calls) == 2


def _token(namespace: str, *roles: str) -> dict[str, Any]:
    return {"name": "ada", "roles": roles or ["compile"], "namespace": namespace}


def _compile_in(gateway: Running, namespace: str) -> bytes:
    """By the owner, who may name one."""
    with gateway.http(params={"namespace": namespace}) as http:
        key = post(http, graph()).json()["key"]
        *_, (_, stage, data) = follow(http, key)
        assert stage == "done", data
        return http.get(f"/v1/artifacts/{key}").content


def test_two_gateways_share_a_namespace(start_gateway: StartGateway) -> None:
    """One of them has never heard of it before the other one's compile is asked for there."""
    first, second = start_gateway(ArtifactPool(seconds=1.0)), start_gateway(busy_pool())
    with first.http() as owner:
        token = owner.post("/v1/tokens", json=_token("red")).json()["token"]
    with first.http(token) as here, second.http(token) as there:
        key = post(here, graph()).json()["key"]
        assert post(there, graph()).headers["X-Torchrelay-Cache"] == "coalesced"
        *_, (_, stage, _) = follow(there, key)
        assert stage == "done"
        assert post(here, graph()).content == post(there, graph()).content
    assert (first.pool.calls, second.pool.calls) == ([key], [])


def test_a_failure_of_one_namespace_is_not_remembered_for_another(gateway: Running, tenant: ClientOf) -> None:
    from torchrelay.compiler.errors import CompileFailed

    red, blue = tenant("red"), tenant("blue")
    gateway.pool.errors = [CompileFailed("no such lowering")]
    *_, (_, stage, _) = follow(red, post(red, graph()).json()["key"])
    assert stage == "failed"
    assert post(red, graph()).status_code == 422
    compiled(blue, graph())


def test_sizes_that_vary_in_a_script_are_of_one_namespace(tenant: ClientOf) -> None:
    red, blue, path = tenant("red"), tenant("blue"), f"/v1/prefetch/{'1' * 64}"
    red.post("/v1/prefetch", json={"scripts": ["1" * 64], "keys": [], "varied": ["ab" * 32]})
    assert blue.get(path).json()["varied"] == []
    blue.post("/v1/prefetch", json={"scripts": ["1" * 64], "keys": [], "constant": ["ab" * 32]})
    assert red.get(path).json()["varied"] == ["ab" * 32]


def test_counters_are_the_namespaces_own_and_the_owner_sees_their_sum(
    http: httpx2.Client, tenant: ClientOf
) -> None:
    red, blue = tenant("red"), tenant("blue")
    compiled(red, graph())
    compiled(blue, graph())
    post(blue, graph())
    assert red.post("/v1/report", json={"reason": "unsupported", "count": 2}).status_code == 204
    assert blue.post("/v1/report", json={"reason": "unsupported"}).status_code == 204
    ours = red.get("/v1/stats").json()
    assert (ours["requests"], ours["hits"], ours["compiles"], ours["entries"]) == (1, 0, 1, 1)
    assert ours["fallbacks"] == {"unsupported": 2}
    assert list(ours["namespaces"]) == ["red"]
    every = http.get("/v1/stats").json()
    assert (every["requests"], every["hits"], every["compiles"], every["entries"]) == (3, 1, 2, 2)
    assert every["fallbacks"] == {"unsupported": 3}
    assert list(every["namespaces"]) == ["blue", "default", "red"]
    assert http.get("/v1/stats", params={"namespace": "red"}).json() == ours


def test_an_administrator_of_one_namespace_administers_no_other(
    gateway: Running, http: httpx2.Client, tenant: ClientOf
) -> None:
    red, blue = tenant("red", "admin"), tenant("blue", "admin")
    compiled(blue, graph())
    key = _key(post(blue, graph()))
    (of_blue,) = blue.get("/v1/tokens").json()
    assert of_blue["namespace"] == "blue"
    refusals = {
        403: [
            red.get("/v1/stats?namespace=blue"),
            red.get(f"/v1/artifacts/{key}?namespace=blue"),
            red.delete(f"/v1/cache/{key}?namespace=blue"),
            red.post("/v1/tokens", json=_token("blue")),
            red.post("/v1/tokens", json=_token("*")),
            red.post("/v1/tokens?namespace=blue", json=_token("blue")),
        ],
        404: [
            red.delete(f"/v1/cache/{key}"),
            red.put(f"/v1/cache/{key}/pin"),
            red.delete(f"/v1/tokens/{of_blue['id']}"),
        ],
    }
    for status, answers in refusals.items():
        assert [answer.status_code for answer in answers] == [status] * len(answers)
    assert [record["namespace"] for record in red.get("/v1/tokens").json()] == ["red"]
    assert red.get("/v1/cache").json()["entries"] == []
    assert {entry["namespace"] for entry in red.get("/v1/audit").json()["entries"]} == {"red"}
    assert red.post("/v1/tokens", json=_token("red", "read")).json()["record"]["namespace"] == "red"
    assert red.post("/v1/cache/gc").json() == {"evicted": 0, "swept": 0}
    # untouched, and the owner may
    assert post(blue, graph()).status_code == 200
    assert http.put(f"/v1/cache/{key}/pin").status_code == 404
    assert http.put(f"/v1/cache/{key}/pin?namespace=blue").json()["pinned"] is True
    assert blue.get(f"/v1/cache/{key}").json()["entry"]["pinned"] is True


def test_a_token_for_all_namespaces_sees_and_administers_all(gateway: Running, tenant: ClientOf) -> None:
    every, red = tenant("*", "admin"), tenant("red")
    compiled(red, graph())
    assert every.get("/v1/stats").json()["compiles"] == 1
    assert {record["namespace"] for record in every.get("/v1/tokens").json()} == {"*", "red"}
    actions = [entry["action"] for entry in every.get("/v1/audit").json()["entries"]]
    assert actions == ["published", "compile", "token_created", "token_created"]
    compiled(every, graph())
    assert gateway.pool.namespaces == ["red", "default"]


def test_the_audit_log_of_all_is_read_in_pages(http: httpx2.Client, tenant: ClientOf) -> None:
    for name in ("red", "blue", "red", "green", "blue"):
        tenant(name)
    every = http.get("/v1/audit").json()["entries"]
    assert [entry["namespace"] for entry in every] == ["blue", "green", "red", "blue", "red"]
    paged, before = [], ""
    while True:
        page = http.get("/v1/audit", params={"limit": 2, "before": before}).json()
        paged += page["entries"]
        before = page["next"]
        if not before:
            break
    assert paged == every


def test_only_a_namespace_that_exists_can_be_named(http: httpx2.Client) -> None:
    assert http.get("/v1/stats?namespace=default").status_code == 200
    assert http.get("/v1/stats?namespace=nobody").status_code == 404
    for bad in ("Red", "-red", "r" * 64, "a:b", "a/b", "..", "*", "a\nb", "a\n"):
        assert http.get("/v1/stats", params={"namespace": bad}).status_code in (404, 422), bad
        if bad != "*":
            assert http.post("/v1/tokens", json=_token(bad)).status_code in (201, 422), bad
    assert set(http.get("/v1/stats").json()["namespaces"]) <= {"default", "a"}


def test_nothing_of_a_namespace_lies_among_anothers_keys(
    gateway: Running, tenant: ClientOf, redis_server: RedisServer
) -> None:
    """All that serving one team wrote, bar its token's bucket, is under the team's own prefix."""
    red = tenant("red")
    redis = redis_server.client()
    before = set(redis.keys("*"))
    compiled(red, graph())
    post(red, graph(), wait="cache")
    post(red, graph(9), wait="cache")
    red.post("/v1/report", json={"reason": "unsupported"})
    wait_until(lambda: not redis.keys("*:lease:*"), seconds=30)
    written = {name.decode() for name in set(redis.keys("*")) - before}
    elsewhere = {name for name in written if not name.startswith("torchrelay:ns:red:")}
    # a bucket that is full again, milliseconds later, is none
    sums = {
        f"torchrelay:{name}"
        for name in (
            *("namespace_bytes", "bytes", "inline", "described", "described_bytes", "pending_bytes"),
            *("saved", "saved_sizes", "saved_total"),
        )
    }
    assert {name.rpartition(":")[0] for name in elsewhere - sums} <= {"torchrelay:bucket"}
    assert len(written) > 8


def test_large_artifacts_of_a_namespace_lie_in_its_own_folder(
    start_gateway: StartGateway, tmp_path: Any
) -> None:
    gateway = start_gateway(blob_inline_bytes=0)
    with gateway.http() as owner:
        assert owner.post("/v1/tokens", json=_token("red")).status_code == 201
        first = _compile_in(gateway, "red")
        second = compiled(owner, graph())
        folder = gateway.settings.state_dir / "blobs"
        (of_red,) = (path for path in (folder / "namespaces" / "red").rglob("*") if path.is_file())
        (of_all,) = (path for path in (folder / "artifacts").rglob("*") if path.is_file())
        assert (of_red.read_bytes(), of_all.read_bytes()) == (first, second)
        assert owner.post("/v1/cache/gc").json() == {"evicted": 0, "swept": 0}
        assert of_red.exists() and of_all.exists()
