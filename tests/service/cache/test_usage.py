"""What was counted in each hour: on the overview, as JSON and CSV; for a year, whatever happens to single figures."""

from __future__ import annotations

import asyncio
import csv
import io
import time
from typing import Any, cast

import httpx2
import msgspec
import pytest
from redis.asyncio import Redis
from service_parts import RedisServer, Running, client_of, compiled, graph, post
from torchrelay.compiler.api.runs import GraphRecord, RunProcess, RunRecord
from torchrelay.service.cache.runs import _summary
from torchrelay.service.cache.usage import UsageHistory, figures_of
from torchrelay.service.storage.redis.connections import RedisClient
from torchrelay.service.storage.redis.keys import Keys

DAY = 86400
KEYS = Keys("torchrelay:")


def overview(http: httpx2.Client, period: str = "day") -> dict[str, Any]:
    answer = http.get(f"/overview?period={period}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def run_of(*outcomes: Any, seconds: float = 0.0) -> RunRecord:
    graphs = tuple(
        GraphRecord(key=f"{number:064x}", outcome=outcome, seconds=seconds, nodes=3)
        for number, outcome in enumerate(outcomes)
    )
    hits = sum(outcome == "hit" for outcome in outcomes)
    counts = {"hits": hits, "misses": len(outcomes) - hits, "seconds": {"wait": seconds, "trace": 99.0}}
    return RunRecord(program="train.py", pid=1, ended=1.8e9, graphs=graphs, **counts)


def tell(http: httpx2.Client, told: RunRecord) -> None:
    assert http.post("/v1/runs", content=msgspec.json.encode(told)).status_code == 200


@pytest.mark.parametrize("period", ["day", "week", "month", "year"])
def test_each_interval_counts_what_stats_count(http: httpx2.Client, period: str) -> None:
    compiled(http, graph(1))
    for _ in range(3):
        post(http, graph(1))
    http.post("/v1/report", json={"reason": "unsupported", "count": 2})
    stats = http.get("/v1/stats").json()
    found = overview(http, period)
    (interval,) = found["intervals"]
    length = {"day": 3600, "week": 3600}.get(period, DAY)
    assert found["interval_seconds"] == length and interval["began"] % length == 0
    assert 0 <= time.time() - interval["began"] < length + 60
    assert (stats["requests"], stats["hits"], stats["misses"]) == (4, 3, 1)
    for usage in (interval, found["total"]):
        counted = {name: usage[name] for name in usage if name in stats}
        assert counted == {name: stats[name] for name in counted} and len(counted) > 12
    assert interval["fallbacks"] == {"unsupported": 2}


def test_percentiles_are_those_of_runs(http: httpx2.Client) -> None:
    for _ in range(9):
        tell(http, run_of("hit", "hit", seconds=1.0))
    tell(http, run_of("hit", "miss", "miss", "miss", seconds=60.0))
    found = overview(http)
    median, most, almost_all = found["total"]["ready_seconds"]
    assert median == most == pytest.approx(1.0, rel=0.2) and almost_all == pytest.approx(60.0, rel=0.2)
    assert found["total"]["hit_rates"] == [1.0, pytest.approx(0.25)]
    assert found["total"]["runs"] == len(found["recent"]) == 10
    assert [(each["seconds"], each["program"]) for each in found["slowest"]] == [(60.0, "train.py")]


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.7, 1.0, 33.0, 6000.0])
def test_a_class_of_runs_holds_what_it_says(seconds: float) -> None:
    """The middle of a class is within a fifth of each time in it."""
    summary = _summary(RunProcess(run_of("hit", seconds=seconds), 0.0), "x")
    (ready,) = (figure for figure in figures_of(summary) if figure.startswith("ready:"))
    middle = 0.1 * 2 ** (int(ready.partition(":")[2]) / 2 - 0.25)
    assert middle == pytest.approx(max(seconds, 0.084), rel=0.2)


