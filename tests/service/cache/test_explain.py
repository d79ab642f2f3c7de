"""Misses explained by a real gateway and a real Redis: what was near when a request missed, and what differs."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from command_line import torchrelay, user
from service_parts import TOKEN, ArtifactPool, RedisServer, Running, StartGateway, compiled, graph, post
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler import decoding, errors
from torchrelay.compiler.api.compiles import MissExplanation
from torchrelay.compiler.graph.toolchain import local_toolchain
from torchrelay.compiler.request import codec, key
from waiting import wait_until


def key_of(body: bytes) -> str:
    return key.key_of(codec.unpack_request(body))


def changed(body: bytes, **fields: Any) -> bytes:
    return codec.pack_request(msgspec.structs.replace(codec.unpack_request(body), **fields))


def explained(http: httpx2.Client, body: bytes) -> MissExplanation:
    answer = http.get(f"/misses/{key_of(body)}")
    assert answer.status_code == 200, answer.text
    return decoding.from_json(answer.content, type=MissExplanation)


def words(found: MissExplanation) -> list[str]:
    assert found.nearest is not None
    return [difference.text for difference in found.nearest.differences]


def test_a_miss_that_was_never_compiled_is_explained(http: httpx2.Client) -> None:
    compiled(http, graph(8))
    assert post(http, graph(16), wait="cache").status_code == 404
    found = explained(http, graph(16))
    assert (found.published, found.compared) == (False, 1)
    assert found.nearest is not None and found.nearest.key == key_of(graph(8))
    assert words(found) == ["input 0: shape (16,) against (8,)"]


def test_the_nearest_entry_is_the_one_that_differs_least(http: httpx2.Client) -> None:
    base = graph(8, nodes=3)
    later = msgspec.structs.replace(codec.unpack_request(base).toolchain, torch="2.12.1+cpu")
    for body in (graph(8), graph(9, nodes=2), changed(base, options=[("max_autotune", True)]), graph(9)):
        compiled(http, body)
    post(http, base, wait="cache")
    found = explained(http, base)
    assert found.compared == 4
    assert words(found) == ["option max_autotune: the default against True"]
    other = changed(base, toolchain=later, options=[("max_autotune", True)])
    post(http, other, wait="cache")
    assert words(explained(http, other)) == ["torch 2.12.1+cpu against 2.13.0+cpu"]


def test_a_miss_compiled_since_is_explained_by_what_there_was_before(http: httpx2.Client) -> None:
    for size in (8, 16, 32):
        compiled(http, graph(size))
    first, second = explained(http, graph(8)), explained(http, graph(16))
    assert (first.published, first.nearest, first.compared) == (True, None, 0)
    assert second.nearest is not None and second.nearest.key == key_of(graph(8))
    assert second.asked is not None and second.nearest.created < second.asked


def test_a_pinned_entry_is_compared_too(http: httpx2.Client) -> None:
    compiled(http, graph(8))
    compiled(http, graph(8, nodes=2))
    pinned = http.put(f"/v1/cache/{key_of(graph(8, nodes=2))}/pin")
    assert pinned.status_code == 200, pinned.text
    other = changed(
        graph(8, nodes=2), mode="max-autotune", graph=codec.unpack_request(graph(8, nodes=3)).graph
    )
    post(http, other, wait="cache")
    found = explained(http, other)
    assert found.compared == 2
    assert found.nearest is not None and found.nearest.key == key_of(graph(8, nodes=2))


def test_another_gateway_that_never_saw_the_body_explains_it(start_gateway: StartGateway) -> None:
    one, other = start_gateway(), start_gateway()
    with one.http() as here, other.http() as there:
        compiled(here, graph(8))
        post(here, graph(16), wait="cache")
        assert words(explained(there, graph(16))) == ["input 0: shape (16,) against (8,)"]


def test_an_evicted_entry_that_is_asked_for_again_is_a_new_miss(
    http: httpx2.Client, redis_server: RedisServer
) -> None:
    compiled(http, graph(8))
    compiled(http, graph(16))
    name = key_of(graph(8))
    with redis_server.client() as redis:
        redis.delete(f"torchrelay:index:{name}", f"torchrelay:miss:{name}")
        redis.zrem("torchrelay:lru", name)
    assert http.get(f"/misses/{name}").status_code == 404

    def asked_again() -> bool:  # a miss of the same key is recorded once a second
        post(http, graph(8), wait="cache")  # a body that this gateway parsed before
        return http.get(f"/misses/{name}").status_code == 200

    wait_until(asked_again, seconds=10)
    found = explained(http, graph(8))
    assert (found.published, words(found)) == (False, ["input 0: shape (8,) against (16,)"])


def test_what_is_remembered_is_bounded(
    start_gateway: StartGateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in (("REQUESTS", 3), ("GRAPHS", 2), ("SAME_GRAPH", 2)):
        monkeypatch.setattr(f"torchrelay.service.cache.misses.{name}", limit)
    with start_gateway().http() as http:
        for nodes in (1, 2, 3):
            for size in range(4):
                post(http, graph(size + 2, nodes=nodes), wait="cache")
        assert http.get(f"/misses/{key_of(graph(2))}").status_code == 404
        assert explained(http, graph(5, nodes=3)).nearest is None
    with redis_server.client() as redis:
        assert len(redis.keys("torchrelay:miss:*")) == redis.zcard("torchrelay:misses") == 3
        assert len(redis.keys("torchrelay:same_graph:*")) == redis.zcard("torchrelay:graphs") == 2
        assert {redis.zcard(name) for name in redis.keys("torchrelay:same_graph:*")} == {2}
        assert all(0 < redis.ttl(name) <= 7 * 86400 for name in redis.keys("torchrelay:miss:*"))


def test_what_one_explanation_reads_is_bounded(http: httpx2.Client, redis_server: RedisServer) -> None:
    compiled(http, graph(8))
    name = key_of(graph(8))
    with redis_server.client() as redis:
        entry = redis.hgetall(f"torchrelay:index:{name}")
        parts = http.get(f"/v1/cache/{name}").json()["components"]
        large = codec.compress(msgspec.json.encode({**parts, "input.list": secrets.token_hex(25_000)}))
        for number in range(120):
            redis.hset(f"torchrelay:index:{number:064x}", mapping=entry)
            redis.set(f"torchrelay:components:{number:064x}", large)
            redis.zadd("torchrelay:lru", {f"{number:064x}": number})
        post(http, graph(16), wait="cache")
        before = redis.info("stats")["total_net_output_bytes"]
        found = explained(http, graph(16))
        read = redis.info("stats")["total_net_output_bytes"] - before
    assert 512 << 10 < read < 2 << 20
    assert 20 < found.compared < 45
    assert found.nearest is not None and found.nearest.key == name  # the one used last


def test_an_entry_too_large_to_compare_does_not_hide_smaller_ones(
    http: httpx2.Client, redis_server: RedisServer
) -> None:
    compiled(http, graph(8))
    compiled(http, graph(9))
    post(http, graph(16), wait="cache")
    with redis_server.client() as redis:
        redis.set(f"torchrelay:components:{key_of(graph(9))}", b" " * (9 << 20))
    found = explained(http, graph(16))
    assert found.compared == 1
    assert found.nearest is not None and found.nearest.key == key_of(graph(8))


def test_damaged_records_are_passed_over(http: httpx2.Client, redis_server: RedisServer) -> None:
    compiled(http, graph(8))
    compiled(http, graph(9))
    post(http, graph(16), wait="cache")
    post(http, graph(17), wait="cache")
    with redis_server.client() as redis:
        redis.set(f"torchrelay:components:{key_of(graph(8))}", b"\xff{")
        redis.set(f"torchrelay:components:{key_of(graph(9))}", codec.compress(b'{"inputs":"x"}'))
        redis.set(f"torchrelay:miss:{key_of(graph(17))}", b"garbage")
    assert explained(http, graph(16)).nearest is None
    assert http.get(f"/misses/{key_of(graph(17))}").status_code == 404


def test_what_redis_holds_for_explanations_is_bounded(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    """The latest are there, however many artifacts there are, and no index entry grows with its request."""
    with start_gateway(explain_bytes=4000).http() as http, redis_server.client() as redis:
        for size in range(8, 28):
            compiled(http, graph(size, nodes=200))
        held = [redis.strlen(name) for name in redis.keys("torchrelay:components:*")]
        assert 2 <= len(held) < 10
        assert sum(held) == int(redis.get("torchrelay:described_bytes")) <= 4000
        assert redis.llen("torchrelay:described") == len(held)
        post(http, graph(30, nodes=200), wait="cache")
        assert explained(http, graph(30, nodes=200)).nearest is not None
        newest, oldest = key_of(graph(27, nodes=200)), key_of(graph(8, nodes=200))
        assert http.get(f"/v1/cache/{newest}").json()["components"]["inputs.count"] == "1"
        assert http.get(f"/v1/cache/{oldest}").json()["components"] == {}
        assert redis.memory_usage(f"torchrelay:index:{newest}") < 600


def test_errors_are_typed(gateway: Running) -> None:
    with gateway.http() as http:
        unknown, wrong = http.get(f"/misses/{'0' * 64}"), http.get("/misses/x")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (422, "malformed")
    with gateway.http(token=None) as http:
        assert http.get(f"/misses/{'0' * 64}").status_code == 401
    with gateway.http() as http:
        assert "MissExplanation" in http.get("/openapi.json").json()["components"]["schemas"]


def test_the_client_reads_the_answer(gateway: Running) -> None:
    with gateway.http() as http:
        compiled(http, graph(8))
        post(http, graph(16), wait="cache")
    settings = ClientSettings(url=gateway.url, token=TOKEN, cache_dir=Path("/nonexistent"))
    with GatewayClient(settings) as mine:
        assert words(mine.explain(key_of(graph(16)))) == ["input 0: shape (16,) against (8,)"]
        with pytest.raises(errors.NotFound, match="nothing is known"):
            mine.explain("0" * 64)


def test_a_compile_goes_on_while_misses_cannot_be_remembered(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    pool = ArtifactPool()
    with start_gateway(pool).http() as http, redis_server.client() as redis:
        redis.set("torchrelay:misses", "of another type")
        compiled(http, graph(8))
    assert pool.calls == [key_of(graph(8))]


# --- the command -------------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
def program(x):
    return x.sin()
torch.compile(program, backend="torchrelay", dynamic=False)(torch.ones(int(sys.argv[1])))
"""


