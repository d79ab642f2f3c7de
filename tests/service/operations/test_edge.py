"""An nginx with deploy/edge/nginx.conf before real gateways: what it answers itself, for whom, and for how long."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from edge_parts import NGINX, Edge
from service_parts import (
    TOKEN,
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
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.artifact import container
from torchrelay.compiler.errors import NotCached
from torchrelay.compiler.request import codec, key
from waiting import wait_until

pytestmark = pytest.mark.skipif(NGINX is None, reason="no nginx")

ConnectClient = Callable[[Edge | Running], GatewayClient]
StartEdge = Callable[..., Edge]


@pytest.fixture
def start_edge(tmp_path: Path) -> Iterator[StartEdge]:
    started: list[Edge] = []

    def start(*ports: int, **changes: str) -> Edge:
        started.append(Edge(tmp_path / f"edge{len(started)}", *ports, **changes))
        return started[-1]

    yield start
    for edge in started:
        edge.stop()


@pytest.fixture
def edge(start_edge: StartEdge, gateway: Running) -> Edge:
    return start_edge(gateway.port)


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[ConnectClient]:
    """A client that has had an answer."""
    with contextlib.ExitStack() as opened:

        def connected(to: Edge | Running) -> GatewayClient:
            settings = ClientSettings(url=to.url, token=TOKEN, cache_dir=tmp_path / "cache")
            client = opened.enter_context(GatewayClient(settings))
            client.info()
            return client

        yield connected


def _published(gateway: Running, size: int = 8) -> tuple[str, bytes]:
    """A new artifact's path and bytes."""
    with gateway.http() as http:
        data = compiled(http, graph(size))
    return f"/v1/artifacts/{gateway.pool.calls[-1]}", data


def _answered(gateway: Running, route: str = "/v1/artifacts/{key}") -> dict[str, int]:
    """By status: what the gateway itself has answered to who asked for artifacts, or for compiles."""
    with gateway.http(None) as http:
        text = http.get("/metrics").text
    line = rf'torchrelay_http_requests_total{{method="\w+",route="{route}",status="(\d+)"}} (\d+)'
    return {status: int(count) for status, count in re.findall(line, text)}


def _token(gateway: Running, namespace: str = "") -> dict[str, Any]:
    with gateway.http() as http:
        made = http.post("/v1/tokens", json={"name": "a", "roles": ["compile"], "namespace": namespace})
    assert made.status_code == 201, made.text
    found: dict[str, Any] = made.json()
    return found


def test_a_hit_is_answered_without_a_gateway_and_is_the_artifact(gateway: Running, edge: Edge) -> None:
    path, data = _published(gateway)
    with client_of(edge.url, TOKEN) as http:
        direct = http.get(path)
        before = _answered(gateway)
        again = http.get(path)
    assert _answered(gateway) == before
    assert direct.content == again.content == data
    assert (direct.headers["X-Torchrelay-Edge"], again.headers["X-Torchrelay-Edge"]) == ("MISS", "HIT")


def test_ranks_that_ask_together_are_one_request_of_a_gateway(
    gateway: Running, start_edge: StartEdge
) -> None:
    edge = start_edge(gateway.port, lock_timeout="20s")  # on a busy machine too
    path, data = _published(gateway)
    before = _answered(gateway)["200"]

    def fetch(_: int) -> bytes:
        with client_of(edge.url, TOKEN) as http:
            return http.get(path).content

    with ThreadPoolExecutor(40) as ranks:
        assert set(ranks.map(fetch, range(40))) == {data}
    assert _answered(gateway)["200"] == before + 1


def test_after_its_seconds_a_gateway_is_asked_and_sends_no_bytes_again(gateway: Running, edge: Edge) -> None:
    path, data = _published(gateway)
    with client_of(edge.url, TOKEN) as http:
        assert http.get(path).content == data
        wait_until(lambda: http.get(path).headers["X-Torchrelay-Edge"] == "REVALIDATED", seconds=20)
        assert http.get(path).content == data
    assert _answered(gateway) == {"200": 2, "304": 1}