@pytest.mark.parametrize("hits", [-(2**63), 2**63 - 1])
@pytest.mark.parametrize("seconds", [-1.0, 1.7e308])
def test_a_hostile_record_adds_no_new_figures(hits: int, seconds: float, http: httpx2.Client) -> None:
    """Sums of its numbers are infinite, its hits are more than its graphs."""
    stages = {"wait": seconds, "load": seconds}
    tell(http, msgspec.structs.replace(run_of("hit"), hits=hits, seconds=stages))
    found = overview(http)
    assert found["total"]["hit_rates"] == [pytest.approx(0.05)] * 2 if hits < 0 else [1.0] * 2
    assert all(0 < each < 2e4 for each in found["total"]["ready_seconds"])


def test_ranks_of_one_launch_are_one_run(http: httpx2.Client) -> None:
    for rank in range(4):
        tell(http, msgspec.structs.replace(run_of("hit"), rank=rank, launch="none/0/h/29500/4"))
    assert overview(http)["total"]["runs"] == 1


def test_namespaces_are_apart(gateway: Running, http: httpx2.Client) -> None:
    body = {"name": "x", "roles": ["compile"], "namespace": "red"}
    with client_of(gateway.url, http.post("/v1/tokens", json=body).json()["token"]) as red:
        compiled(red, graph(1))
        assert overview(red)["total"]["misses"] == 1
    assert overview(http)["intervals"] == []
    assert http.get("/overview?namespace=red").json()["total"]["misses"] == 1


def test_a_figure_that_is_none_keeps_nobody_from_an_artifact(
    http: httpx2.Client, redis_server: RedisServer
) -> None:
    today = int(time.time()) // DAY
    with redis_server.client() as redis:
        for day in (today, today + 1):
            redis.set(KEYS.hours(day), "x")  # not even a hash
        for at in range(32):
            redis.hset(KEYS.days(today // 32), f"{at}:hits", "many")
            damaged = {
                f"{at}:bytes_served": "inf",
                f"{at}:ready:x": 1,
                f"{at}:rate:\u00b2": 1,
                b"\xff:\xff": 1,
            }
            redis.hset(KEYS.days(today // 32), mapping=damaged)
        compiled(http, graph(1))
        post(http, graph(1))
        assert http.get("/v1/stats").json()["hits"] == 1
        total = overview(http, "year")["total"]
        assert (total["hits"], total["misses"], overview(http, "week")["intervals"]) == (0, 1, [])
        redis.delete(KEYS.hours(today), KEYS.hours(today + 1), KEYS.days(today // 32))
    post(http, graph(1))
    assert overview(http)["total"]["hits"] == 1


def test_a_year_is_read_by_the_day_and_written_as_csv_by_the_hour(redis_server: RedisServer) -> None:
    today = int(time.time()) // DAY
    with redis_server.client() as redis:
        for day in range(today - 400, today + 1):
            redis.hset(KEYS.hours(day), mapping={f"{hour}:hits": hour + 1 for hour in range(24)})
            redis.hset(KEYS.days(day // 32), f"{day % 32}:hits", 300)

    async def read() -> tuple[Any, str]:
        async with Redis.from_url(redis_server.url) as redis:
            usage = UsageHistory(cast(RedisClient, redis), KEYS)
            return await usage.read("year"), "".join([part async for part in usage.hours_as_csv()])

    (seconds, total, days), text = asyncio.run(read())
    assert (seconds, len(days), total.hits) == (DAY, 365, 365 * 300)
    assert [each.began for each in days] == [DAY * day for day in range(today - 364, today + 1)]
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 366 * 24 and sum(int(row["hits"]) for row in rows) == 366 * 300
    first = time.strftime("%Y-%m-%dT00:00:00Z", time.gmtime((today - 365) * DAY))
    assert rows[0]["began"] == first and rows[0]["ready_seconds_50"] == ""


def test_figures_expire_after_a_year(http: httpx2.Client, redis_server: RedisServer) -> None:
    post(http, graph(1))
    http.get("/v1/stats")
    with redis_server.client() as redis:
        names = list(redis.scan_iter(f"{KEYS.stats}:*"))
        assert len(names) == 2
        assert all(365 * DAY < redis.ttl(name) <= 366 * DAY for name in names)
