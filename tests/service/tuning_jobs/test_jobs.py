"""Batch jobs over HTTP: begun, refused with the line, followed, cancelled, resumed; what they find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest
from service_parts import RedisServer, Running, compiled, graph, post, registered
from torchrelay.compiler.api.tuning.jobs import GraphTuneItem, OperatorTuneItem, TuneBudget
from torchrelay.compiler.errors import CompileFailed
from torchrelay.compiler.request import codec, schema
from torchrelay.compiler.request import key as keys
from torchrelay.compiler.tuning.queries import SearchRequest
from torchrelay.compiler.tuning.records import Operand, Problem, parse_problem
from torchrelay.service.admission import saved_requests
from torchrelay.service.jobs import records as all_records
from torchrelay.service.jobs.compiles import JobCompiles
from torchrelay.service.jobs.tuning import records, run
from tune_parts import (
    CEILINGS,
    SearchingPool,
    begin,
    begun,
    ended,
    events,
    job,
    operator,
    results,
    shown,
    states,
)
from tuning_parts import PLACE, entry, found, problem
from waiting import wait_until

StartGateway = Callable[..., Running]
GRAPH = {"Content-Type": codec.GRAPH_MEDIA_TYPE}


def refused(http: httpx2.Client, *items: Any, **fields: Any) -> tuple[str, str]:
    answer = begin(http, job(*items, **fields))
    assert answer.status_code >= 400, answer.text
    error = answer.json()["error"]
    return error["code"], error["message"]


# --- operators -------------------------------------------------------------------------------------------


def test_a_job_searches_its_problems_and_the_devices_ceilings_and_tells_all_timings(
    http: httpx2.Client, pool: SearchingPool
) -> None:
    name = begun(http, operator(16, line=3), operator(32, line=5), budget=TuneBudget(samples=40))
    told = ended(http, name)
    assert told["state"] == "done"
    assert told["items"] == {"done": 2 + CEILINGS}
    assert (told["spent"], told["trials"]) == (1.5 * (2 + CEILINGS), 3 * (2 + CEILINGS))
    found = results(http, name)
    assert [(each.line, each.ceiling, each.known) for each in found] == [
        (3, False, False),
        (5, False, False),
        (0, True, False),
        (0, True, False),
    ]
    assert found[0].item == problem(16).text()
    assert found[0].entry.winner.candidate == "triton_mm"
    assert [timing.candidate for timing in found[0].timings] == ["triton_mm", "aten mm"]
    assert [failure.why for failure in found[0].failures] == ["too much shared memory"]
    assert [each.entry.problem.op for each in found[2:]] == ["copy", "mm"]
    assert set(pool.searchers.samples) == {40}
    kept = http.get("/v1/tunings").json()["entries"]
    assert len(kept) == 2 + CEILINGS


def test_what_is_known_is_not_measured_again(http: httpx2.Client, pool: SearchingPool) -> None:
    ended(http, begun(http, operator(16), operator(32)))
    again = begun(http, operator(16), operator(48))
    told = ended(http, again)
    assert told["items"] == {"done": 1, "known": 1 + CEILINGS}
    assert told["spent"] == 1.5
    assert set(pool.searchers.measured.values()) == {1}
    known = results(http, again)[0]
    assert known.known and not known.timings


def test_exhaustive_problems_are_searched_so(http: httpx2.Client, pool: SearchingPool) -> None:
    ended(http, begun(http, operator(16, space="exhaustive")))
    assert sorted(pool.searchers.spaces) == ["default", "default", "exhaustive"]


def test_an_item_that_fails_fails_alone_and_is_tried_again_when_the_job_is_resumed(
    http: httpx2.Client, pool: SearchingPool
) -> None:
    pool.searchers.unfit.add(16)
    name = begun(http, operator(16, line=7), operator(32))
    assert ended(http, name)["items"] == {"done": 1 + CEILINGS, "failed": 1}
    failed = http.get(f"/v1/tunes/{name}").json()["progress"][0]
    assert failed["line"] == 7
    assert "does not fit the device" in failed["detail"]
    pool.searchers.unfit.clear()
    assert http.post(f"/v1/tunes/{name}/resume").status_code == 200
    assert ended(http, name)["items"] == {"done": 2 + CEILINGS}
    assert set(pool.searchers.measured.values()) == {1}


def test_a_cancelled_job_stops_and_a_resumed_one_searches_only_what_is_left(
    http: httpx2.Client, pool: SearchingPool
) -> None:
    pool.searchers.seconds = 0.2
    name = begun(http, *(operator(16 * n) for n in range(1, 13)))
    wait_until(lambda: len(pool.searchers.measured) >= 3, seconds=30)
    assert http.post(f"/v1/tunes/{name}/cancel").json()["state"] == "cancelled"
    told = shown(http, name)
    assert told["state"] == "cancelled" and told["items"]["waiting"] > 0
    measured = len(pool.searchers.measured)
    assert http.post(f"/v1/tunes/{name}/resume").json()["state"] in ("waiting", "running")
    assert sum(ended(http, name)["items"].values()) == 12 + CEILINGS
    assert len(pool.searchers.measured) == 12 + CEILINGS > measured
    assert set(pool.searchers.measured.values()) == {1}


def test_a_job_that_is_cancelled_and_resumed_at_once_is_driven_as_it_is_now(
    start_gateway: StartGateway, pool: SearchingPool
) -> None:
    """Who drove it does not take it for the job that it knew: what failed there is to be tried again."""
    gateway = start_gateway(pool, lease_seconds=30.0)
    pool.searchers.up.pop("b")
    pool.searchers.unfit.add(16)
    pool.searchers.seconds = 0.1
    with gateway.http() as http:
        name = begun(http, *(operator(16 * n) for n in range(1, 9)))
        wait_until(lambda: shown(http, name)["items"].get("failed") == 1, seconds=20)
        pool.searchers.unfit.clear()
        http.post(f"/v1/tunes/{name}/cancel")
        assert http.post(f"/v1/tunes/{name}/resume").json()["state"] != "done"
        items = ended(http, name)["items"]
        assert items.keys() <= {"done", "known"}  # the one under way was found without the job
        assert sum(items.values()) == 8 + CEILINGS
    assert set(pool.searchers.measured.values()) == {1}


@pytest.mark.parametrize("budget", [TuneBudget(trials=9), TuneBudget(seconds=4.0)])
def test_a_budget_ends_a_job_and_resuming_it_spends_another(
    http: httpx2.Client, pool: SearchingPool, budget: TuneBudget
) -> None:
    pool.searchers.up.pop("b")
    name = begun(http, *(operator(16 * n) for n in range(1, 6)), budget=budget)
    told = ended(http, name)
    assert told["items"]["skipped"] > 0
    assert 3 <= told["items"]["done"] <= 5  # what had begun is not stopped
    before = told["items"]["done"]
    http.post(f"/v1/tunes/{name}/resume")
    assert ended(http, name)["items"]["done"] > before
    assert set(pool.searchers.measured.values()) == {1}


def test_ceilings_are_measured_for_each_dtype_and_precision(http: httpx2.Client) -> None:
    texts = ["mm(f32[8,4], f32[4,8]) -> f32[8,8]", "mm(f16[8,4], f16[4,8]) -> f16[8,8]"]
    items = [OperatorTuneItem(1, parse_problem(texts[0], (("precision", p),))) for p in ("highest", "high")]
    name = begun(http, *items, OperatorTuneItem(1, parse_problem(texts[1])))
    ended(http, name)
    ceilings = _ceilings(http, name)
    assert [(p.op, p.operands[0].dtype, dict(p.settings).get("precision")) for p in ceilings] == [
        ("copy", "float32", None),
        ("mm", "float32", "highest"),
        ("mm", "float32", "high"),
        ("mm", "float16", None),
    ]


def test_a_ceiling_is_small_where_the_processor_has_no_instructions_for_a_dtype(
    http: httpx2.Client, pool: SearchingPool
) -> None:
    """2048 x 2048 of float16 take oneDNN 10 ms with such instructions, and PyTorch's plain loop 10 s without."""
    half = OperatorTuneItem(1, parse_problem("mm(f16[8,4], f16[4,8]) -> f16[8,8]"))

    def side() -> int:
        name = begun(http, half)
        ended(http, name)
        return _ceilings(http, name)[-1].result.size[0]

    assert side() == 256
    pool.target = msgspec.structs.replace(pool.target, cpu=["avx512_fp16"])
    registered(http, pool)
    assert side() == 2048


