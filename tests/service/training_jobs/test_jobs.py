"""Training jobs over HTTP: begun, compiled before they run, followed, cancelled, resumed (refusals and bounds:
test_bounds.py)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import msgspec
import pytest
from redis import Redis
from service_parts import GatewayProcess, RedisServer, Running, client_of, compiled, graph, post
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training.events import AFTER_HEADER, NumberedEvent, RankStarted, StateChanged
from torchrelay.compiler.errors import CompileFailed, Unavailable
from torchrelay.service.jobs.training import records as training_records
from torchrelay.service.jobs.training.files import TrainingFiles
from torchrelay.service.jobs.training.progress import TrainingJobProgress
from torchrelay.service.jobs.training.run import TrainingJobRun
from torchrelay.service.storage.redis.keys import Keys
from training_parts import (
    PACKAGE,
    STEPS,
    TrainingPool,
    begin,
    begun,
    ended,
    entries,
    events,
    request,
    shown,
    story,
)
from waiting import wait_until

StartGateway = Callable[..., Running]


# --- a job's way -----------------------------------------------------------------------------------------


def test_graphs_are_compiled_before_ranks_are_placed_and_all_that_they_tell_is_told(
    http: httpx2.Client, pool: TrainingPool
) -> None:
    compiled(http, graph(24))
    name = begun(http)
    told = ended(http, name)
    assert (told["state"], told["step"], told["checkpoint"]) == ("done", STEPS - 1, f"step-{STEPS}")
    assert told["compiles"] == {"captured": 2, "compiled": 1, "hits": 6, "fallbacks": 1}
    assert told["skipped"] == ["graph 3: a tensor subclass"]
    assert (told["started"], told["first_step_seconds"]) == (1001.0, 3.0)
    assert len(pool.calls) == 2
    states = [data["state"] for _, name_, data in events(http, name) if name_ == "state"]
    assert states == ["waiting", "capturing", "compiling", "starting", "starting", "running", "done"]
    numbers = [number for number, _, _ in events(http, name)]
    assert numbers == list(range(1, len(numbers) + 1))
    names = [name_ for _, name_, _ in events(http, name) if name_ != "state"]
    assert len(names) == len(story(0)) - 3
    assert pool.engine(name).forgotten == 1


def test_what_nodes_are_given(http: httpx2.Client, gateway: Running, pool: TrainingPool) -> None:
    name = begun(http, capture=False)
    ended(http, name)
    (order,) = pool.orders
    assert (order.job, order.package, order.namespace, order.resumes) == (name, PACKAGE, "default", 0)
    assert order.folder == str(gateway.settings.state_dir / "trains")
    assert order.environment["TORCHRELAY_URL"] == gateway.settings.rank_url
    info = http.get("/v1/info").json()
    assert order.environment["TORCHRELAY_PUBLIC_KEYS"] == ",".join(info["public_keys"])
    assert pool.captures == 0


def test_values_of_a_jobs_environment_reach_its_nodes_and_no_reader(
    http: httpx2.Client, gateway: Running, pool: TrainingPool
) -> None:
    secret = {"WANDB_API_KEY": "a-secret"}
    name = begun(http, environment=secret, capture=False)
    ended(http, name)
    (order,) = pool.orders
    assert order.spec.environment == secret
    answers = [http.get("/v1/trains"), http.get(f"/v1/trains/{name}"), http.post(f"/v1/trains/{name}/cancel")]
    answers.append(http.get(f"/v1/trains/{name}/history"))
    assert ["a-secret" in each.text for each in answers] == [False] * 4
    assert ["WANDB_API_KEY" in each.text for each in answers[:3]] == [True] * 3


def test_the_jobs_token_expires_unless_a_gateway_runs_the_job(
    start_gateway: StartGateway,
    pool: TrainingPool,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchrelay.service.jobs.training.run.EXTEND_SECONDS", 0.0)
    pool.pace = 60

    def token(redis: Redis) -> tuple[bytes, dict[str, Any]]:
        ((field, data),) = redis.hgetall("torchrelay:tokens").items()
        return field, decoding.from_json(data)

    with start_gateway(pool).http() as http, redis_server.client() as redis:
        name = begun(http, capture=False)
        wait_until(lambda: redis.hlen("torchrelay:tokens") == 1, seconds=20)
        field, record = token(redis)
        assert time.time() + 86400 < record["expires"] <= time.time() + 2 * 86400
        redis.hset("torchrelay:tokens", field, msgspec.json.encode({**record, "expires": 1}))
        wait_until(lambda: token(redis)[1]["expires"] > time.time() + 86400, seconds=20)
        http.post(f"/v1/trains/{name}/cancel")
        ended(http, name)
        assert token(redis)[1]["revoked"]


def test_a_large_file_is_streamed_and_a_damaged_one_breaks_off(
    http: httpx2.Client, gateway: Running, start_process: Callable[[float], GatewayProcess]
) -> None:
    name, data = begun(http, capture=False), os.urandom(64 << 20)
    path = f"/v1/trains/{name}/files/model.pt"
    assert http.put(path, content=data).status_code == 200
    process = start_process(0)
    before = process.most_memory()
    with process.http() as other:
        assert other.get(path).content == data
        assert process.most_memory() - before < 20 << 20
        (stored,) = (gateway.settings.state_dir / "blobs" / "trains").rglob("files/*")
        stored.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(httpx2.RemoteProtocolError):
            other.get(path)


def test_the_jobs_token_compiles_and_puts_its_files_until_the_job_has_ended(
    http: httpx2.Client, gateway: Running, pool: TrainingPool
) -> None:
    pool.pace = 0.05
    name = begun(http, capture=False)
    wait_until(lambda: bool(pool.orders), seconds=20)
    with client_of(gateway.url, pool.orders[0].environment["TORCHRELAY_TOKEN"]) as rank:
        compiled(rank, graph(8))
        assert rank.put(f"/v1/trains/{name}/files/a/trace.json", content=b"{}").json()["bytes"] == 2
        other = begun(http, capture=False)
        assert rank.put(f"/v1/trains/{other}/files/x", content=b"{}").status_code == 403
        assert rank.post(f"/v1/trains/{name}/cancel").status_code == 403
        assert begin(rank, request("")).status_code == 403
        ended(http, name)
        assert rank.get("/v1/info").status_code == 401
    assert http.get(f"/v1/trains/{name}/files/a/trace.json").content == b"{}"
    records = [each for each in http.get("/v1/tokens").json() if each["name"].endswith(name)]
    assert records and all(each.get("revoked") for each in records)


def test_metrics_and_logs_come_in_pages_also_from_the_blob_store(
    http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_records, "ARCHIVE_ENTRIES", 4)
    name = begun(http, capture=False)
    ended(http, name)
    found = entries(http, name, "metrics", limit=3)
    assert [each.event.step for each in found] == list(range(STEPS))
    assert [each.event.lines for each in entries(http, name, "logs", rank=1, limit=2)] == [
        [f"step {n}"] for n in range(1, STEPS, 2)
    ]
    assert len(entries(http, name, "logs", rank=-1)) == STEPS
    by_events = [number for number, kind, _ in events(http, name) if kind == "metrics"]
    assert [each.number for each in found] == by_events


def test_long_logs_are_cut_among_the_events_and_whole_in_the_logs(
    http: httpx2.Client, pool: TrainingPool
) -> None:
    pool.says = ["x" * 100] * 200
    name = begun(http, capture=False)
    ended(http, name)
    logs = [data["lines"] for _, kind, data in events(http, name) if kind == "log"]
    assert logs[-1][-1] == "... (`torchrelay train logs` shows all lines)"
    assert entries(http, name, "logs")[-1].event.lines == pool.says


def test_a_capture_that_fails_costs_compiles_and_no_job(http: httpx2.Client, pool: TrainingPool) -> None:
    pool.capture_error = "no module named nothing"
    name = begun(http)
    assert ended(http, name)["state"] == "done"
    (note,) = [data for _, kind, data in events(http, name) if kind == "note"]
    assert note["level"] == "warning"
    assert note["text"] == "the capture failed, ranks start cold: no module named nothing"


def test_an_elastic_jobs_graphs_are_compiled_for_its_largest_and_smallest_number_of_ranks(
    http: httpx2.Client, pool: TrainingPool
) -> None:
    name = begun(http, workers=5, min_workers=2)
    job = ended(http, name)
    assert pool.worlds == [5, 2]
    assert job["compiles"]["captured"] == job["compiles"]["compiled"] == len(pool.calls) == 4
    details = [data.get("detail", "") for _, kind, data in events(http, name) if kind == "state"]
    assert "one worker runs the first step of 5 ranks" in details


def test_a_number_of_ranks_whose_capture_fails_is_told_and_the_job_goes_on(
    http: httpx2.Client, pool: TrainingPool
) -> None:
    pool.sick_worlds = [3]
    name = begun(http, workers=4, min_workers=3)
    assert ended(http, name)["state"] == "done"
    assert [data["text"] for _, kind, data in events(http, name) if kind == "note"] == [
        "the capture of 3 ranks failed: ValueError: 8 is no multiple of 3"
    ]


def test_a_graph_that_does_not_compile_is_named_and_the_others_are_compiled(
    http: httpx2.Client, pool: TrainingPool
) -> None:
    pool.errors = [CompileFailed("no such kernel")]
    told = ended(http, begun(http))
    assert told["compiles"]["compiled"] == 1
    assert told["skipped"] == ["graph 3: a tensor subclass", "no such kernel"]


def test_a_graph_that_a_quota_refuses_for_long_holds_no_job_up(
    start_gateway: StartGateway, pool: TrainingPool
) -> None:
    pool.seconds = 0.1
    with start_gateway(pool, namespace_compile_seconds=0.01).http() as http:
        compiled(http, graph(8))
        told = ended(http, begun(http))
        assert told["state"] == "done"
        assert any("spent its quota" in why for why in told["skipped"])


def test_events_go_on_after_the_last_that_is_known(http: httpx2.Client, pool: TrainingPool) -> None:
    pool.pace = 0.02
    name = begun(http, capture=False)
    seen = [each for each, _ in zip(events(http, name), range(9), strict=False)]
    rest = list(events(http, name, after=seen[-1][0]))
    assert [number for number, _, _ in [*seen, *rest]] == list(range(1, len(seen) + len(rest) + 1))
    assert rest[-1][2]["state"] == "done"
    wrong = http.get(f"/v1/trains/{name}/events", headers={"Last-Event-ID": "1-0"})
    assert wrong.status_code == 422


def test_a_job_is_begun_once_however_often_it_is_sent(http: httpx2.Client, pool: TrainingPool) -> None:
    name = "0123456789abcdef"
    assert {begun(http, id=name, capture=False) for _ in range(3)} == {name}
    ended(http, name)
    assert pool.engine(name).begun == 1
    assert [job["id"] for job in http.get("/v1/trains").json()["jobs"]] == [name]


# --- cancel, resume, time ---------------------------------------------------------------------------------


def test_a_cancelled_job_ends_and_a_resumed_one_goes_on(http: httpx2.Client, pool: TrainingPool) -> None:
    pool.pace = 0.05
    name = begun(http)
    wait_until(lambda: shown(http, name).get("step", 0) >= 2, seconds=30)
    answer = http.post(f"/v1/trains/{name}/cancel").json()
    assert (answer["state"], answer["detail"]) == ("cancelled", "cancelled by owner")
    last = list(events(http, name))[-1]
    assert last[2]["state"] == "cancelled"
    pool.pace = 0.0
    assert http.post(f"/v1/trains/{name}/resume").json()["state"] not in ("cancelled", "failed")
    told = ended(http, name)
    assert (told["state"], told["step"]) == ("done", 2 * STEPS - 1)
    assert [order.resumes for order in pool.orders] == [0, 0, 1]  # of the capture, of both begins
    assert pool.captures == 1
    rest = list(events(http, name, after=last[0]))
    assert next(data["state"] for _, kind, data in rest if kind == "state") == "waiting"
    assert rest[-1][2]["state"] == "done"
    assert http.post(f"/v1/trains/{name}/resume").json()["error"]["code"] == "bad_train_job"
    assert http.post(f"/v1/trains/{name}/cancel").json()["state"] == "done"


def test_a_job_that_tells_something_all_the_time_hears_that_it_is_cancelled(
    start_gateway: StartGateway, pool: TrainingPool
) -> None:
    """A wish is kept apart from what the job tells: the next telling does not write over it."""
    pool.pace, pool.steps = 0.02, 1000
    gateway = start_gateway(pool, lease_seconds=30.0)  # it listens a second after it was woken
    with gateway.http() as http:
        name = begun(http, capture=False)
        wait_until(lambda: shown(http, name).get("step", 0) >= 2, seconds=30)
        answer = http.post(f"/v1/trains/{name}/cancel").json()
        assert (answer["state"], answer["detail"]) == ("cancelled", "cancelled by owner")


def test_a_job_is_cancelled_in_its_capture(http: httpx2.Client, pool: TrainingPool) -> None:
    pool.capture_seconds = 100
    name = begun(http)
    wait_until(lambda: shown(http, name)["state"] == "capturing", seconds=20)
    assert http.post(f"/v1/trains/{name}/cancel").json()["state"] == "cancelled"
    assert pool.engine(name).begun == 0


def test_compiles_of_a_cancelled_job_for_which_nobody_else_waits_end(
    start_gateway: StartGateway, pool: TrainingPool
) -> None:
    pool.seconds = 100
    with start_gateway(pool, abandon_seconds=1.0).http() as http:
        name = begun(http)
        wait_until(lambda: len(pool.calls) == 2, seconds=20)
        time.sleep(3)  # it waits itself
        assert not pool.cancelled
        assert http.post(f"/v1/trains/{name}/cancel").json()["state"] == "cancelled"
        wait_until(lambda: sorted(pool.cancelled) == sorted(pool.calls), seconds=20)


def test_a_job_is_cancelled_while_it_waits_for_room_for_its_capture(
    http: httpx2.Client, pool: TrainingPool
) -> None:
    pool.room_seconds = 100
    name = begun(http)
    wait_until(lambda: pool.captures == 1, seconds=20)
    told = shown(http, name)
    assert (told["state"], told["detail"]) == ("waiting", "for a worker that has room for its capture")
    assert http.post(f"/v1/trains/{name}/cancel").json()["state"] == "cancelled"


def test_a_job_is_cancelled_while_its_driver_is_made(http: httpx2.Client, pool: TrainingPool) -> None:
    """Whoever is told to end before it is there does not hear it."""
    pool.pace, pool.begin_seconds = 1.0, 2.0
    name = begun(http, capture=False)
    wait_until(lambda: bool(pool.orders), seconds=20)
    assert http.post(f"/v1/trains/{name}/cancel").json()["state"] == "cancelled"
    assert pool.engine(name).turns[0].stopped > 0


def test_ranks_that_tell_nothing_of_a_cancel_lose_their_driver(
    http: httpx2.Client, pool: TrainingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrelay.service.jobs.training.run.CANCEL_SECONDS", 1.0)
    pool.pace, pool.stubborn = 0.3, True
    name = begun(http, capture=False)
    wait_until(lambda: shown(http, name)["state"] == "running", seconds=20)
    assert http.post(f"/v1/trains/{name}/cancel").json()["state"] == "cancelled"
    assert pool.engine(name).forgotten == 1


def test_a_job_that_runs_for_too_long_fails(http: httpx2.Client, pool: TrainingPool) -> None:
    pool.pace = 0.2
    told = ended(http, begun(http, capture=False, timeout_seconds=0.5))
    assert (told["state"], told["detail"]) == ("failed", "it ran for longer than its timeout of 0.5 s")


def test_a_job_that_ran_for_too_long_has_its_whole_time_again_when_it_is_resumed(
    http: httpx2.Client, pool: TrainingPool
) -> None:
    pool.pace, pool.at = 0.5, time.time()
    name = begun(http, capture=False, timeout_seconds=4)
    assert ended(http, name)["state"] == "failed"
    pool.pace, pool.at = 0.05, time.time() + 2
    pool.begin_seconds = 2.0  # more than it takes to see that a job is over its time
    http.post(f"/v1/trains/{name}/resume")
    assert ended(http, name)["state"] == "done"


def test_a_job_whose_driver_is_not_to_be_had_is_cancelled(http: httpx2.Client, pool: TrainingPool) -> None:
    pool.begin_seconds = 60
    name = begun(http, capture=False)
    wait_until(lambda: bool(pool.orders), seconds=20)
    http.post(f"/v1/trains/{name}/cancel")
    assert ended(http, name, seconds=20)["state"] == "cancelled"


def test_a_job_whose_driver_does_not_answer_is_cancelled(http: httpx2.Client, pool: TrainingPool) -> None:
    pool.pace = 0.2
    name = begun(http, capture=False)
    wait_until(lambda: shown(http, name)["state"] == "running", seconds=20)
    pool.silent = True
    http.post(f"/v1/trains/{name}/cancel")
    assert ended(http, name, seconds=20)["state"] == "cancelled"
    assert pool.engine(name).forgotten == 1


def test_a_job_whose_package_cannot_be_read_now_is_cancelled(
    start_gateway: StartGateway, pool: TrainingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(self: TrainingFiles, digest: str) -> bytes | None:
        raise Unavailable("the blob store cannot be read")

    monkeypatch.setattr(TrainingFiles, "package", away)
    with start_gateway(pool).http() as http:
        name = begun(http, capture=False)
        wait_until(lambda: shown(http, name)["state"] == "starting", seconds=20)
        http.post(f"/v1/trains/{name}/cancel")
        assert ended(http, name, seconds=20)["state"] == "cancelled"


def test_nodes_are_warmed_with_the_order_that_ranks_have(
    start_gateway: StartGateway, pool: TrainingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = TrainingFiles.package

    async def slow(self: TrainingFiles, digest: str) -> bytes | None:
        await asyncio.sleep(0.5)
        return await package(self, digest)

    monkeypatch.setattr(TrainingFiles, "package", slow)
    with start_gateway(pool).http() as http:
        name = begun(http)
        assert ended(http, name)["state"] == "done"
    warmed, captured, trained = *pool.warmed, *pool.orders
    assert warmed == captured == trained


def test_a_failed_job_says_why_and_is_resumed(http: httpx2.Client, pool: TrainingPool) -> None:
    pool.ends = "failed"
    name = begun(http, capture=False)
    told = ended(http, name)
    assert (told["state"], told["detail"]) == ("failed", "rank 0 ended with 1")
    pool.ends = "done"
    http.post(f"/v1/trains/{name}/resume")
    assert ended(http, name)["state"] == "done"


def test_a_driver_that_is_lost_is_begun_again(http: httpx2.Client, pool: TrainingPool) -> None:
    pool.pace = 0.05
    name = begun(http, capture=False)
    wait_until(lambda: shown(http, name).get("step", 0) >= 2, seconds=20)
    pool.lose(name)
    assert ended(http, name)["state"] == "done"
    states = [data["state"] for _, kind, data in events(http, name) if kind == "state"]
    assert "recovering" in states
    assert pool.engine(name).begun == 1


def test_a_job_that_is_cancelled_is_not_begun_again_for_its_driver_is_lost(
    http: httpx2.Client, pool: TrainingPool
) -> None:
    pool.pace, pool.stubborn = 0.3, True
    name = begun(http, capture=False)
    wait_until(lambda: shown(http, name)["state"] == "running", seconds=20)
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(http.post, f"/v1/trains/{name}/cancel")
        wait_until(lambda: pool.cancels > 0, seconds=20)
        pool.lose(name)
        assert answer.result().json()["state"] == "cancelled"
    assert pool.engine(name).begun == 1
    assert len(pool.orders) == 1


# --- progress --------------------------------------------------------------------------------------------


def test_counters_are_of_the_ranks_that_run_now() -> None:
    progress = TrainingJobProgress()
    for attempt in (0, 1):
        for event in story(attempt)[:-3]:
            progress.apply(event)
        assert progress.compiles().hits == 6
        assert progress.first_step_seconds == 3.0
    assert (progress.started, progress.restarts, progress.ranks) == (1001.0, 1, 2)
    progress.apply(RankStarted(rank=0, world_size=2, pid=1, host="a", attempt=2, at=2000))
    assert (progress.compiles().hits, progress.started) == (0, 1001.0)
    again = decoding.from_json(msgspec.json.encode(progress), type=TrainingJobProgress)
    assert again == progress


@pytest.mark.parametrize(
    ("told", "since"),
    [(1000.0, 1000.0), (2.0**53, 5000.0), (float("inf"), 5000.0), (float("nan"), 5000.0), (0.0, 5000.0)],
)
def test_a_jobs_time_begins_no_later_than_now_whatever_its_driver_tells(
    told: float, since: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    progress = TrainingJobProgress()
    progress.apply(StateChanged(state="running", at=told))
    assert progress.since == since


def test_news_of_every_kind_pass_json() -> None:
    for number, event in enumerate(story(0), 1):
        news = NumberedEvent(number, event)
        assert decoding.from_json(msgspec.json.encode(news), type=NumberedEvent) == news


def test_a_persons_compile_goes_before_a_jobs_graphs_that_wait(
    http: httpx2.Client, pool: TrainingPool
) -> None:
    pool.idle, pool.seconds = 1, 0.5
    pool.captured = [graph(24 + 8 * n) for n in range(6)]
    job = begun(http)
    wait_until(lambda: len(pool.calls) == 1, seconds=20)
    person = post(http, graph(7)).json()["key"]
    assert ended(http, job)["compiles"]["compiled"] == 6
    assert pool.calls.index(person) == 1
    assert len(pool.calls) == 7


def test_a_graph_that_a_job_and_a_person_want_compiles_once_and_before_the_jobs_others(
    http: httpx2.Client, pool: TrainingPool
) -> None:
    pool.idle = 0
    pool.captured = [graph(24 + 8 * n) for n in range(6)]
    job = begun(http)
    wait_until(lambda: http.get("/v1/stats").json()["misses"] == 6, seconds=20)
    answer = post(http, pool.captured[-1])
    assert answer.headers["x-torchrelay-cache"] == "coalesced"
    pool.idle = 1
    pool.changed()
    assert ended(http, job)["compiles"]["compiled"] == 6
    assert pool.calls[0] == answer.json()["key"]
    assert len(pool.calls) == len(set(pool.calls)) == 6


def test_what_a_cancelled_job_has_queued_is_withdrawn(
    http: httpx2.Client, pool: TrainingPool, redis_server: RedisServer
) -> None:
    pool.idle = 0
    pool.captured = [graph(24 + 8 * n) for n in range(3)]
    job = begun(http)
    with redis_server.client() as redis:
        wait_until(lambda: redis.zcard(Keys("torchrelay:").pending) == 3, seconds=20)
        http.post(f"/v1/trains/{job}/cancel")
        assert ended(http, job)["state"] == "cancelled"
        wait_until(lambda: redis.zcard(Keys("torchrelay:").pending) == 0, seconds=30)
    assert not pool.calls


def test_a_page_of_a_ranks_logs_reads_few_segments_and_the_next_page_goes_on(
    http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_records, "ARCHIVE_ENTRIES", 1)
    job = begun(http)
    ended(http, job)
    reads, segment = [], TrainingFiles.segment

    async def counted(store: TrainingFiles, job: str, what: str, first: int, last: int) -> bytes | None:
        reads.append(first)
        return await segment(store, job, what, first, last)

    monkeypatch.setattr(TrainingFiles, "segment", counted)
    nobody = {"rank": 77, "limit": 1}
    page = http.get(f"/v1/trains/{job}/logs", params=nobody)
    assert (page.status_code, page.content) == (200, b"")
    assert 0 < len(reads) < STEPS
    following = {**nobody, "after": page.headers[AFTER_HEADER]}
    page = http.get(f"/v1/trains/{job}/logs", params=following)
    assert AFTER_HEADER not in page.headers
    assert len(reads) == len(set(reads)) == STEPS


def test_a_job_whose_run_breaks_each_time_ends_with_the_reason(
    http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    async def breaks(job: TrainingJobRun) -> None:
        runs.append(job.id)
        raise KeyError("a secret of the service")

    monkeypatch.setattr(TrainingJobRun, "run", breaks)
    job = ended(http, begun(http), seconds=120)
    assert (job["state"], len(runs)) == ("failed", 3)
    assert "could not run it" in job["detail"] and "KeyError" in job["detail"]
    assert "secret" not in job["detail"]
