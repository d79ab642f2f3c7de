"""A process tells of its run, and people see it: as a page in a browser, as JSON at the same address."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import msgspec
import pytest
from page_parts import EVIL, a_graph, record, stranger, tell
from service_parts import RedisServer, Running, compiled, graph
from torchrelay.compiler import decoding
from torchrelay.compiler.api.runs import GraphRecord, RefusedOperator, RunRecord, TracedFunction
from torchrelay.service.cache import runs as stored


@pytest.fixture
def browser(gateway: Running, http: httpx2.Client) -> httpx2.Client:
    """Signed in: it sends a cookie, and no bearer token."""
    signed_out = stranger(gateway)
    secret = http.headers["authorization"].partition(" ")[2]
    answer = signed_out.post("/sign-in", data={"token": secret, "then": "runs"})
    assert (answer.status_code, answer.headers["location"]) == (303, "runs")
    assert re.search("HttpOnly.*SameSite=lax", answer.headers["set-cookie"])
    return signed_out


def test_a_run_is_listed_and_shown_with_what_its_hits_saved(
    gateway: Running, http: httpx2.Client, browser: httpx2.Client
) -> None:
    compiled(http, graph(1))
    (key,) = gateway.pool.calls
    missed = a_graph("ee" * 32, "miss", stages={"wait": 0.4})
    told = record(graphs=(a_graph(key), missed), hits=1, misses=1, seconds={"wait": 0.4, "trace": 9.0})
    reply = tell(http, told)
    assert reply["saved_seconds"] == pytest.approx(3.0)

    (summary,) = http.get("/runs").json()["runs"]
    assert summary["run"] == reply["run"] and summary["by"] == "owner"
    assert [summary[name] for name in ("graphs", "hits", "misses", "seconds")] == [2, 1, 1, 0.4]
    process = http.get(reply["path"]).json()["process"]
    assert decoding.convert(process["record"], type=RunRecord) == told

    assert f'href="runs/{reply["run"]}"' in browser.get("/runs").text
    page = browser.get(reply["path"]).text
    assert "3.0 s" in page and f'href="../misses/{"ee" * 32}"' in page and "wait 0.4 s" in page


def test_what_a_miss_differs_in_is_a_page(
    gateway: Running, http: httpx2.Client, browser: httpx2.Client
) -> None:
    compiled(http, graph(1))
    compiled(http, graph(2))
    key = gateway.pool.calls[-1]
    assert http.get(f"/misses/{key}").json()["key"] == key
    assert key in browser.get(f"/misses/{key}").text


def test_ranks_that_one_launcher_started_are_one_run(http: httpx2.Client, browser: httpx2.Client) -> None:
    ranks = [record(rank=rank, launch="none/0/h/29500/2", graphs=(a_graph(""),)) for rank in range(2)]
    first, second = (tell(http, told)["run"] for told in ranks)
    assert first == second
    again = tell(http, ranks[0])["run"]  # the next start has the same name
    assert again != first and tell(http, ranks[1])["run"] == again
    other = tell(http, record(program="other.py", rank=0, launch=ranks[0].launch, graphs=(a_graph(""),)))
    assert other["run"] not in (first, again)

    found = http.get(f"/runs/{first}").json()
    assert [each["rank"] for each in found["ranks"]] == [0, 1] and found["process"]["record"]["rank"] == 0
    assert http.get(f"/runs/{first}?rank=1").json()["process"]["record"]["rank"] == 1
    assert [each["ranks"] for each in http.get("/runs").json()["runs"]] == [1, 2, 2]
    assert 'href="?rank=1"' in browser.get(f"/runs/{first}").text


def test_two_runs_are_compared_graph_by_graph(http: httpx2.Client, browser: httpx2.Client) -> None:
    keys = [f"{number}{number}" * 32 for number in range(5)]
    other_script = tell(http, record(program="other.py", graphs=(a_graph(keys[0]),)))["run"]
    first = tell(http, record(graphs=tuple(a_graph(key) for key in keys[:4])))["run"]
    changed = [keys[0], "ab" * 32, keys[2], keys[3], keys[4]]
    second = tell(http, record(graphs=tuple(a_graph(key, "miss") for key in changed)))
    found = http.get(f"{second['path']}?with={first}").json()
    assert found["earlier"] == first and found["compared"]["there"]["run"] == first
    rows = [[side and side["key"] for side in row.values()] for row in found["compared"]["graphs"]]
    equal = [[key, key] for key in keys[:4]]
    assert rows == [equal[0], ["ab" * 32, keys[1]], *equal[2:], [keys[4], None]]

    assert f'href="?with={first}"' in browser.get(second["path"]).text
    page = browser.get(f"{second['path']}?with={first}").text
    assert page.count('class="changed"') == 2 and "no graph" in page
    assert http.get(f"/runs/{first}").json()["earlier"] == ""
    assert http.get(f"/runs/{first}?with={other_script}").status_code == 200
    assert http.get(f"/runs/{first}?with={'0' * 16}").status_code == 404


def test_agents_find_the_pages(gateway: Running, http: httpx2.Client) -> None:
    text = gateway.http(None).get("/llms.txt").text
    for address in re.findall(r"\]\(([^)]+)\)", text):
        assert http.get(f"/{address}").status_code in (200, 503), address


def test_what_is_kept_is_bounded(
    http: httpx2.Client, browser: httpx2.Client, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "RUNS", 3)
    runs = [tell(http, record(graphs=(a_graph(""),)))["run"] for _ in range(5)]
    assert [each["run"] for each in http.get("/runs").json()["runs"]] == runs[:1:-1]
    assert http.get(f"/runs/{runs[0]}").status_code == 404
    with redis_server.client() as redis:
        sizes = [int(size) for size in redis.hvals("torchrelay:run_sizes")]
        assert len(sizes) == 3 and sum(sizes) == int(redis.get("torchrelay:run_bytes"))
        monkeypatch.setattr(stored, "BYTES", sum(sizes) + 30)  # times have more digits or fewer
    last = tell(http, record(graphs=(a_graph(""),)))["run"]
    assert [each["run"] for each in http.get("/runs").json()["runs"]] == [last, *runs[:2:-1]]
    monkeypatch.setattr(stored, "RUN_BYTES", 10)
    small = tell(http, record(graphs=(a_graph(""),)))
    found = http.get(small["path"]).json()
    assert (found["ranks"], found["process"], found["summary"]["graphs"]) == ([], None, 1)
    assert "no room" in browser.get(small["path"]).text


def test_earlier_runs_follow_on_pages_of_their_own(
    http: httpx2.Client, browser: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "LISTED", 2)
    runs = [tell(http, record(graphs=(a_graph(""),)))["run"] for _ in range(3)]
    first = http.get("/runs").json()
    assert [each["run"] for each in first["runs"]] == runs[:0:-1]
    link = re.search('href="(runs[?]before=[^"]+)"', browser.get("/runs").text)
    assert link and runs[0] in browser.get(f"/{link[1]}").text


def test_texts_of_users_stay_texts(http: httpx2.Client, browser: httpx2.Client) -> None:
    told = record(
        program=EVIL,
        torch=EVIL,
        graphs=(a_graph("ee" * 32, "fallback", reason=EVIL),),
        fallbacks={EVIL: 1},
        started={EVIL: 2},
        traced=(TracedFunction(EVIL, EVIL),),
        refused=(RefusedOperator(EVIL, EVIL, 1),),
        programs=2,
    )
    path = tell(http, told)["path"]
    for page in ("/runs", path):
        text = browser.get(page).text
        assert "<script" not in text and "\u202e" not in text and "&lt;script&gt;" in text


@pytest.mark.parametrize(
    "change",
    [
        {"graphs": [{"key": "xyz", "outcome": "hit", "seconds": 1.0, "nodes": 1}]},
        {"graphs": [{"key": "", "outcome": "evil", "seconds": 1.0, "nodes": 1}]},
        {"graphs": [{"key": "", "outcome": "hit", "seconds": 1.0, "nodes": 1, "stages": {"evil": 1.0}}]},
        {"rank": -1},
        {"rank": 10**6},
        {"ended": "now"},
        {"program": "x" * stored.RECORD_BYTES},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_no_record_is_refused(change: dict[str, Any], http: httpx2.Client) -> None:
    answer = http.post("/v1/runs", json=msgspec.to_builtins(record()) | change)
    assert answer.status_code in (400, 413, 422), answer.text
    assert http.get("/runs").json()["runs"] == []


def test_damaged_records_hide_themselves_alone(http: httpx2.Client, redis_server: RedisServer) -> None:
    kept, damaged = (tell(http, record(graphs=(a_graph(""),))) for _ in range(2))
    with redis_server.client() as redis:
        redis.hset(f"torchrelay:run_summaries:{damaged['run']}", mapping={"first": "?", "0": "?"})
        redis.hset(f"torchrelay:run_summaries:{kept['run']}", "1", "?")
    assert [each["run"] for each in http.get("/runs").json()["runs"]] == [kept["run"]]
    assert len(http.get(kept["path"]).json()["ranks"]) == 1
    with redis_server.client() as redis:
        redis.hset(f"torchrelay:run_records:{kept['run']}", "0", "?")
    assert http.get(kept["path"]).json()["process"] is None
    assert http.get(damaged["path"]).status_code == 404


def test_times_and_sizes_that_cannot_be_are_shown_as_such(
    http: httpx2.Client, browser: httpx2.Client
) -> None:
    odd = GraphRecord(key="", outcome="hit", seconds=-5.0, nodes=-1, ended=1e308, stages={"wait": 1e308})
    path = tell(http, record(ended=1e300, graphs=(odd,)))["path"]
    assert browser.get("/runs").status_code == browser.get(path).status_code == 200


# --- who sees it -------------------------------------------------------------------------------------------


def test_a_browser_without_a_token_is_asked_for_one_and_comes_back(
    gateway: Running, http: httpx2.Client
) -> None:
    path = tell(http, record(graphs=(a_graph(""),)))["path"]
    unknown = stranger(gateway)
    asked = unknown.get(path)
    assert asked.status_code == 401 and f'name="then" value="{path[1:]}"' in asked.text
    wrong = unknown.post("/sign-in", data={"token": "wrong", "then": path[1:]})
    assert wrong.status_code == 401 and "set-cookie" not in wrong.headers and "not known" in wrong.text
    assert unknown.get(path, headers={"Accept": "application/json"}).json()["error"]["code"]


def test_a_link_signs_a_browser_in_once(
    gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    made = http.post("/v1/page-tickets").json()
    secret = http.headers["authorization"].partition(" ")[2]
    with redis_server.client() as redis:
        (name,) = redis.keys("torchrelay:page_ticket:*")
        assert 0 < redis.ttl(name) <= made["seconds"] and secret.encode() not in redis.get(name)
    browser = stranger(gateway)
    answer = browser.get(f"{made['path']}&then=runs")
    assert (answer.status_code, answer.headers["location"]) == (303, "runs")
    assert browser.get("/runs").status_code == 200
    for path in (made["path"], "/sign-in?ticket=none", f"/sign-in?ticket={'a' * 43}"):
        again = stranger(gateway).get(path)
        assert again.status_code == 401 and "set-cookie" not in again.headers and "was used" in again.text
    assert stranger(gateway).post("/v1/page-tickets").status_code == 401
    assert browser.post("/v1/page-tickets").status_code == 401  # a cookie makes no links


@pytest.mark.parametrize("then", ["https://evil.example", "//evil.example", "runs//evil", "v1/tokens", ""])
def test_a_sign_in_leads_to_pages_alone(then: str, gateway: Running, http: httpx2.Client) -> None:
    secret = http.headers["authorization"].partition(" ")[2]
    answer = gateway.http(None).post("/sign-in", data={"token": secret, "then": then})
    assert (answer.status_code, answer.headers["location"]) == (303, "overview")


def test_forms_of_other_sites_sign_nobody_in_or_out(gateway: Running, http: httpx2.Client) -> None:
    secret = http.headers["authorization"].partition(" ")[2]
    elsewhere = stranger(gateway, **{"Sec-Fetch-Site": "cross-site"})
    for path in ("/sign-in", "/sign-out"):
        assert elsewhere.post(path, data={"token": secret}).status_code == 403


def test_the_cookie_opens_pages_and_nothing_else(browser: httpx2.Client) -> None:
    for method, path in (
        ("GET", "/v1/stats"),
        ("GET", "/v1/tokens"),
        ("POST", "/v1/runs"),
        ("DELETE", f"/v1/cache/{'0' * 64}"),
    ):
        assert browser.request(method, path, content=b"{}").status_code == 401, path
    assert browser.get("/runs").status_code == 200
    out = browser.post("/sign-out")
    assert out.status_code == 303 and 'torchrelay_token=""' in out.headers["set-cookie"]


def test_a_page_loads_the_stylesheet_alone_and_runs_nothing(browser: httpx2.Client) -> None:
    page = browser.get("/runs")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src" not in policy
    assert "style=" not in page.text and "<style" not in page.text
    (sheet,) = re.findall('href="(static/[^"]+)"', page.text)
    style = browser.get(f"/{sheet}")
    assert style.status_code == 200 and style.headers["content-type"].startswith("text/css")
    assert browser.get("/static/other.css").status_code == 404


def test_a_page_of_nothing_says_so(browser: httpx2.Client) -> None:
    missing = browser.get(f"/runs/{'0' * 16}")
    assert missing.status_code == 404 and "there is no run" in missing.text
    assert browser.get("/runs/xyz").status_code in (400, 422)


def test_runs_of_a_namespace_are_its_own(http: httpx2.Client, gateway: Running) -> None:
    asked = {"name": "ada", "roles": ["compile"], "namespace": "vision"}
    other = gateway.http(http.post("/v1/tokens", json=asked).json()["token"])
    path = tell(other, record(graphs=(a_graph(""),)))["path"]
    assert http.get("/runs").json()["runs"] == [] and http.get(path.partition("?")[0]).status_code == 404
    (summary,) = http.get("/runs?namespace=vision").json()["runs"]
    assert summary["by"] == "ada"
    assert other.get(path).status_code == 200


def test_a_page_of_an_error_says_when_to_try_again(gateway: Running, http: httpx2.Client) -> None:
    body = {"name": "x", "roles": ["read"], "rate": 0.01}
    slow = stranger(gateway, authorization=f"Bearer {http.post('/v1/tokens', json=body).json()['token']}")
    answers = [slow.get("/runs") for _ in range(3)]
    assert answers[0].status_code == 200 and answers[-1].status_code == 429
    assert int(answers[-1].headers["retry-after"]) > 0 and "<h1>" in answers[-1].text