@pytest.fixture
def environment(gateway: Running, tmp_path: Path) -> dict[str, str]:
    with gateway.http() as http:
        public_key = http.get("/v1/info").json()["public_keys"][0]
    known = {"HOME": str(tmp_path), "TORCHRELAY_PUBLIC_KEYS": public_key, "PYTHONWARNINGS": "ignore"}
    return user(tmp_path / ".config", gateway.url, TOKEN, **known)


def test_the_command_explains_the_last_run(
    gateway: Running, environment: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for size, mode in ((8, "remote"), (16, "cache")):
        command = [sys.executable, str(script), str(size)]
        subprocess.run(command, env={**environment, "TORCHRELAY_MODE": mode}, check=True)
    (compiled_key,) = gateway.pool.calls

    told = torchrelay("explain", "--json", environment=environment)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    ((process,), (miss,)) = found["run"]["processes"], found["misses"]
    (graph,) = process["graphs"]
    assert found["run"]["program"] == "train.py"
    assert (graph["outcome"], graph["reason"], graph["key"]) == ("fallback", "not_cached", miss["key"])
    assert miss["explanation"]["nearest"]["key"] == compiled_key
    difference = "input 0: shape (16,) against (8,)"
    assert [each["text"] for each in miss["explanation"]["nearest"]["differences"]] == [difference]

    shown = torchrelay("explain", environment=environment).stdout
    assert "train.py" in shown and "compiled locally: not_cached" in shown
    assert f"{miss['key'][:12]}: the only entry was {compiled_key[:12]}" in shown
    assert f"\n  {difference}\n" in shown
    assert difference in torchrelay("explain", miss["key"][:12], environment=environment).stdout
    assert difference in torchrelay("explain", miss["key"], environment=environment).stdout

    wrong = torchrelay("explain", "0123abc", environment=environment)
    assert (wrong.returncode, wrong.stdout) == (2, "") and "no graphs of the last run" in wrong.stderr
    assert torchrelay("explain", "xyz", environment=environment).returncode == 2
    unknown = torchrelay("explain", "0" * 64, environment=environment)
    assert unknown.returncode == 1 and "nothing is known" in unknown.stderr
    astray = torchrelay("explain", environment={**environment, "TORCHRELAY_URL": "http://127.0.0.1:9"})
    assert astray.returncode == 1 and "train.py" in astray.stdout and "cannot be reached" in astray.stderr


def test_a_graph_whose_error_was_raised_is_explained_too(
    gateway: Running, environment: dict[str, str], tmp_path: Path
) -> None:
    gateway.pool.errors.append(errors.NoWorker("none for this torch"))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), "8"]
    failed = subprocess.run(command, env={**environment, "TORCHRELAY_MODE": "require"}, capture_output=True)
    assert failed.returncode == 1
    shown = torchrelay("explain", environment=environment).stdout
    assert "error: no_worker" in shown
    assert f"{gateway.pool.calls[0][:12]}: there was no entry to compare with\n" in shown


def test_the_doctors_round_trip_is_no_run(
    gateway: Running, environment: dict[str, str], tmp_path: Path
) -> None:
    gateway.pool.toolchain = local_toolchain()  # or the doctor stops at the workers
    torchrelay("doctor", environment=environment)
    assert gateway.pool.calls
    assert not list(tmp_path.rglob("last_run.json"))


def test_without_a_run_the_command_says_what_to_do(environment: dict[str, str]) -> None:
    done = torchrelay("explain", environment=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no run has left a record" in done.stderr
