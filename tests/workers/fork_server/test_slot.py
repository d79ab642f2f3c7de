"""A slot's fork server survives what a job's child does, and leaves nothing of it. Real processes, no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import re
import signal
import time
from pathlib import Path

import engine
import msgspec
import psutil
import pytest
from pool_parts import started_since
from torchrelay.compiler import decoding
from torchrelay.compiler.errors import CompileFailed, CompileKilled, CompileTimeout, VerifyFailed
from torchrelay.compiler.request import schema
from torchrelay.workers.messages import (
    EVENT_BURST,
    EVENTS_PER_SECOND,
    EventRate,
    ForkServerReady,
    JobDone,
    JobFailed,
    StageEvent,
    WorkerJob,
    decode_answer,
)
from torchrelay.workers.process.process_tree import descendants
from torchrelay.workers.settings import JobLimits, SlotSettings
from torchrelay.workers.slot.actor import CompileSlot
from waiting import until

HERE = Path(__file__).parents[1] / "parts"
DEEP = b"\x82\xa1x" + b"\x91" * 200_000 + b"\xc0\xa4type\xa5event"
"""A field that no event has, and that is skipped before it is known to be one."""
LARGE = {
    "event": b"\x83\xa4type\xa5event\xa5stage\xa3aot\xa6detail\xdb\x17\xd7\x84\x00",
    "failure": b"\x84\xa4type\xa6failed\xa4code\xdb\x17\xd7\x84\x00",
    "query": b"\x83\xa4type\xa5query\xa2id\x01\xa8question\xc6\x17\xd7\x84\x00",
    "job": b"\x86\xa4type\xa3job",
    "no kind": b"\x81\xa4kind\xa5event",
}
"""How messages of 400 MB begin."""
NO_TEXT = b"\x83\xa4type\xa5event\xa5stage\xa3aot\xa6detail\xa2\xff\xff"


@pytest.fixture(autouse=True)
def engine_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def settings(tmp_path, kernels=None, engine="engine", **limits):
    return SlotSettings(
        kernels_dir=None if kernels is None else str(kernels),
        worker=f"w-{os.getpid()}",
        kind="cpu",
        engine=engine,
        jobs_root=str(tmp_path),
        limits=JobLimits(**limits),
    )


@contextlib.asynccontextmanager
async def warm_slot(tmp_path, kernels=None, **limits):
    slot = CompileSlot(settings(tmp_path, kernels, **limits))
    ready = decode_answer(await slot.start())
    assert isinstance(ready, ForkServerReady), ready
    try:
        yield slot, ready
    finally:
        await slot.close()
        assert list(tmp_path.glob("torchrelay-jobs-*")) == []


async def run(slot, do, seconds=20.0, job_id="j", holds_source=False, trace_id="", **order):
    """The events of a job, and its artifact; raises its error."""
    events = []
    request = msgspec.json.encode({"do": do, **order})
    job = WorkerJob("key", request, seconds, engine.TARGET, holds_source=holds_source, trace_id=trace_id)
    async for body in slot.compile(job_id, pickle.loads(pickle.dumps(job))):
        message = decode_answer(body)
        if isinstance(message, StageEvent):
            events.append((message.stage, message.detail))
        elif isinstance(message, JobFailed):
            raise message.error()
        else:
            assert isinstance(message, JobDone)
            return events, message.artifact
    raise AssertionError("no answer")


@pytest.mark.parametrize("how", ["hangs", "eats"])
def test_a_compiler_that_is_sick_while_the_worker_warms_up_costs_that_worker_alone(tmp_path, capfd, how):
    """A job that waits for it is told, nothing is left, and the next worker works."""

    before = set(psutil.Process().children(recursive=True))

    async def scenario():
        (tmp_path / "sick").write_text(how)
        slot = CompileSlot(settings(tmp_path, engine="sick_warm_up", memory_bytes=256 << 20))
        try:
            ready = decode_answer(await slot.start())
            assert isinstance(ready, ForkServerReady), ready
            with pytest.raises(CompileKilled, match="lost its job: the fork server ended with status 1"):
                await run(slot, "answer", seconds=300.0)
            assert started_since(before) == set()
            assert list(tmp_path.glob("torchrelay-jobs-*")) == []
            (tmp_path / "sick").unlink()
            assert (await run(slot, "answer"))[1] == b"artifact"
        finally:
            await slot.close()

    asyncio.run(scenario())
    words = {"hangs": "took longer than 3 s", "eats": r"held \d+ MiB of memory, over the limit of 256 MiB"}
    assert re.search(f"the compile that warms the worker up {words[how]}", capfd.readouterr().err)


def test_what_a_job_builds_is_found_by_another_slot_while_the_job_still_runs(tmp_path):
    library = f"c{'a' * 51}.main.so"

    async def scenario():
        (tmp_path / "one").mkdir()
        (tmp_path / "other").mkdir()
        async with (
            warm_slot(tmp_path / "one", kernels=tmp_path / "kernels") as (one, _),
            warm_slot(tmp_path / "other", kernels=tmp_path / "kernels") as (other, _),
        ):
            building = asyncio.create_task(
                run(one, "build", name=library, text="binary", sleep=60, seconds=90)
            )
            built = tmp_path / "kernels" / "default" / library
            await until(lambda: built.exists() or building.done(), 90)
            assert (await run(other, "fetch", name=library))[1] == b"binary"
            assert not building.done()
            await one.cancel("j")
            with pytest.raises(CompileKilled):
                await building
        assert (tmp_path / "kernels" / "default" / library).read_text() == "binary"

    asyncio.run(scenario())


@pytest.mark.parametrize("holds_source", [False, True])
def test_what_a_job_with_its_callers_source_builds_is_for_nobody_else(tmp_path, holds_source):
    library = f"c{'b' * 51}.main.so"
    kept = tmp_path / "kernels" / "default" / library

    async def scenario():
        async with warm_slot(tmp_path, kernels=tmp_path / "kernels") as (slot, _):
            await run(slot, "build", name=library, text="binary", sleep=1, holds_source=holds_source)
            assert (await run(slot, "fetch", name=library))[1] == (b"" if holds_source else b"binary")

    asyncio.run(scenario())
    assert kept.exists() != holds_source


async def still_works(slot):
    assert (await run(slot, "answer", text="fine"))[1] == b"fine"


async def sleepers(ready, count=2):
    """The pids of everything below the server, once `count` processes of a job sleep there."""
    await until(lambda: [name(pid) for pid in descendants(ready.pid)].count("sleep") == count)
    return descendants(ready.pid)


def name(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_job_answers_with_its_artifact_and_its_events_in_order(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):
            events, artifact = await run(slot, "answer", text="x" * 5_000_000)
            assert events == [("aot", "first"), ("inductor", "second")]
            assert artifact == b"x" * 5_000_000

    asyncio.run(scenario())


def test_events_arrive_while_the_job_runs(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):
            stamps = []
            job = WorkerJob("key", b'{"do":"answer","sleep":1.0}', 20, engine.TARGET)
            async for _body in slot.compile("j", job):
                stamps.append(time.monotonic())
            assert stamps[1] - stamps[0] > 0.9

    asyncio.run(scenario())


def test_the_engines_own_error_keeps_its_code_message_and_hint(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):
            with pytest.raises(VerifyFailed) as caught:
                await run(slot, "refuse")
            assert (caught.value.message, caught.value.advice) == ("outputs differ by 3.0", "do this")
            with pytest.raises(CompileFailed) as blundered:
                await run(slot, "blunder")
            assert blundered.value.message == "ZeroDivisionError: one line"
            await still_works(slot)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("do", "order", "words"),
    [
        ("crash", {"signal": int(signal.SIGSEGV)}, "SIGSEGV"),
        ("crash", {"signal": int(signal.SIGKILL)}, "SIGKILL"),
        ("leave", {"status": 3}, "exit status 3"),
        ("leave", {"status": 0}, "no answer"),
        ("garbage", {}, "invalid message"),
        ("garbage", {"body": DEEP.hex()}, "invalid message"),
        ("garbage", {"body": NO_TEXT.hex()}, "invalid message"),
        *(
            ("garbage", {"body": head.hex(), "announced": 400_000_000}, "400000000")
            for head in LARGE.values()
        ),
    ],
    ids=["SEGV", "KILL", "status", "silent", "garbage", "deep garbage", "no text", *LARGE],
)
def test_a_child_that_dies_or_talks_nonsense_is_reported_and_the_server_serves_on(tmp_path, do, order, words):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, ready):
            with pytest.raises(CompileKilled, match=words):
                await run(slot, do, **order)
            await still_works(slot)
            assert decode_answer(await slot.start()).pid == ready.pid

    asyncio.run(scenario())


def test_of_a_job_that_floods_its_owner_with_events_most_are_dropped_and_none_is_long(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):
            began = time.monotonic()
            events, artifact = await run(slot, "chatter", times=5_000)
            most = EVENT_BURST + EVENTS_PER_SECOND * (time.monotonic() - began)
            assert artifact == b"artifact"
            assert EVENT_BURST <= len(events) <= most < 2_500
            assert max(len(detail) for _, detail in events) <= 500

    asyncio.run(scenario())


def test_events_pass_again_once_a_job_was_quiet():
    now = 0.0
    rate = EventRate(clock=lambda: now)
    assert [rate.allows() for _ in range(EVENT_BURST + 5)] == [True] * EVENT_BURST + [False] * 5
    now += 1.0
    assert sum(rate.allows() for _ in range(100)) == EVENTS_PER_SECOND
    now += 1000.0
    assert sum(rate.allows() for _ in range(100)) == EVENT_BURST


def test_a_job_cannot_forge_lines_of_the_log(tmp_path, capfd):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):
            with pytest.raises(VerifyFailed):
                await run(
                    slot, "forge", lines='{"event": "published"}\n\x1b[2Jall is well', trace_id="ab" * 16
                )

    asyncio.run(scenario())
    told = capfd.readouterr().err
    assert "\x1b" not in told
    for text in ('{"event": "published"}', "\\x1b[2Jall is well", "of another job"):
        lines = [line for line in told.splitlines() if text in line]
        assert lines and all(line.startswith(f"job key trace_id={'ab' * 16} | ") for line in lines)


def test_where_a_compiler_crashed_is_in_the_log(tmp_path, capfd):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):
            with pytest.raises(CompileKilled, match="the worker's log says where it crashed"):
                await run(slot, "crash", signal=int(signal.SIGSEGV))

    asyncio.run(scenario())
    assert re.search(r"job key \| .*engine.py.* in crash", capfd.readouterr().err)


def test_a_long_error_of_a_job_is_cut_between_words(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):
            with pytest.raises(VerifyFailed) as caught:
                await run(slot, "complain", length=100_000)
            assert 10_000 < len(caught.value.message) <= 16_384
            assert caught.value.message.endswith(" differ") or caught.value.message.endswith(" outputs")
            assert len(caught.value.advice) <= 2_000

    asyncio.run(scenario())


def test_at_the_deadline_the_whole_tree_dies_even_what_left_the_session(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, ready):
            job = asyncio.create_task(run(slot, "hang", seconds=6))
            pids = await sleepers(ready)
            with pytest.raises(CompileTimeout, match="deadline"):
                await asyncio.wait_for(job, 30)
            assert not any(alive(pid) for pid in pids)
            await still_works(slot)
            assert decode_answer(await slot.start()).pid == ready.pid

    asyncio.run(scenario())


def test_a_finished_job_leaves_no_process(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, ready):
            job = asyncio.create_task(run(slot, "leave_behind"))
            pids = await sleepers(ready, count=1)
            await job
            assert not any(alive(pid) for pid in pids)

    asyncio.run(scenario())


def test_memory_over_the_limit_kills_the_job_grandchildren_counted(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path, memory_bytes=300 << 20) as (slot, _):
            with pytest.raises(CompileKilled, match="limit of 300 MiB"):
                await run(slot, "hog")
            await still_works(slot)

    asyncio.run(scenario())


def test_files_over_the_limit_kill_the_job(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path, disk_bytes=50 << 20) as (slot, _):
            with pytest.raises(CompileKilled, match="more than 50 MiB"):
                await run(slot, "fill_disk")
            await still_works(slot)

    asyncio.run(scenario())


def test_too_many_processes_kill_the_job(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path, processes=40) as (slot, _):
            with pytest.raises(CompileKilled, match="limit of 40"):
                await run(slot, "swarm")
            await still_works(slot)

    asyncio.run(scenario())


def test_a_cancel_kills_the_job_at_once(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, ready):
            job = asyncio.create_task(run(slot, "hang"))
            pids = await sleepers(ready)
            await slot.cancel("another job")
            await asyncio.sleep(0.3)
            assert all(alive(pid) for pid in pids)
            await slot.cancel("j")
            with pytest.raises(CompileKilled, match="cancelled"):
                await asyncio.wait_for(job, 30)
            assert not any(alive(pid) for pid in pids)
            await still_works(slot)

    asyncio.run(scenario())


def test_a_killed_fork_server_takes_its_job_with_it_and_another_one_starts(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, ready):
            job = asyncio.create_task(run(slot, "hang"))
            pids = await sleepers(ready)
            os.kill(ready.pid, signal.SIGKILL)
            with pytest.raises(CompileKilled, match="lost its job"):
                await asyncio.wait_for(job, 30)
            assert not any(alive(pid) for pid in pids)
            assert not Path(ready.jobs_dir).exists()
            again = decode_answer(await slot.start())
            assert again.pid != ready.pid
            await still_works(slot)

    asyncio.run(scenario())


def test_the_death_of_an_idle_fork_server_is_noticed(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, ready):
            os.kill(ready.pid, signal.SIGKILL)
            await asyncio.wait_for(slot.lost(), 30)
            await slot.start()
            await still_works(slot)

    asyncio.run(scenario())


def test_a_fork_server_without_its_actor_kills_its_job_and_ends(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, ready):
            job = asyncio.create_task(run(slot, "hang"))
            pids = await sleepers(ready)
            slot.compiles._server._writer.transport.abort()  # what the kernel does when an actor dies
            with pytest.raises(CompileKilled):
                await asyncio.wait_for(job, 30)
            assert not any(alive(pid) for pid in [*pids, ready.pid])

    asyncio.run(scenario())


def test_a_job_sees_private_directories_no_secret_and_no_descriptor_of_the_server(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret-of-ray")
    monkeypatch.setenv("TORCHRELAY_SERVICE_REDIS_URL", "redis://:secret@host")
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    async def scenario():
        async with warm_slot(tmp_path) as (slot, ready):
            seen = decoding.from_json((await run(slot, "surroundings"))[1])
            environment = seen["environment"]
            assert "secret" not in str(environment)
            assert not {"TORCHINDUCTOR_MAX_AUTOTUNE", "OMP_NUM_THREADS"} & set(environment)
            for name in ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                assert environment[name].startswith(ready.jobs_dir)
            assert seen["temporary"] == environment["TMPDIR"]
            assert seen["cwd"] == seen["workdir"]
            assert seen["session"] == seen["pid"]
            assert seen["core"] == 0
            assert not [d for d in seen["descriptors"] if d.startswith("socket:")]

    asyncio.run(scenario())


def test_the_jobs_directory_goes_with_the_job(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, ready):
            await run(slot, "fill")
            assert list(Path(ready.jobs_dir).iterdir()) == []

    asyncio.run(scenario())


def test_an_engine_that_cannot_load_is_said_so(tmp_path):
    async def scenario():
        broken = msgspec.structs.replace(settings(tmp_path), engine="no_such_engine")
        answer = decode_answer(await CompileSlot(broken).start())
        assert isinstance(answer, JobFailed)
        assert "cannot start" in answer.message

    asyncio.run(scenario())


@pytest.mark.parametrize("kind, warm", [("cuda", True), ("cpu", False)])
def test_beside_a_gpu_searches_have_a_warm_server_before_the_first_one_comes(tmp_path, kind, warm):
    async def scenario():
        slot = CompileSlot(
            msgspec.structs.replace(settings(tmp_path), kind=kind, isolation="off", search_idle_seconds=0.0)
        )
        assert isinstance(decode_answer(await slot.start()), ForkServerReady)

        def servers() -> int:
            return len(list(tmp_path.glob("torchrelay-jobs-*")))

        if warm:
            await until(lambda: servers() == 2, seconds=20)
        slot.stop_idle_searches()
        assert servers() == 1 + warm
        await slot.close()
        assert list(tmp_path.glob("torchrelay-jobs-*")) == []

    asyncio.run(scenario())


def test_a_slot_that_closes_while_its_searches_server_comes_up_leaves_nothing(tmp_path):
    async def scenario():
        slot = CompileSlot(msgspec.structs.replace(settings(tmp_path), kind="cuda", isolation="off"))
        await slot.start()
        await slot.close()
        assert list(tmp_path.glob("torchrelay-jobs-*")) == []

    asyncio.run(scenario())


def test_ready_names_the_engines_toolchain_and_target(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (_, ready):
            assert ready.toolchain.torch == "0.0.0"
            assert ready.target == schema.Target(kind="cpu", name="", capability="", units=0, cpu=["avx2"])

    asyncio.run(scenario())
