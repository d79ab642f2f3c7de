"""Jobs without a store of their own: the first process to tell decides; one namespace's jobs are not another's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import msgspec
import pytest
from service_parts import TOKEN, RedisServer, Running
from torchrelay.clients.artifacts.ranks.agreement import GatewayAgreement, refusal
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.api import compiles
from torchrelay.compiler.errors import JobUnreachable, NoWorker
from torchrelay.service.cache import rank_agreement

JOB, KEY = "0" * 64, "ab" * 32


@pytest.fixture
def client(gateway: Running) -> Iterator[GatewayClient]:
    with GatewayClient(
        ClientSettings(url=gateway.url, token=TOKEN, cache_dir=Path("/nonexistent"), connect_timeout=1.0)
    ) as client:
        yield client


def test_of_many_that_tell_at_once_one_decides(client: GatewayClient) -> None:
    told = [compiles.AgreedOutcome(digest=f"{n:064x}") for n in range(16)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda verdict: client.decide(JOB, KEY, verdict), told))
    assert len(set(found)) == 1 and found[0] in told
    assert client.decide("1" * 64, KEY, told[3]) == told[3]
    assert client.decide(JOB, "cd" * 32, told[5]) == told[5]


def test_a_process_that_could_falls_back_for_the_reason_of_the_first_that_could_not(
    client: GatewayClient,
) -> None:
    def fail() -> bytes:
        raise NoWorker("none here")

    first = GatewayAgreement(client, JOB).agree(KEY, 10, fail)
    second = GatewayAgreement(client, JOB).agree(KEY, 10, lambda: b"an artifact")
    assert first == second == refusal(NoWorker("none here"))


def test_without_the_gateway_each_decides_alone(gateway: Running, client: GatewayClient) -> None:
    gateway.stop()
    with pytest.raises(JobUnreachable, match="did not store"):
        GatewayAgreement(client, JOB).agree(KEY, 10, lambda: b"an artifact")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"digest": "ab" * 32, "error": {"code": "no_worker", "message": "x"}},
        {"digest": "xyz"},
        {"digest": "ab" * 32 + "\n"},
        {"digest": "ab" * 32, "more": 1},
        [],
    ],
)
def test_what_is_no_verdict_is_refused(http: httpx2.Client, body: object) -> None:
    assert http.put(f"/v1/jobs/{JOB}/{KEY}", json=body).status_code == 422


def test_what_is_kept_is_bounded(
    http: httpx2.Client, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_agreement, "MOST_KEYS", 2)
    monkeypatch.setattr(rank_agreement, "MOST_JOBS", 3)
    verdict = {"digest": "ab" * 32}
    answers = [http.put(f"/v1/jobs/{JOB}/{n:064x}", json=verdict).status_code for n in range(3)]
    assert answers == [200, 200, 413]
    for n in range(1, 6):
        http.put(f"/v1/jobs/{n:064x}/{KEY}", json=verdict)
    names = [name for name in redis_server.client().keys("*job*") if b":job:" in name]
    assert sorted(name[-1:] for name in names) == [b"3", b"4", b"5"]
    assert all(redis_server.client().ttl(name) > 0 for name in names)
    assert http.put(f"/v1/jobs/{JOB}/{KEY}", content=b" " * 5000).status_code == 413


@pytest.mark.parametrize("letter", ["m", "\N{SNOWMAN}", "\N{GRINNING FACE}", "\x01", '"', "\n"])
def test_of_an_error_its_beginning_is_kept(
    letter: str, http: httpx2.Client, redis_server: RedisServer
) -> None:
    most = {"code": 32, "message": 192, "hint": 192}
    long = json.dumps({"error": dict.fromkeys(most, letter * 200)}, ensure_ascii=False)
    assert http.put(f"/v1/jobs/{JOB}/{KEY}", content=long.encode()).status_code == 200
    with redis_server.client() as redis:
        (kept,) = redis.hvals(f"torchrelay:job:{JOB}")
    for name, text in json.loads(kept)["error"].items():
        each = len(msgspec.json.encode(letter)) - 2
        assert text == letter * (most[name] // each)


def test_jobs_and_scripts_of_namespaces_are_apart(http: httpx2.Client) -> None:
    for name in ("red", "blue"):
        http.post("/v1/tokens", json={"name": name, "roles": ["compile"], "namespace": name})
    red, blue = {"digest": "aa" * 32}, {"digest": "bb" * 32}
    assert (
        http.put(f"/v1/jobs/{JOB}/{KEY}", json=red, params={"namespace": "red"}).json()["digest"]
        == red["digest"]
    )
    assert (
        http.put(f"/v1/jobs/{JOB}/{KEY}", json=blue, params={"namespace": "blue"}).json()["digest"]
        == blue["digest"]
    )
    assert (
        http.put(f"/v1/jobs/{JOB}/{KEY}", json=blue, params={"namespace": "red"}).json()["digest"]
        == red["digest"]
    )