def _ceilings(http: httpx2.Client, name: str) -> list[Problem]:
    return [each.entry.problem for each in results(http, name) if each.ceiling]


# --- refusals --------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_with_its_line(http: httpx2.Client, pool: SearchingPool) -> None:
    side = Operand("float16", (8, 8), (8, 1))
    wrong = Problem("mm", (side, Operand("float16", (4, 8), (8, 1))), side)
    code, message = refused(http, operator(16), OperatorTuneItem(12, wrong))
    assert (code, message.partition(":")[0]) == ("bad_tune_job", "job.yaml, line 12")
    assert "8 columns and 4 rows" in message
    fp8 = parse_problem("scaled_mm(f8e4m3[32,64], f8e4m3[64,16], f32[], f32[]) -> bf16[32,16]")
    assert refused(http, OperatorTuneItem(4, fp8)) == (
        "bad_tune_job",
        "job.yaml, line 4: a CPU has no matrix product of float8_e4m3fn",
    )
    assert refused(http, OperatorTuneItem(4, msgspec.structs.replace(wrong, op="sort")))[0] == "bad_tune_job"
    assert refused(http, GraphTuneItem(9, "ab" * 32))[1].startswith(
        "job.yaml, line 9: the request of graph abab"
    )
    assert refused(http, operator(16), threads=0)[1].startswith("job.yaml: a job for a CPU says")
    assert http.get("/v1/tunes").json()["jobs"] == []
    assert not pool.searchers.measured