def test_a_revoked_token_and_a_deleted_artifact_are_served_only_for_its_seconds(
    gateway: Running, edge: Edge
) -> None:
    path, data = _published(gateway)
    token = _token(gateway)
    with (
        gateway.http() as owner,
        client_of(edge.url, TOKEN) as other,
        client_of(edge.url, token["token"]) as http,
    ):
        assert http.get(path).content == other.get(path).content == data
        assert owner.delete(f"/v1/tokens/{token['record']['id']}").is_success
        wait_until(lambda: http.get(path).status_code == 401, seconds=20)
        assert http.get(path).status_code == 401
        assert other.get(path).content == data
        assert owner.delete(f"/v1/cache/{path.rpartition('/')[2]}").is_success
        wait_until(lambda: other.get(path).status_code == 404, seconds=20)
        refused = other.get(path)
        assert (refused.status_code, refused.headers["Cache-Control"]) == (404, "no-store")
    _, again = _published(gateway)
    with client_of(edge.url, TOKEN) as http:
        assert http.get(path).content == again, "the 404 was stored"


def test_nobody_gets_what_another_token_has_put_there(gateway: Running, edge: Edge) -> None:
    path, data = _published(gateway)
    red = _token(gateway, "red")["token"]
    with client_of(edge.url, TOKEN) as http:
        assert [http.get(path).content for _ in range(2)] == [data, data]
        assert http.get(f"{path}?namespace=red").status_code == 404
    refused = []
    for token in (red, None, f"{TOKEN} {path}", TOKEN.upper()):
        with client_of(edge.url, token) as http:
            refused.append(http.get(path).status_code)
    assert refused == [404, 401, 401, 401]
    with client_of(edge.url, None) as http:  # no two tokens, of which nginx reads one and a gateway the other
        both = [("Authorization", f"Bearer {token}") for token in (TOKEN, red)]
        assert [http.get(path, headers=tokens).status_code for tokens in (both, both[::-1])] == [400, 400]
    with client_of(edge.url, red) as http:
        other = compiled(http, graph())
        assert other != data and http.get(path).content == other
    with client_of(edge.url, TOKEN) as http:
        assert http.get(path).content == data


def test_a_client_behind_an_edge_asks_by_key_first_and_sends_the_graph_for_a_miss(
    gateway: Running, edge: Edge, connect: ConnectClient
) -> None:
    bodies = [graph(size) for size in (8, 9, 10)]
    known, missed, unknown = (key.key_of(codec.unpack_request(body)) for body in bodies)
    _, data = _published(gateway, 8)
    posts = _answered(gateway, "/v1/compile")
    client = connect(edge)
    hits = [client.submit(bodies[0], known, cache_only=False, deadline=60).result() for _ in range(2)]
    assert [(hit.data, hit.hit, hit.coalesced) for hit in hits] == [(data, True, False)] * 2
    assert _answered(gateway, "/v1/compile") == posts
    miss = client.submit(bodies[1], missed, cache_only=False, deadline=60).result()
    assert not miss.hit and container.read_manifest(miss.data).key == missed
    with pytest.raises(NotCached):
        client.submit(bodies[2], unknown, cache_only=True, deadline=60).result()
    assert client.explain(unknown).asked is not None
    stats = client.stats()  # the second hit was the edge's own
    assert (stats["requests"], stats["hits"], stats["misses"]) == (4, 1, 3)


def test_a_client_of_a_gateway_sends_the_graph_at_once(gateway: Running, connect: ConnectClient) -> None:
    _, data = _published(gateway)
    fetched = _answered(gateway)
    body = graph()
    name = key.key_of(codec.unpack_request(body))
    found = connect(gateway).submit(body, name, cache_only=False, deadline=60).result()
    assert found.data == data and _answered(gateway) == fetched


def test_progress_passes_unbuffered_and_a_compile_ends_as_without_it(
    start_gateway: StartGateway, start_edge: StartEdge
) -> None:
    pool = ArtifactPool(seconds=1.0)
    pool.talks = 5
    gateway = start_gateway(pool)
    edge = start_edge(gateway.port)
    with client_of(edge.url, TOKEN) as http:
        name = post(http, graph()).json()["key"]
        stages = []
        for _, stage, _ in follow(http, name):
            if stage == "autotune":
                stages.append(gateway.pool.compiling)
        assert 1 in stages, "all events came after the compile had ended"
        assert http.get(f"/v1/artifacts/{name}").headers["X-Torchrelay-Edge"] == "MISS"


def test_a_killed_gateways_requests_go_to_the_others(
    start_process: Callable[[float], GatewayProcess], start_edge: StartEdge
) -> None:
    first, second = start_process(0.0), start_process(0.0)
    edge = start_edge(first.port, second.port)
    with client_of(edge.url, TOKEN) as http:
        data = compiled(http, graph())
        first.kill()
        for _ in range(6):
            assert post(http, graph()).content == data
