"""The winners of kernel searches as people and scripts look at them."""

from __future__ import annotations

import httpx2
import msgspec
import pytest
from msgspec.structs import replace
from page_parts import BROWSER
from service_parts import RedisServer, Running
from torchrelay.compiler.tuning.records import Timing, TuningEntry
from tuning_parts import PLACE, entry

NEWER = replace(PLACE, torch="2.99.0")


def send(http: httpx2.Client, *entries: TuningEntry) -> None:
    http.post("/v1/tunings", content=msgspec.json.encode({"entries": entries})).raise_for_status()


def test_winners_stand_by_problem_the_last_used_first_and_newer_versions_above(
    gateway: Running, http: httpx2.Client
) -> None:
    aten = Timing("aten mm", 0.5, 0.49, 0.51, 40)
    send(http, replace(entry(8), aten=aten), entry(16))
    send(http, replace(entry(8, place=NEWER), winner=Timing("triton <mm>", 0.5, 0.48, 0.52, 40), aten=aten))
    kernels = http.get("/kernels").json()
    assert (kernels["read"], kernels["known"], kernels["jobs"]) == (3, 3, [])
    first, second = kernels["problems"]
    assert [each["place"]["torch"] for each in first["winners"]] == [NEWER.torch, PLACE.torch]
    assert first["changes"] == [{"winner": 1.0, "aten": None}]
    assert "bf16[16,16]" in second["problem"]
    page = http.get("/kernels", headers=BROWSER).text
    assert "triton &lt;mm&gt;" in page and "winner 100% slower" in page and "2.00" in page


@pytest.mark.parametrize(
    ("text", "sizes"), [("16,16", [16]), ("A CPU", [16, 8]), ("ATEN", [16, 8]), ("x9", [])]
)
def test_a_search_finds_problems_devices_and_winners(
    gateway: Running, http: httpx2.Client, text: str, sizes: list[int]
) -> None:
    send(http, entry(8))
    send(http, entry(16))
    problems = http.get("/kernels", params={"search": text}).json()["problems"]
    assert [each["winners"][0]["problem"]["result"]["size"][0] for each in problems] == sizes
    page = http.get("/kernels", params={"search": text}, headers=BROWSER).text
    assert ("No winner has this text" in page) == (not sizes)


def test_looking_is_no_use_and_what_is_damaged_is_left_out(
    gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    send(http, entry(8))
    send(http, entry(16))
    with redis_server.client() as redis:
        before = redis.zrange("torchrelay:tuned", 0, -1, withscores=True)
        (field, *_) = redis.hkeys("torchrelay:tunings")
        redis.hset("torchrelay:tunings", field, b"\xc1")
        kernels = http.get("/kernels").json()
        assert redis.zrange("torchrelay:tuned", 0, -1, withscores=True) == before
    assert (len(kernels["problems"]), kernels["known"]) == (1, 2)


def test_without_a_search_the_page_says_how_to_begin(gateway: Running, http: httpx2.Client) -> None:
    assert "max-autotune" in http.get("/kernels", headers=BROWSER).text