def test_a_job_that_no_worker_can_run_is_refused(http: httpx2.Client, pool: SearchingPool) -> None:
    code, message = refused(http, operator(16), device="NVIDIA H200")
    assert (code, message) == (
        "no_worker",
        f"job.yaml: no worker has NVIDIA H200; there are cpu with torch {pool.toolchain.torch}",
    )
    code, message = refused(http, operator(16), device="X", torch="1.0", lines={"torch": 3, "device": 2})
    assert message.startswith("job.yaml, line 2: no worker has X with torch 1.0; there are ")
    assert refused(http, operator(16), torch="1.0", lines={"torch": 3})[1].startswith("job.yaml, line 3: ")
    other = msgspec.structs.replace(
        codec.unpack_request(graph()), target=schema.Target("cuda", "X", "9.0", 1, [])
    )
    kept = http.post(
        "/v1/tunes/graphs",
        content=codec.pack_request(other),
        headers={"Content-Type": codec.GRAPH_MEDIA_TYPE},
    ).json()["key"]
    code, message = refused(http, operator(16), GraphTuneItem(6, kept))
    assert code == "no_worker" and message.startswith("job.yaml, line 6: no worker has X with torch")
    pool.gone = True
    registered(http, pool)
    assert refused(http, operator(16))[1].endswith("there are no workers at all")


def test_more_threads_than_any_worker_has_processors_are_refused(
    http: httpx2.Client, pool: SearchingPool
) -> None:
    ended(http, begun(http, operator(16), threads=64))  # of workers that do not tell
    pool.processors = 4
    registered(http, pool)
    ended(http, begun(http, operator(16), threads=4))
    assert refused(http, operator(16), threads=5, lines={"threads": 2}) == (
        "no_worker",
        "job.yaml, line 2: 5 threads are more than any such worker has processors (4)",
    )


def test_workers_that_have_not_started_count_for_nothing(http: httpx2.Client, pool: SearchingPool) -> None:
    pool.starting = ["c"]
    ended(http, begun(http, operator(16)))
    pool.gone = True
    registered(http, pool)
    assert refused(http, operator(16)) == ("unavailable", "no worker has started yet")


