"""Winners of Triton's and Helion's own autotuners over HTTP: what stands, who reads and brings, what is refused."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from service_parts import RedisServer, Running, StartGateway
from torchrelay.compiler.tuning.queries import ENTRY_LIMIT

PATH = f"/v1/autotunes/triton/{'ab' * 32}"
FIRST = {"key": "KEY", "data": '{"num_warps": 4}'}
SECOND = {"key": "KEY", "data": '{"num_warps": 8}'}


def path(number: int, library: str = "triton") -> str:
    return f"/v1/autotunes/{library}/{number:064x}"


def test_the_first_winner_stands_and_each_library_has_its_own(http: httpx2.Client) -> None:
    missing = http.get(PATH)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert http.put(PATH, json=FIRST).json() == FIRST
    assert http.put(PATH, json=SECOND).json() == FIRST
    assert http.get(PATH).json() == FIRST
    assert http.get(PATH.replace("triton", "helion")).status_code == 404


def test_an_entry_that_cannot_be_read_counts_as_none(http: httpx2.Client, redis_server: RedisServer) -> None:
    http.put(PATH, json=FIRST)
    redis_server.client().hset("torchrelay:autotunes", f"triton:{'ab' * 32}", b"\xc1")
    assert http.get(PATH).status_code == 404
    assert http.put(PATH, json=SECOND).json() == SECOND
    assert http.get(PATH).json() == SECOND


def test_members_bring_readers_look_and_all_of_it_stays_within_a_namespace(
    gateway: Running, http: httpx2.Client
) -> None:
    def token(role: str, **more: str) -> str:
        made = http.post("/v1/tokens", json={"name": role, "roles": [role], **more})
        return str(made.json()["token"])

    with gateway.http(token("read")) as reader:
        refused = reader.put(PATH, json=SECOND)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        with gateway.http(token("compile")) as member:
            assert member.put(PATH, json=FIRST).status_code == 200
        assert reader.get(PATH).json() == FIRST
    with gateway.http(token("compile", namespace="vision")) as theirs:
        assert theirs.get(PATH).status_code == 404
        assert theirs.put(PATH, json=SECOND).json() == SECOND
        assert theirs.get(PATH, params={"namespace": "default"}).status_code == 403
    assert http.get(PATH).json() == FIRST


def test_past_the_limit_the_least_recently_used_go(start_gateway: StartGateway) -> None:
    with start_gateway(tunings_limit=3).http() as http:
        for number in range(3):
            http.put(path(number), json=FIRST)
        assert http.get(path(0)).status_code == 200
        http.put(path(3), json=FIRST)
        there = [http.get(path(number)).status_code for number in range(4)]
    assert there == [200, 404, 200, 200]


@pytest.mark.parametrize(
    ("where", "body", "status"),
    [
        (path(1, "cutlass"), FIRST, 422),
        (PATH.upper().replace("/V1/AUTOTUNES/TRITON", "/v1/autotunes/triton"), FIRST, 422),
        (PATH[:-1], FIRST, 422),
        (PATH, {"key": "KEY"}, 422),
        (PATH, {**FIRST, "data": 4}, 422),
        (PATH, {**FIRST, "key": "K" * 257}, 422),
        (PATH, {**FIRST, "data": "x" * (ENTRY_LIMIT + 1)}, 422),
        (PATH, {**FIRST, "data": "x" * (5 * ENTRY_LIMIT)}, 413),
    ],
)
def test_what_is_no_winner_is_refused(
    where: str, body: dict[str, Any], status: int, http: httpx2.Client
) -> None:
    assert http.put(where, json=body).status_code == status
    assert http.get(PATH).status_code == 404
