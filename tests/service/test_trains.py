"""Training jobs over HTTP: begun, refused with the line, compiled before they run, followed, cancelled, resumed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from obstore.store import LocalStore
from redis.asyncio import Redis
from service_parts import RedisServer, Running, client_of, compiled, graph, wait_until
from torchrelay.compiler.errors import CompileFailed, Unavailable
from torchrelay.compiler.train_records import News, RankStarted
from torchrelay.service.scripts import Scripts
from torchrelay.service.training import trains
from torchrelay.service.training.progress import Progress
from torchrelay.service.training.store import TrainStore
from torchrelay.service.training.trains import Trains
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
    sent_package,
    shown,
    story,
)

StartGateway = Callable[..., Running]


@pytest.fixture
def pool(tmp_path: Path) -> TrainingPool:
    (tmp_path / "driver").mkdir()
    return TrainingPool(tmp_path / "driver")


@pytest.fixture
def gateway(start_gateway: StartGateway, pool: TrainingPool) -> Running:
    return start_gateway(pool)


@pytest.fixture
def http(gateway: Running) -> Iterator[httpx2.Client]:
    with gateway.http() as client:
        yield client


def refused(http: httpx2.Client, **fields: Any) -> tuple[str, str]:
    answer = begin(http, request(fields.pop("package", None) or sent_package(http), **fields))
    assert answer.status_code >= 400, answer.text
    error = answer.json()["error"]
    return error["code"], error["message"]


def token(http: httpx2.Client, *roles: str, **fields: Any) -> str:
    answer = http.post("/v1/tokens", json={"name": "ada", "roles": list(roles), **fields})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["token"])


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
    monkeypatch.setattr(trains, "SHELF", 4)
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
    assert logs[-1][-1] == "... (118 more lines: torchrelay train logs)"
    assert entries(http, name, "logs")[-1].event.lines == pool.says


def test_a_capture_that_fails_costs_compiles_and_no_job(http: httpx2.Client, pool: TrainingPool) -> None:
    pool.capture_error = "no module named nothing"
    name = begun(http)
    assert ended(http, name)["state"] == "done"
    (note,) = [data for _, kind, data in events(http, name) if kind == "note"]
    assert note["level"] == "warning"
    assert note["text"] == "the capture failed, ranks start cold: no module named nothing"


def test_an_elastic_jobs_graphs_are_compiled_for_all_numbers_of_ranks(
    http: httpx2.Client, pool: TrainingPool
) -> None:
    """Most and least before ranks are placed, what is between while they run."""
    pool.pace = 0.1
    name = begun(http, workers=5, min_workers=2)
    wait_until(lambda: shown(http, name)["state"] == "starting", seconds=20)
    assert pool.worlds == [5, 2]
    told = ended(http, name)
    assert pool.worlds == [5, 2, 4, 3]
    assert told["compiles"]["captured"] == told["compiles"]["compiled"] == 4
    assert len(pool.calls) == 6
    details = [data.get("detail", "") for _, kind, data in events(http, name) if kind == "state"]
    assert "one worker runs the first step of 5 ranks" in details


def test_a_number_of_ranks_whose_capture_fails_is_told_and_the_job_goes_on(
    http: httpx2.Client, pool: TrainingPool
) -> None:
    pool.pace, pool.sick_worlds = 0.05, [3]
    name = begun(http, workers=4, min_workers=2)
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
    monkeypatch.setattr("torchrelay.service.training.drive._CANCEL_SECONDS", 1.0)
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
    async def away(self: TrainStore, digest: str) -> bytes | None:
        raise Unavailable("the blob store cannot be read")

    monkeypatch.setattr(TrainStore, "package", away)
    with start_gateway(pool).http() as http:
        name = begun(http, capture=False)
        wait_until(lambda: shown(http, name)["state"] == "starting", seconds=20)
        http.post(f"/v1/trains/{name}/cancel")
        assert ended(http, name, seconds=20)["state"] == "cancelled"


def test_nodes_are_warmed_with_the_order_that_ranks_have(
    start_gateway: StartGateway, pool: TrainingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = TrainStore.package

    async def slow(self: TrainStore, digest: str) -> bytes | None:
        await asyncio.sleep(0.5)
        return await package(self, digest)

    monkeypatch.setattr(TrainStore, "package", slow)
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


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "line", "message"),
    [
        ({"script": ""}, "script", "a job runs either `script` or `function`"),
        ({"function": "a:b"}, "function", "a job runs either `script` or `function`"),
        ({"script": "../train.py"}, "script", "is no path below the working directory"),
        ({"script": "", "function": "a.b"}, "function", "is not `module:function`"),
        ({"package": "0" * 64}, "package", "package 000000000000 is not here"),
        ({"min_workers": 3}, "min_workers", "min_workers is 3, more than 2 workers"),
        ({"environment": {"WORLD_SIZE": "8"}}, "environment", "WORLD_SIZE is set by the service"),
        ({"checkpoints": "ftp://x/y"}, "checkpoints", "is no place for them"),
        ({"checkpoints": "here"}, "checkpoints", "is no place for them"),
        ({"profile": {"first": 5, "last": 5}}, "profile", "the profile's steps end before they begin"),
        ({"profile": {"first": 5, "last": 6, "ranks": [2]}}, "profile", "there is no rank 2"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(
    http: httpx2.Client, fields: dict[str, Any], line: str, message: str
) -> None:
    body = msgspec.to_builtins(request(fields.pop("package", None) or sent_package(http), lines={line: 7}))
    body["spec"] |= fields
    answer = http.post("/v1/trains", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (422, "bad_train_job")
    assert error["message"].startswith("job.yaml, line 7: ")
    assert message in error["message"]


def test_what_no_node_can_hold_is_refused(http: httpx2.Client, pool: TrainingPool) -> None:
    pool.room = "no node has a GPU"
    code, message = refused(http, device="cuda", lines={"device": 3})
    assert (code, message) == ("bad_train_job", "job.yaml, line 3: no node has a GPU")


def test_who_lacks_the_role_reads_and_begins_nothing(http: httpx2.Client, gateway: Running) -> None:
    name = begun(http, capture=False)
    ended(http, name)
    with client_of(gateway.url, token(http, "read", "compile", "tune")) as ada:
        assert shown(ada, name)["state"] == "done"
        assert entries(ada, name, "metrics")
        for path in ("packages", f"{name}/cancel", f"{name}/resume"):
            assert ada.post(f"/v1/trains/{path}", content=b"x").status_code == 403
        assert ada.put(f"/v1/trains/{name}/files/x", content=b"x").status_code == 403
        assert begin(ada, request("")).status_code == 403
    with client_of(gateway.url, token(http, "train", namespace="other")) as eve:
        assert eve.get(f"/v1/trains/{name}").status_code == 404
        assert eve.put(f"/v1/trains/{name}/files/x", content=b"x").status_code == 404
        assert refused(eve, package=name * 4)[0] == "bad_train_job"
        ended(eve, begun(eve, capture=False))
    audit = [each["action"] for each in http.get("/v1/audit").json()["entries"]]
    assert audit.count("train_begun") == 2


def test_a_job_is_its_namespaces_also_where_another_has_one_of_that_id(
    http: httpx2.Client, gateway: Running, pool: TrainingPool
) -> None:
    """Who begins a job may choose its id, and nodes know jobs of all namespaces."""
    pool.pace = 0.1
    name = begun(http, id="0123456789abcdef", capture=False)
    with client_of(gateway.url, token(http, "train", namespace="other")) as eve:
        assert begun(eve, id=name, capture=False) == name
        wait_until(lambda: shown(eve, name)["state"] == "running", seconds=20)
        eve.post(f"/v1/trains/{name}/cancel")
        assert ended(eve, name)["state"] == "cancelled"
        folders = {order.namespace: order.folder for order in pool.orders}
        assert folders["other"] != folders["default"]
    assert ended(http, name)["state"] == "done"


def test_so_many_jobs_may_be_open(start_gateway: StartGateway, pool: TrainingPool) -> None:
    pool.pace = 60
    gateway = start_gateway(pool, train_open_jobs=1, train_package_bytes=1000)
    with gateway.http() as http:
        name = begun(http, capture=False)
        assert refused(http)[0] == "overloaded"
        assert http.post("/v1/trains/packages", content=b"x" * 1001).status_code == 413
        http.post(f"/v1/trains/{name}/cancel")
        other = begun(http, capture=False)
        assert http.post(f"/v1/trains/{name}/resume").status_code == 429
        http.post(f"/v1/trains/{other}/cancel")


def test_files_are_bounded_and_replaced(start_gateway: StartGateway, pool: TrainingPool) -> None:
    gateway = start_gateway(pool, train_file_bytes=10, train_files_bytes=15)
    with gateway.http() as http:
        name = begun(http, capture=False)
        url = f"/v1/trains/{name}/files"
        assert http.put(f"{url}/a", content=b"x" * 11).status_code == 413
        assert http.put(f"{url}/a", content=b"x" * 10).status_code == 200
        assert http.put(f"{url}/b", content=b"y" * 10).status_code == 413
        assert http.put(f"{url}/a", content=b"y" * 9).status_code == 200
        assert [file["name"] for file in http.get(url).json()["files"]] == ["a"]
        assert http.get(f"{url}/a").content == b"y" * 9
        assert http.get(f"{url}/b").status_code == 404
        for wrong in ("%2E%2E/a", "a/%2E%2E/b", ".hidden", "a//b", "a b"):
            assert http.put(f"{url}/{wrong}", content=b"").status_code in (404, 422), wrong


def test_folders_of_jobs_that_are_done_go_and_those_of_all_others_stay(
    start_gateway: StartGateway, pool: TrainingPool, tmp_path: Path
) -> None:
    with start_gateway(pool).http() as http:
        done = begun(http, capture=False)
        ended(http, done)
        used = begun(http, capture=False)
        ended(http, used)
        pool.ends = "failed"
        failed = begun(http, capture=False, checkpoints=f"/somewhere/{used}/checkpoints")
        ended(http, failed)
        pool.pace = 60.0
        runs = begun(http, capture=False)
        roots = [tmp_path / "state" / "trains" / name for name in (done, used, failed, runs, "not-a-jobs")]
        for root in roots:
            (root / "checkpoints").mkdir(parents=True)
            for path in (root / "checkpoints" / "data", root / "checkpoints", root):
                path.touch()
                os.utime(path, (1, 1))
        wait_until(lambda: shown(http, runs)["state"] == "starting", seconds=20)
        unasked = start_gateway(TrainingPool(pool.folder))  # it looks as it starts
        unasked.stop()
        assert all(root.exists() for root in roots), "nobody said how long they stay"
        start_gateway(TrainingPool(pool.folder), train_keep_seconds=3600.0)
        wait_until(lambda: not roots[0].exists(), seconds=20)
        assert all(root.exists() for root in roots[1:])
        http.post(f"/v1/trains/{runs}/cancel")


def test_files_that_are_refused_or_replaced_do_not_stay_in_the_blob_store(
    start_gateway: StartGateway, pool: TrainingPool, tmp_path: Path
) -> None:
    with start_gateway(pool, train_files_bytes=15).http() as http:
        name = begun(http, capture=False)
        ended(http, name)
        url = f"/v1/trains/{name}/files"
        for data in (b"1" * 10, b"2" * 10, b"3" * 10):
            assert http.put(f"{url}/a", content=data).status_code == 200
        assert http.put(f"{url}/b", content=b"4" * 10).status_code == 413
        (folder,) = tmp_path.rglob(f"{name}/files")
        assert len(list(folder.iterdir())) == 3
        for path in folder.iterdir():
            os.utime(path, (1, 1))
        start_gateway(TrainingPool(pool.folder))  # it looks as it starts
        wait_until(lambda: len(list(folder.iterdir())) == 1, seconds=20)
        assert http.get(f"{url}/a").content == b"3" * 10


def test_a_job_that_redis_has_lost_is_written_again_though_as_many_as_may_are_open(
    start_gateway: StartGateway, redis_server: RedisServer, pool: TrainingPool
) -> None:
    pool.pace = 60
    with start_gateway(pool, train_open_jobs=1).http() as http, redis_server.client() as redis:
        name = begun(http, capture=False)
        wait_until(lambda: shown(http, name)["state"] == "starting", seconds=20)
        redis.delete(f"torchrelay:train:{name}")
        redis.zadd("torchrelay:trains_open", {"0" * 16: 1})
        wait_until(lambda: http.get(f"/v1/trains/{name}").status_code == 200, seconds=20)
        http.post(f"/v1/trains/{name}/cancel")


def test_redis_does_not_fill_up_while_the_blob_store_is_away(
    http: httpx2.Client, pool: TrainingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trains, "SHELF", 2)
    for name, value in (("SHELF", 2), ("_UNSHELVED_BYTES", 100), ("_MOST_UNSHELVED_BYTES", 3000)):
        monkeypatch.setattr(f"torchrelay.service.training.drive.{name}", value)
    sound = TrainStore.put_shelf

    async def away(self: TrainStore, *_: object) -> None:
        raise Unavailable("the blob store takes nothing")

    monkeypatch.setattr(TrainStore, "put_shelf", away)
    pool.pace = 0.05
    name = begun(http, capture=False)
    wait_until(lambda: shown(http, name).get("step", 0) >= 2, seconds=20)
    time.sleep(STEPS * 2 * pool.pace + 2)  # its ranks have taken all steps
    assert shown(http, name)["step"] < STEPS - 1
    monkeypatch.setattr(TrainStore, "put_shelf", sound)
    assert ended(http, name)["state"] == "done"
    assert [each.event.step for each in entries(http, name, "metrics")] == list(range(STEPS))


def test_who_does_not_drive_a_job_any_more_takes_nothing_of_it_to_the_blob_store(
    gateway: Running, redis_server: RedisServer, pool: TrainingPool, tmp_path: Path
) -> None:
    pool.pace = 0.1
    with gateway.http() as http:
        name = begun(http, capture=False)
        wait_until(lambda: shown(http, name).get("step", 0) >= 3, seconds=20)
        tenant = gateway.app.state.gateway.tenants.default

        async def shelve() -> None:
            redis = Redis.from_url(redis_server.url)
            store = TrainStore(LocalStore(tmp_path / "elsewhere", mkdir=True), "default")
            stale = Trains(
                redis, tenant.keys, Scripts(redis), store, lease_seconds=1, most_open=1, files_bytes=1
            )
            await stale.shelve(name, "another", all_of_it=True)
            await redis.aclose()

        asyncio.run(shelve())
        assert ended(http, name)["state"] == "done"
        assert [each.event.step for each in entries(http, name, "metrics")] == list(range(STEPS))


def test_open_jobs_are_counted_by_state(http: httpx2.Client, pool: TrainingPool) -> None:
    pool.pace = 60
    begun(http, capture=False)
    line = 'torchrelay_trains{state="starting"} 1.0'
    wait_until(lambda: line in http.get("/metrics").text, seconds=20)


# --- progress --------------------------------------------------------------------------------------------


def test_counters_are_of_the_ranks_that_run_now() -> None:
    progress = Progress()
    for attempt in (0, 1):
        for event in story(attempt)[:-3]:
            progress.hear(event)
        assert progress.compiles().hits == 6
        assert progress.first_step_seconds == 3.0
    assert (progress.started, progress.restarts, progress.ranks) == (1001.0, 1, 2)
    progress.hear(RankStarted(rank=0, world_size=2, pid=1, host="a", attempt=2, at=2000))
    assert (progress.compiles().hits, progress.started) == (0, 1001.0)
    again = msgspec.json.decode(msgspec.json.encode(progress), type=Progress)
    assert again == progress


def test_news_of_every_kind_pass_json() -> None:
    for number, event in enumerate(story(0), 1):
        news = News(number, event)
        assert msgspec.json.decode(msgspec.json.encode(news), type=News) == news