def test_who_may_only_compile_begins_no_job(http: httpx2.Client, gateway: Running) -> None:
    token = http.post("/v1/tokens", json={"name": "ada", "roles": ["compile"]}).json()["token"]
    name = begun(http, operator(16))
    with gateway.http(token) as ada:
        assert begin(ada, job(operator(16))).status_code == 403
        for what in ("cancel", "resume"):
            assert ada.post(f"/v1/tunes/{name}/{what}").status_code == 403
        assert ada.get(f"/v1/tunes/{name}").status_code == 200
    actions = [each["action"] for each in http.get("/v1/audit").json()["entries"]]
    assert actions.count("tune_begun") == 1


def test_a_job_belongs_to_its_namespace(http: httpx2.Client, gateway: Running) -> None:
    body = {"name": "eve", "roles": ["tune"], "namespace": "other"}
    token = http.post("/v1/tokens", json=body).json()["token"]
    name = begun(http, operator(16))
    with gateway.http(token) as eve:
        assert eve.get(f"/v1/tunes/{name}").status_code == 404
        assert eve.get("/v1/tunes").json()["jobs"] == []
        other = begun(eve, operator(16))
        assert ended(eve, other)["state"] == "done"
    ended(http, name)
    assert len(http.get("/v1/tunes").json()["jobs"]) == 1


