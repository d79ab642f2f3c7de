"""What of training jobs is refused, whose they are, and what is bounded, replaced or tidied away."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from obstore.store import LocalStore
from redis.asyncio import Redis
from service_parts import RedisServer, Running, client_of, registered
from torchrelay.compiler.errors import Unavailable
from torchrelay.service.jobs.training import records, retention
from torchrelay.service.jobs.training.files import TrainingFiles
from torchrelay.service.jobs.training.records import TrainingJobs
from torchrelay.service.parts import background
from torchrelay.service.storage.installation import Installation
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts
from training_parts import (
    STEPS,
    TrainingPool,
    begin,
    begun,
    ended,
    entries,
    request,
    sent_package,
    shown,
)
from waiting import wait_until

StartGateway = Callable[..., Running]


def refused(http: httpx2.Client, **fields: Any) -> tuple[str, str]:
    answer = begin(http, request(fields.pop("package", None) or sent_package(http), **fields))
    assert answer.status_code >= 400, answer.text
    error = answer.json()["error"]
    return error["code"], error["message"]


def token(http: httpx2.Client, *roles: str, **fields: Any) -> str:
    answer = http.post("/v1/tokens", json={"name": "ada", "roles": list(roles), **fields})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["token"])


@pytest.mark.parametrize(
    ("fields", "line", "message"),
    [
        ({"script": ""}, "script", "a job has a script (train.py), or a function"),
        ({"function": "a:b"}, "function", "a job has a script (train.py), or a function"),
        ({"script": "../train.py"}, "script", "it is relative to the working directory"),
        ({"script": "", "function": "a.b"}, "function", "allowed: module:function"),
        ({"package": "0" * 64}, "package", "package 000000000000 is not here"),
        ({"min_workers": 3}, "min_workers", "min_workers is 3, and workers 2"),
        ({"environment": {"WORLD_SIZE": "8"}}, "environment", "WORLD_SIZE is set by the service"),
        ({"checkpoints": "ftp://x/y"}, "checkpoints", "allowed: a folder that all nodes see"),
        ({"checkpoints": "here"}, "checkpoints", "allowed: a folder that all nodes see"),
        ({"profile": {"first": 5, "last": 5}}, "profile", "profile's steps end at 5, and begin at 5"),
        ({"profile": {"first": 5, "last": 6, "ranks": [2]}}, "profile", "profile's ranks are from 0 to 1"),
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
    pool.nodes = [{"torchrelay_worker": 1.0, "CPU": 4.0}]
    registered(http, pool)
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
    start_gateway: StartGateway, pool: TrainingPool, tmp_path: Path, redis_server: RedisServer
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
        with redis_server.client() as redis:
            redis.hset("torchrelay:installation", "since", 0)
        unlimited = start_gateway(TrainingPool(pool.folder), train_keep_seconds=0)  # it looks as it starts
        unlimited.stop()
        assert all(root.exists() for root in roots)
        start_gateway(TrainingPool(pool.folder))
        wait_until(lambda: not roots[0].exists(), seconds=20)
        assert all(root.exists() for root in roots[1:])
        http.post(f"/v1/trains/{runs}/cancel")


def test_files_that_are_refused_or_replaced_do_not_stay_in_the_blob_store(
    start_gateway: StartGateway, pool: TrainingPool, tmp_path: Path, redis_server: RedisServer
) -> None:
    with start_gateway(pool, train_files_bytes=15).http() as http, redis_server.client() as redis:
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
        redis.hset("torchrelay:installation", "since", 0)
        marks = "torchrelay:train_orphans"
        redis.delete("torchrelay:sweep")  # as when that expires
        start_gateway(TrainingPool(pool.folder))  # it looks as it starts
        wait_until(lambda: redis.zcard(marks) == 2, seconds=20)
        assert len(list(folder.iterdir())) == 3
        redis.zadd(marks, dict.fromkeys(redis.zrange(marks, 0, -1), 1))
        redis.delete("torchrelay:sweep")
        start_gateway(TrainingPool(pool.folder))
        wait_until(lambda: len(list(folder.iterdir())) == 1, seconds=20)
        assert http.get(f"{url}/a").content == b"3" * 10


def test_the_oldest_jobs_that_have_ended_make_room_and_the_audit_log_says_which(
    start_gateway: StartGateway, pool: TrainingPool
) -> None:
    with start_gateway(pool, train_keep_jobs=2).http() as http:
        names = []
        for _ in range(4):
            names.append(begun(http, capture=False))
            ended(http, names[-1])
        assert [each["id"] for each in http.get("/v1/trains").json()["jobs"]] == names[:1:-1]
        seen = http.get("/v1/audit").json()["entries"]
        forgotten = [each for each in seen if each["action"] == "train_forgotten"]
        assert [each["detail"] for each in forgotten] == [names[1], names[0]]
        assert {(each["name"], each["token"]) for each in forgotten} == {("service", "")}


def test_a_disk_that_fills_up_with_folders_that_nobody_limits_is_in_the_log(
    start_gateway: StartGateway, pool: TrainingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, told = [0.05, 0.2], []
    monkeypatch.setattr(background, "SWEEP_SECONDS", 0.1)
    monkeypatch.setattr(retention, "free_share", lambda _: shares.pop(0))
    monkeypatch.setattr(background.log, "warning", lambda event, **_: told.append(event))
    start_gateway(pool)
    wait_until(lambda: not shares, seconds=20)
    assert told[:1] == ["train_disk_nearly_full"] and "train_disk_nearly_full" not in told[1:]


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
    monkeypatch.setattr(records, "ARCHIVE_ENTRIES", 2)
    for name, value in (("ARCHIVE_ENTRIES", 2), ("_UNARCHIVED_BYTES", 100), ("_MOST_UNARCHIVED_BYTES", 3000)):
        monkeypatch.setattr(f"torchrelay.service.jobs.training.run.{name}", value)
    sound = TrainingFiles.put_segment

    async def away(self: TrainingFiles, *_: object) -> None:
        raise Unavailable("the blob store takes nothing")

    monkeypatch.setattr(TrainingFiles, "put_segment", away)
    pool.pace = 0.05
    name = begun(http, capture=False)
    wait_until(lambda: shown(http, name).get("step", 0) >= 2, seconds=20)
    time.sleep(STEPS * 2 * pool.pace + 2)  # its ranks have taken all steps
    assert shown(http, name)["step"] < STEPS - 1
    monkeypatch.setattr(TrainingFiles, "put_segment", sound)
    assert ended(http, name)["state"] == "done"
    assert [each.event.step for each in entries(http, name, "metrics")] == list(range(STEPS))


def test_the_events_that_followers_read_have_so_many_bytes_in_redis(
    http: httpx2.Client, pool: TrainingPool, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingJobs, "most_event_bytes", 1500)
    name = begun(http, capture=False)
    ended(http, name)
    assert [each.event.step for each in entries(http, name, "metrics")] == list(range(STEPS))
    events = redis_server.client().xrange(f"torchrelay:train:{name}:events")
    *recorded, end = [fields[b"data"] for _, fields in events]
    assert 500 < sum(map(len, recorded)) <= 1500 and b"done" in end


def test_who_does_not_drive_a_job_any_more_takes_nothing_of_it_to_the_blob_store(
    gateway: Running, redis_server: RedisServer, pool: TrainingPool, tmp_path: Path
) -> None:
    pool.pace = 0.1
    with gateway.http() as http:
        name = begun(http, capture=False)
        wait_until(lambda: shown(http, name).get("step", 0) >= 3, seconds=20)
        tenant = gateway.app.state.gateway.tenants.default

        async def archive() -> None:
            redis: Any = Redis.from_url(redis_server.url)
            elsewhere = LocalStore(tmp_path / "elsewhere", mkdir=True)
            store = TrainingFiles(elsewhere, "default", Installation(redis, Keys("elsewhere:"), elsewhere))
            stale = TrainingJobs(
                redis,
                tenant.keys,
                Scripts(redis),
                tenant.audit,
                store,
                lease_seconds=1,
                most=1,
                most_open=1,
                files_bytes=1,
            )
            await stale.archive(name, "another", everything=True)
            await redis.aclose()

        asyncio.run(archive())
        assert ended(http, name)["state"] == "done"
        assert [each.event.step for each in entries(http, name, "metrics")] == list(range(STEPS))


def test_open_jobs_are_counted_by_state(http: httpx2.Client, pool: TrainingPool) -> None:
    pool.pace = 60
    begun(http, capture=False)
    line = 'torchrelay_trains{state="starting"} 1.0'
    wait_until(lambda: line in http.get("/metrics").text, seconds=20)
