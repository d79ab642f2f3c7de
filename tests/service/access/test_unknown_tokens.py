"""Tokens that nobody issued: a few of an address are looked up, and then it waits, but whoever has a good one does
not."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx2
import pytest
from service_parts import RedisServer, Running
from torchrelay.compiler.errors import RateLimited, Unauthenticated
from torchrelay.service.access import unknown_tokens
from torchrelay.service.access.unknown_tokens import UnknownTokens
from torchrelay.service.base.settings import ServiceSettings
from waiting import wait_until

Ask = Callable[[str], httpx2.Response]
StartGateway = Callable[..., Running]
WRONG = (f"{number:043}" for number in itertools.count())


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknown_tokens, "AT_ONCE", 5)
    monkeypatch.setattr(unknown_tokens, "PER_SECOND", 0.01)


@pytest.fixture
def ask(few: None, gateway: Running) -> Iterator[Ask]:
    with gateway.http(None) as http:
        yield lambda token: http.get("/v1/stats", headers={"Authorization": f"Bearer {token}"})


def issued(http: httpx2.Client) -> str:
    return str(http.post("/v1/tokens", json={"name": "x", "roles": ["read"]}).json()["token"])


def looked_up(server: RedisServer) -> int:
    with server.client() as redis:
        return int(redis.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])


def test_an_address_that_tries_tokens_waits_and_good_tokens_do_not(
    ask: Ask, http: httpx2.Client, redis_server: RedisServer
) -> None:
    ended = issued(http)
    http.delete(f"/v1/tokens/{http.get('/v1/tokens').json()[0]['id']}")
    unused = issued(http)
    assert [ask(next(WRONG)).status_code for _ in range(5)] == [401] * 5
    before = looked_up(redis_server)
    refused = ask(next(WRONG))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
    assert 0 < int(refused.headers["Retry-After"]) <= 100
    assert ask(ended).status_code == 429
    assert looked_up(redis_server) == before
    assert ask(unused).status_code == 200
    new = issued(http)
    wait_until(lambda: ask(new).status_code == 200, seconds=30)
    assert ask(next(WRONG)).status_code == 429
    assert http.get("/v1/stats").status_code == 200


def answers(gateway: Running, addresses: Iterable[str]) -> list[int]:
    """To unknown tokens of clients that a proxy says have these addresses."""
    with gateway.http(None) as http:
        return [
            http.get(
                "/v1/stats", headers={"Authorization": f"Bearer {next(WRONG)}", "X-Forwarded-For": address}
            ).status_code
            for address in addresses
        ]


def test_behind_a_proxy_that_the_settings_name_each_client_is_counted(
    few: None, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(forwarded_allow_ips="127.0.0.1, 192.0.2.0/24")
    for address in ("192.0.2.1", "198.51.100.2"):
        assert answers(gateway, [address] * 6) == [401] * 5 + [429]


@pytest.mark.parametrize("named", ["", "192.0.2.7"])
def test_who_is_no_such_proxy_is_one_address_whatever_the_header_says(
    few: None, start_gateway: StartGateway, named: str
) -> None:
    gateway = start_gateway(forwarded_allow_ips=named)
    found = answers(gateway, [f"203.0.113.{number}" for number in range(8)])
    assert found == [401] * 5 + [429] * 3
    assert answers(gateway, ["203.0.113.0"]) == [429]


def test_proxies_are_named_as_uvicorn_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "10.0.0.0/8")
    assert ServiceSettings().forwarded_allow_ips == "10.0.0.0/8"
    monkeypatch.delenv("FORWARDED_ALLOW_IPS")
    assert ServiceSettings().forwarded_allow_ips == ""


def test_a_token_that_has_ended_counts_as_unknown(ask: Ask, http: httpx2.Client) -> None:
    token = issued(http)
    assert ask(token).status_code == 200
    http.delete(f"/v1/tokens/{http.get('/v1/tokens').json()[0]['id']}")
    assert [ask(token).status_code for _ in range(6)] == [401] * 5 + [429]


def test_what_no_token_looks_like_is_not_looked_up(ask: Ask, redis_server: RedisServer) -> None:
    before = looked_up(redis_server)
    for wrong in ("wrong", "x" * 42, "x" * 44, "x" * 42 + "!", "x" * 5000):
        assert ask(wrong).status_code == 401
    assert looked_up(redis_server) == before


def test_many_who_start_with_one_token_are_not_refused(
    few: None, gateway: Running, http: httpx2.Client
) -> None:
    with gateway.http(issued(http)) as ranks, ThreadPoolExecutor(16) as threads:
        assert set(threads.map(lambda _: ranks.get("/v1/stats").status_code, range(64))) == {200}


async def nobody() -> bool:
    return False


def refused(tokens: UnknownTokens, address: str, count: int) -> int:
    """Of so many look-ups at once, none of a known token, how many are refused."""

    async def one(token: str) -> bool:
        try:
            async with tokens.look_up(address, token, nobody):
                await asyncio.sleep(0.01)
                raise Unauthenticated("not known")
        except RateLimited:
            return True
        except Unauthenticated:
            return False

    async def every() -> int:
        return sum(await asyncio.gather(*(one(next(WRONG)) for _ in range(count))))

    return asyncio.run(every())


def test_those_under_way_count_and_so_does_each_network(few: None) -> None:
    tokens = UnknownTokens()
    assert refused(tokens, "10.0.0.1", 20) == 15
    assert refused(tokens, "10.0.0.2", 5) == 0
    assert refused(tokens, "2001:db8::1", 5) == 0
    assert refused(tokens, "2001:db8::ffff:1", 5) == 5
    assert refused(tokens, "2001:db8:0:1::1", 5) == 0
    assert refused(tokens, "", 6) == 1


def test_time_allows_more_and_what_redis_could_not_say_does_not_count(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = UnknownTokens()

    async def cut_off() -> None:
        async with tokens.look_up("a", next(WRONG), nobody):
            raise ConnectionError

    for _ in range(20):
        with pytest.raises(ConnectionError):
            asyncio.run(cut_off())
    assert refused(tokens, "a", 6) == 1
    now = time.monotonic()
    monkeypatch.setattr(unknown_tokens, "time", SimpleNamespace(monotonic=lambda: now + 200))
    assert refused(tokens, "a", 6) == 4


def test_memory_is_bounded(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknown_tokens, "REMEMBERED", 3)
    tokens = UnknownTokens()

    async def look_up(token: str) -> None:
        async with tokens.look_up("b", token, nobody):
            pass

    for number in range(10):
        refused(tokens, f"10.0.0.{number}", 1)
        asyncio.run(look_up(f"good {number}"))
    assert (len(tokens._whole_again), len(tokens._good), len(tokens._looked_up)) == (3, 3, 0)