def test_the_oldest_jobs_that_have_ended_make_room(
    start_gateway: StartGateway, pool: SearchingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MOST", 3)
    with start_gateway(pool).http() as http:
        names = []
        for size in (16, 32, 48, 64):
            names.append(begun(http, operator(size)))
            ended(http, names[-1])
        assert [each["id"] for each in http.get("/v1/tunes").json()["jobs"]] == names[:0:-1]
        assert http.get(f"/v1/tunes/{names[0]}").status_code == 404
        assert http.get(f"/v1/tunes/{names[0]}/results").status_code == 404
        seen = [(each["action"], each["detail"]) for each in http.get("/v1/audit").json()["entries"]]
        assert ("tune_forgotten", names[0]) in seen


def test_jobs_hold_so_many_bytes_in_redis_and_those_that_have_ended_make_room(
    http: httpx2.Client, pool: SearchingPool, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = sent(http, graph(24, nodes=50))
    pool.state = "busy"
    cancelled = [begun(http, GraphTuneItem(2, key))]
    held = int(redis_server.client().hget(f"torchrelay:tune:{cancelled[0]}", "bytes"))
    monkeypatch.setattr(all_records, "MOST_BYTES", 3 * held - 100)
    cancelled.append(begun(http, GraphTuneItem(2, key)))
    code, message = refused(http, GraphTuneItem(2, key))
    assert code == "overloaded" and f"more than {3 * held - 100}" in message
    for name in cancelled:
        http.post(f"/v1/tunes/{name}/cancel")
    begun(http, GraphTuneItem(2, key))
    assert [http.get(f"/v1/tunes/{name}").status_code for name in cancelled] == [404, 200]
    stored = redis_server.client().keys("torchrelay:tune:*:bodies")
    assert len(stored) == 2


def test_a_job_counts_what_it_still_holds(
    http: httpx2.Client, pool: SearchingPool, redis_server: RedisServer
) -> None:
    body = graph(24, nodes=50)
    compiled(http, body)
    name = begun(http, GraphTuneItem(2, keys.key_of(codec.unpack_request(body))), operator(16))
    ended(http, name)
    redis, job_key = redis_server.client(), f"torchrelay:tune:{name}"
    parts = [redis.hgetall(job_key + part).values() for part in (":items", ":results", ":progress")]
    held = sum(map(len, (value for values in parts for value in values)))
    assert not redis.exists(job_key + ":bodies")
    assert held <= int(redis.hget(job_key, "bytes")) < held + 2000


def test_a_job_of_many_problems_tells_fewer_timings_of_each(
    http: httpx2.Client, pool: SearchingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LEAST_TIMINGS", 1)
    monkeypatch.setattr(run, "ALL_TIMINGS", 3)
    name = begun(http, operator(16))
    ended(http, name)
    assert [timing.candidate for timing in results(http, name)[0].timings] == ["triton_mm"]


# --- events ----------------------------------------------------------------------------------------------


def test_events_tell_each_item_and_the_end_and_are_taken_up_where_they_broke(
    http: httpx2.Client, pool: SearchingPool
) -> None:
    name = begun(http, operator(16), operator(32))
    told = list(events(http, name))
    ends = [data["item"] for _, kind, data in told if kind == "item" and data["state"] == "done"]
    assert sorted(ends) == list(range(2 + CEILINGS))
    assert [data["state"] for _, kind, data in told if kind == "job"] == ["waiting", "running", "done"]
    assert list(events(http, name, after=told[4][0])) == told[5:]
    assert list(events(http, name, after=told[-1][0])) == []
    answer = http.get(f"/v1/tunes/{name}/events", headers={"Last-Event-ID": "x"})
    assert answer.status_code == 422


def test_what_is_searched_now_is_told(http: httpx2.Client, pool: SearchingPool) -> None:
    pool.searchers.go.clear()
    name = begun(http, operator(16))
    wait_until(lambda: ("ceiling", "searching") in states(http, name), seconds=20)
    pool.searchers.go.set()
    ended(http, name)


# --- graphs ----------------------------------------------------------------------------------------------


def test_a_graph_that_was_compiled_is_tuned_by_its_key(http: httpx2.Client, pool: SearchingPool) -> None:
    body = graph(24)
    compiled(http, body)
    plain = keys.key_of(codec.unpack_request(body))
    pool.questions = [found(entry(16)), found(entry(32))]
    pool.tuned = [(problem(16).text(), 3), (problem(32).text(), 1)]
    name = begun(http, GraphTuneItem(2, plain))
    told = ended(http, name)
    assert told["state"] == "done"
    (first, second, *_) = results(http, name)
    (tuned,) = {key for key in pool.calls if key != plain}
    assert (first.entry.problem, first.graphs) == (problem(16), [(tuned, 3)])
    assert (second.entry.problem, second.graphs) == (problem(32), [(tuned, 1)])
    request = codec.unpack_request(graph(24))
    request = msgspec.structs.replace(request, mode="max-autotune-no-cudagraphs")
    assert tuned == keys.key_of(request)
    assert http.get(f"/v1/artifacts/{tuned}").status_code == 200


def test_what_the_farm_searched_for_a_graph_is_told_with_all_timings(
    http: httpx2.Client, pool: SearchingPool
) -> None:
    body = graph(24)
    compiled(http, body)
    ended(http, begun(http, operator(32)))
    wanted = SearchRequest(PLACE, [problem(16), problem(32)])
    pool.questions = [msgspec.msgpack.encode(wanted)]
    pool.patient = True
    pool.tuned = [(problem(16).text(), 2), (problem(32).text(), 1)]
    name = begun(http, GraphTuneItem(2, keys.key_of(codec.unpack_request(body))))
    assert ended(http, name)["items"]["done"] == 1
    of_graph = {each.entry.problem: each for each in results(http, name) if each.graphs}
    assert not of_graph[problem(16)].known
    assert [timing.candidate for timing in of_graph[problem(16)].timings] == ["triton_mm", "aten mm"]
    assert of_graph[problem(32)].known and not of_graph[problem(32)].timings


def test_requests_kept_longest_ago_make_room_and_a_job_has_its_own(
    http: httpx2.Client, pool: SearchingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [graph(size, nodes=50) for size in (24, 32, 40)]
    monkeypatch.setattr(saved_requests, "BYTES", 2 * len(bodies[0]) + 20)
    pool.state = "busy"
    kept = [sent(http, bodies[0])]
    name = begun(http, GraphTuneItem(2, kept[0]))
    kept += [sent(http, body) for body in bodies[1:]]
    assert refused(http, GraphTuneItem(2, kept[0]))[0] == "bad_tune_job"
    for key in kept[1:]:
        http.post(f"/v1/tunes/{begun(http, GraphTuneItem(2, key))}/cancel")
    pool.state = "idle"
    ended(http, name)
    assert states(http, name)[0] == ("graph", "known")  # it compiled, and had no problems
    monkeypatch.setattr(saved_requests, "SENT_BYTES", 10)
    answer = http.post("/v1/tunes/graphs", content=bodies[0], headers=GRAPH)
    assert answer.status_code == 413


def sent(http: httpx2.Client, body: bytes) -> str:
    answer = http.post("/v1/tunes/graphs", content=body, headers=GRAPH)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["key"])


def test_a_graph_whose_artifact_is_there_compiles_nothing(http: httpx2.Client, pool: SearchingPool) -> None:
    body = graph(24)
    compiled(http, body)
    plain = keys.key_of(codec.unpack_request(body))
    pool.questions = [found(entry(16))]
    pool.tuned = [(problem(16).text(), 1)]
    ended(http, begun(http, GraphTuneItem(2, plain)))
    calls = len(pool.calls)
    again = begun(http, GraphTuneItem(2, plain), operator(48))
    ended(http, again)
    assert len(pool.calls) == calls
    (of_graph,) = [each for each in results(http, again) if each.graphs]
    assert of_graph.known and of_graph.entry.problem == problem(16)


def test_a_graph_that_does_not_compile_fails_alone(http: httpx2.Client, pool: SearchingPool) -> None:
    body = graph(24)
    assert post(http, body).status_code == 202
    plain = keys.key_of(codec.unpack_request(body))
    wait_until(lambda: http.get(f"/v1/artifacts/{plain}").status_code == 200, seconds=20)
    pool.errors = [CompileFailed("no such kernel")]
    name = begun(http, GraphTuneItem(2, plain), operator(16))
    assert ended(http, name)["items"]["failed"] == 1
    assert http.get(f"/v1/tunes/{name}").json()["progress"][0]["detail"] == "no such kernel"


def test_a_graph_waits_until_a_worker_has_nothing_else_to_do(
    http: httpx2.Client, pool: SearchingPool
) -> None:
    body = graph(24)
    compiled(http, body)
    plain = keys.key_of(codec.unpack_request(body))
    pool.state = "busy"
    name = begun(http, GraphTuneItem(2, plain))
    wait_until(lambda: states(http, name)[1][1] == "done", seconds=20)
    assert states(http, name)[0] == ("graph", "waiting")
    pool.state = "idle"
    assert ended(http, name)["state"] == "done"
    assert len(pool.calls) == 2


def test_a_job_is_driven_again_though_the_cancellation_of_its_graph_was_lost(
    http: httpx2.Client, pool: SearchingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to Python 3.11 asyncio.wait_for loses one that comes with Redis' answer."""
    lost, compiled_for_job = [], JobCompiles.compiled

    async def loses_one_cancellation(*arguments: Any, **named: Any) -> Any:
        try:
            return await compiled_for_job(*arguments, **named)
        except asyncio.CancelledError:
            if lost:
                raise
            lost.append(True)
            return await compiled_for_job(*arguments, **named)

    monkeypatch.setattr(JobCompiles, "compiled", loses_one_cancellation)
    body = graph(24)
    compiled(http, body)
    pool.state = "busy"
    name = begun(http, GraphTuneItem(2, keys.key_of(codec.unpack_request(body))))
    wait_until(lambda: shown(http, name)["state"] == "running", seconds=20)
    http.post(f"/v1/tunes/{name}/cancel")
    wait_until(lambda: bool(lost), seconds=20)
    http.post(f"/v1/tunes/{name}/resume")
    wait_until(lambda: shown(http, name)["state"] == "running", seconds=20)
    pool.state = "idle"
    assert ended(http, name)["state"] == "done"


def test_the_requests_of_items_that_are_done_go_with_the_jobs_end(
    http: httpx2.Client, pool: SearchingPool, redis_server: RedisServer
) -> None:
    bodies = [graph(24), graph(32)]
    names = [keys.key_of(codec.unpack_request(body)) for body in bodies]
    for body in bodies:
        compiled(http, body)
    pool.errors = [CompileFailed("no")]
    name = begun(http, *(GraphTuneItem(line, key) for line, key in enumerate(names, 2)))
    assert ended(http, name)["items"].get("failed") == 1
    left = redis_server.client().hkeys(f"torchrelay:tune:{name}:bodies")
    failed = [n for n, (_, state) in enumerate(states(http, name)[: len(names)]) if state == "failed"]
    assert [int(n) for n in left] == failed  # it may be run again
