"""The pool on a real embedded Ray: warm slots, replaced actors, cancels. One cluster for all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import engine
import msgspec
import psutil
import pytest
from pool_parts import (
    GPU,
    RAY_TOKEN,
    EmbeddedPool,
    command_line,
    compile_when_idle,
    no_process_left,
    started_since,
)
from torchrelay.compiler import decoding
from torchrelay.compiler.api.protocols import WORKERS, Protocol
from torchrelay.compiler.errors import CompileKilled, CompileTimeout, NoWorker, VerifyFailed
from torchrelay.compiler.request import schema
from torchrelay.compiler.tuning import queries, records
from torchrelay.service.base.async_tasks import TaskSupervisor
from torchrelay.workers.messages import BadFrame, decode_answer
from torchrelay.workers.pool import WorkersBusy
from torchrelay.workers.settings import SlotSettings
from torchrelay.workers.slot.actor import CompileSlot
from waiting import wait_until

HERE = Path(__file__).parents[1] / "parts"
TOOLCHAIN = schema.Toolchain(python="cp311", torch="0.0.0", triton="", cuda="", platform="linux-x86_64")
CPU = schema.Target(kind="cpu", name="", capability="", units=0, cpu=["other"])


class Service(EmbeddedPool):
    strangers: set[psutil.Process]
    """Processes that were there before it."""

    def compile(self, do, seconds=20.0, toolchain=TOOLCHAIN, target=CPU, events=None, on_query=None, **order):
        """A concurrent future of the artifact, begun once a worker is idle."""
        return self.submit(
            compile_when_idle(
                self.pool,
                msgspec.json.encode({"do": do, **order}),
                key="key",
                toolchain=toolchain,
                target=target,
                deadline_seconds=seconds,
                on_progress=lambda *event: events.append(event) if events is not None else None,
                on_query=on_query,
            )
        )

    def processes(self):
        """Its own alone."""
        return started_since(self.strangers)

    def wait_for_idle(self, count=2):
        wait_until(lambda: [w.state for w in self.pool.workers()].count("idle") == count)


def alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def hanging(service):
    """The processes of the one job that hangs, the fork server's own last; a job knows other pids than we do."""

    def sleeping():
        return [p for p in service.processes() if named(p, "sleep")]

    wait_until(lambda: len(sleeping()) == 2)
    family = {p for sleeper in sleeping() for p in [sleeper, *sleeper.parents()]}
    return sorted((p for p in family if named(p, "sleep", "python")), key=lambda p: -p.create_time())


def named(process, *names):
    """Whether it is one of a job: a program of that name, or a fork of its server."""
    try:
        ours = "workers.fork_server" in " ".join(process.cmdline()) or process.name() == "sleep"
        return ours and process.name().startswith(names)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def service():
    with no_process_left() as before, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("TORCHRELAY_SERVICE_TOKEN", "a secret of thirty-two characters")
        made = Service()
        made.strangers = before
        try:
            made.submit(made.pool.start()).result(180)
            wait_until(made.pool.ready, 180)
            yield made
        finally:
            made.submit(made.pool.close()).result(60)
            made.loop.call_soon_threadsafe(made.loop.stop)


def test_slots_come_up_warm_and_say_what_they_are(service):
    service.wait_for_idle()
    assert [(w.state, w.toolchain, w.target.kind) for w in service.pool.workers()] == [
        ("idle", TOOLCHAIN, "cpu")
    ] * 2


def kill_fork_servers(service):
    for process in service.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "torchrelay.workers.fork_server.server" in process.cmdline():
                process.kill()


def test_a_worker_of_a_release_that_is_too_old_is_not_used(service, monkeypatch, caplog):
    theirs, ours = WORKERS.number, Protocol(WORKERS.number + 2, WORKERS.number + 1)
    monkeypatch.setattr("torchrelay.workers.messages.WORKERS", ours)
    kill_fork_servers(service)
    refusal = f"speaks protocol {theirs}, this dispatcher {ours.oldest} to {ours.number}. Upgrade worker"
    wait_until(lambda: caplog.text.count(refusal) >= 2)
    assert not service.pool.ready()
    monkeypatch.undo()
    service.wait_for_idle()


def test_a_worker_whose_answers_cannot_be_read_is_replaced_until_they_can(service, monkeypatch, caplog):
    def unreadable(body):
        raise BadFrame("a field of a later release")

    told = TaskSupervisor(lambda task: None)
    service.pool.on_failure(told.note)
    monkeypatch.setattr("torchrelay.workers.scheduling.slots.decode_answer", unreadable)
    kill_fork_servers(service)
    wait_until(lambda: caplog.text.count("cannot be used") >= 2)
    assert told.failing()["workers"] == "BadFrame"
    monkeypatch.undo()
    service.wait_for_idle()
    assert "workers" not in told.failing()


def test_nodes_that_cannot_be_followed_are_told_of(service, monkeypatch, caplog):
    async def broken(self):
        raise KeyError("a node without a name")

    told = TaskSupervisor(lambda task: None)
    service.pool.on_failure(told.note)
    monkeypatch.setattr("torchrelay.workers.scheduling.ray_cluster.RayCluster.nodes", broken)
    wait_until(lambda: told.failing().get("nodes") == "KeyError")
    monkeypatch.undo()
    wait_until(lambda: not told.failing())
    assert "could not be followed" in caplog.text


def test_a_worker_does_not_work_for_a_dispatcher_of_a_release_that_is_too_old():
    answer = asyncio.run(CompileSlot(SlotSettings(worker="w", kind="cpu", protocol=0)).start())
    assert decode_answer(answer).code == "protocol_mismatch"


def test_an_artifact_and_its_events_come_back(service):
    events = []
    artifact = service.compile("answer", text="x" * 3_000_000, events=events).result(30)
    assert artifact == b"x" * 3_000_000
    assert events == [("aot", "first"), ("inductor", "second")]


def known(question):
    """An answer whose winner names the size that was asked for."""
    (problem,) = decoding.from_msgpack(question, type=queries.EntryLookup).problems
    timing = records.Timing(f"size {problem.result.size[0]}", 1.0, 1.0, 1.0, 1)
    entry = records.TuningEntry(problem=problem, place=engine.PLACE, winner=timing, candidates=1)
    return msgspec.msgpack.encode(queries.KnownEntries([entry]))


def test_jobs_ask_and_each_is_answered_while_both_run(service):
    service.wait_for_idle()
    together = asyncio.Barrier(2)

    async def answer(question):
        await together.wait()
        return known(question)

    jobs = [
        service.compile("inquire", how="in turn", sizes=[size, size + 1], on_query=answer) for size in (2, 7)
    ]
    told = [decoding.from_json(job.result(30)) for job in jobs]
    assert told == [[["size 2"], ["size 3"]], [["size 7"], ["size 8"]]]


async def answer_at_once(question):
    return known(question)


async def fail(question):
    raise ZeroDivisionError


@pytest.mark.parametrize("on_query", [None, fail])
def test_a_job_is_told_at_once_that_nobody_answers(service, on_query):
    service.wait_for_idle()
    job = service.compile("inquire", how="in turn", sizes=[2], wait=1000, on_query=on_query)
    assert decoding.from_json(job.result(30)) == ["the service has no answer about tuning"]


class Unanswered:
    """Answers a question never; knows when it was asked and when that was over."""

    def __init__(self):
        self.asked, self.over = threading.Event(), threading.Event()

    async def __call__(self, question):
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.over.set()


def test_a_job_cancelled_over_an_open_question_ends_and_its_slot_serves_on(service):
    service.wait_for_idle()
    unanswered = Unanswered()
    job = service.compile("inquire", how="in turn", sizes=[2], wait=1000, on_query=unanswered)
    assert unanswered.asked.wait(20)
    job.cancel()
    assert unanswered.over.wait(20)
    service.wait_for_idle()
    assert service.compile("answer").result(30) == b"artifact"


def test_a_server_that_dies_over_an_open_question_leaves_nobody_at_the_answer(service):
    service.wait_for_idle()
    unanswered = Unanswered()
    job = service.compile("inquire", how="in turn", sizes=[2], wait=1000, on_query=unanswered)
    assert unanswered.asked.wait(20)
    (busy,) = [slot for slot in service.pool.slots.all.values() if slot.state == "busy"]
    os.kill(busy.ready.pid, signal.SIGKILL)
    with pytest.raises(CompileKilled, match="lost its job"):
        job.result(30)
    assert unanswered.over.wait(20)
    service.wait_for_idle()
    answers = [
        service.compile("inquire", how="in turn", sizes=[2], on_query=answer_at_once) for _ in range(2)
    ]
    assert [decoding.from_json(each.result(30)) for each in answers] == [[["size 2"]]] * 2


def test_the_compilers_error_crosses_ray_whole(service):
    with pytest.raises(VerifyFailed, match=r"outputs differ by 3\.0\. do this"):
        service.compile("refuse").result(30)


def test_a_job_past_the_slots_is_refused_at_once(service):
    service.wait_for_idle()
    jobs = [service.compile("answer", text=str(i), sleep=2.0) for i in range(2)]
    wait_until(lambda: service.pool.room(TOOLCHAIN, CPU) == 0)
    refused = service.pool.compile(
        b"", key="key", toolchain=TOOLCHAIN, target=CPU, deadline_seconds=20, on_progress=lambda *_: None
    )
    with pytest.raises(WorkersBusy):
        service.submit(refused).result(1)
    assert [job.result(30) for job in jobs] == [b"0", b"1"]


def test_each_worker_says_what_shuts_its_jobs_in(service):
    service.wait_for_idle()
    known = {"namespaces", "landlock", "seccomp", "none"}
    assert all(worker.isolation and set(worker.isolation) <= known for worker in service.pool.workers())
    assert {worker.processors for worker in service.pool.workers()} == {len(os.sched_getaffinity(0))}


def test_nobody_for_this_toolchain_or_device_is_said_at_once_with_what_there_is(service):
    service.wait_for_idle()
    other = msgspec.structs.replace(TOOLCHAIN, torch="9.9.9")
    with pytest.raises(NoWorker, match=r"torch 9\.9\.9.*there is: CPU, cp311 torch 0\.0\.0"):
        service.compile("answer", toolchain=other).result(30)
    with pytest.raises(NoWorker, match="NVIDIA H200"):
        service.compile("answer", target=GPU).result(30)


def test_a_cancelled_caller_takes_the_whole_job_with_it(service):
    service.wait_for_idle()
    job = service.compile("hang", seconds=60)
    *job_processes, _ = hanging(service)
    pids = [p.pid for p in job_processes]
    job.cancel()
    wait_until(lambda: not any(alive(pid) for pid in pids))
    service.wait_for_idle()


def test_at_the_deadline_the_caller_is_told_and_the_slot_is_free_again(service):
    service.wait_for_idle()
    job = service.compile("hang", seconds=6)
    *job_processes, _ = hanging(service)
    with pytest.raises(CompileTimeout, match="deadline"):
        job.result(30)
    assert not any(alive(p.pid) for p in job_processes)
    service.wait_for_idle()


def test_a_killed_actor_takes_its_job_with_it_and_is_replaced(service):
    service.wait_for_idle()
    job = service.compile("hang", seconds=60)
    pids = [p.pid for p in hanging(service)]
    (actor,) = (p for p in psutil.Process(pids[-1]).parents() if "CompileSlot" in " ".join(p.cmdline()))
    busy = next(w.id for w in service.pool.workers() if w.state == "busy")
    os.kill(actor.pid, signal.SIGKILL)
    with pytest.raises(CompileKilled, match=f"worker {busy} died with the job"):
        job.result(30)
    wait_until(lambda: not any(alive(pid) for pid in pids))
    service.wait_for_idle()
    assert service.compile("answer").result(30) == b"artifact"


def test_while_ray_cannot_place_an_actor_the_other_worker_compiles_on(service):
    """A replaced actor waits for Ray's GCS, and no event loop with it."""
    service.wait_for_idle()
    ours = service.processes()
    (gcs,) = (p for p in ours if p.name() == "gcs_server")
    actor = next(p for p in ours if "CompileSlot" in command_line(p))
    gcs.suspend()
    try:
        actor.kill()
        wait_until(lambda: {w.state for w in service.pool.workers()} == {"idle", "starting"})
        for _ in range(2):  # the second begins after the new actor was asked for
            assert service.compile("answer", sleep=2.5).result(30) == b"artifact"
        assert [w.state for w in service.pool.workers()].count("starting") == 1
    finally:
        gcs.resume()
    service.wait_for_idle()


def test_a_killed_fork_server_is_replaced_by_its_actor(service):
    service.wait_for_idle()
    job = service.compile("hang", seconds=60)
    pids = [p.pid for p in hanging(service)]
    os.kill(pids[-1], signal.SIGKILL)
    with pytest.raises(CompileKilled, match="lost its job"):
        job.result(30)
    wait_until(lambda: not any(alive(pid) for pid in pids))  # the kernel ends them, in its own time
    service.wait_for_idle()
    assert [service.compile("answer").result(30) for _ in range(3)] == [b"artifact"] * 3


def test_no_actor_imports_torch_and_no_server_of_ray_listens_beyond_loopback(service):
    service.wait_for_idle()
    family = service.processes()
    actors, addresses = [], set()
    for process in [*family, psutil.Process()]:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that ends meanwhile is no server
            if "CompileSlot" in command_line(process):
                actors.append(process)
            connections = process.net_connections("inet")
            addresses |= {c.laddr.ip for c in connections if c.status == "LISTEN"}
    assert len(actors) == 2
    for actor in actors:
        assert not [m.path for m in actor.memory_maps() if "libtorch" in m.path]
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_no_process_of_ray_has_the_services_settings_in_its_environment(service):
    service.wait_for_idle()
    names = {}
    for process in service.processes():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            names[process.name()] = set(process.environ())
    assert {"raylet", "gcs_server"} < set(names) and any("CompileSlot" in name for name in names)
    assert not [name for each in names.values() for name in each if name.startswith("TORCHRELAY_SERVICE_")]
    assert "TORCHRELAY_SERVICE_TOKEN" in os.environ


TERMINATED = """
import asyncio, os, signal, sys
from torchrelay.workers.pool import PoolSettings, WorkerPool

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    pool = WorkerPool(PoolSettings(cpu_slots=0, gpu_slots_per_gpu=0, ray_token=sys.argv[1]))
    await pool.start()
    os.kill(os.getpid(), signal.SIGTERM)
    await stop.wait()
    await asyncio.sleep(6)  # whatever is being finished
    await pool.close()
    print("closed")

asyncio.run(main())
"""


def prints(text: str, script: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, RAY_TOKEN, *arguments], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout) == (0, f"{text}\n"), done.stderr


def test_who_is_terminated_may_take_its_time_to_end_in_order():
    """Ray's own handler of SIGTERM aborts the process 3 s later."""
    prints("closed", TERMINATED)


RAYLET_HANGS = """
import asyncio, sys
import psutil
from torchrelay.workers.pool import PoolSettings, WorkerPool, become_subreaper

async def main():
    become_subreaper()
    pool = WorkerPool(PoolSettings(cpu_slots=0, gpu_slots_per_gpu=0, ray_token=sys.argv[1]))
    await pool.start()
    (raylet,) = [p for p in psutil.Process().children() if p.name() == "raylet"]
    while not any("ray::" in " ".join(p.cmdline()) for p in raylet.children()):  # its agent has started
        await asyncio.sleep(0.05)
    import ray  # the pool has set its environment
    shutdown = ray.shutdown
    ray.shutdown = lambda: (shutdown(), raylet.suspend())
    await pool.close()
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=20)
    print([p.cmdline() for p in left])

asyncio.run(main())
"""


def test_a_raylet_that_has_to_be_killed_leaves_no_process():
    """Ray kills one that does not end within a second; its agents notice that a minute later."""
    prints("[]", RAYLET_HANGS)


HEAD_LOST = """
import asyncio, atexit, sys, threading
import psutil
from torchrelay.workers.scheduling import ray_cluster
from torchrelay.workers.pool import PoolSettings, RayCluster, become_subreaper

async def main():
    become_subreaper()
    cluster = RayCluster(PoolSettings(cpu_slots=0, gpu_slots_per_gpu=0, ray_token=sys.argv[1]))
    await cluster.start()
    (gcs,) = [p for p in psutil.Process().children() if p.name() == "gcs_server"]
    gcs.suspend()
    asked = asyncio.ensure_future(cluster.nodes())
    await asyncio.sleep(0.5)
    assert not asked.done()
    gcs.kill()
    gcs.wait()
    if sys.argv[2] == "waits":
        import ray
        from ray._private import worker
        ray_cluster._LEAVE_SECONDS = 2.0
        atexit.unregister(worker.shutdown)
        worker.shutdown = ray.shutdown = lambda **options: threading.Event().wait()
        atexit.register(worker.shutdown, _exiting_interpreter=True)
    await (cluster.stop() if sys.argv[2] == "stops" else cluster.leave_lost())
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=20)
    print([p.cmdline() for p in left])
    asked.cancel()

asyncio.run(main())
"""


@pytest.mark.parametrize("then", ["leaves", "stops", "waits"])
def test_a_process_whose_question_a_dead_head_never_answers_ends_all_the_same(then):
    prints("[]", HEAD_LOST, then)


@pytest.mark.parametrize("server", ["gcs_server", "raylet"])
def test_ray_is_started_again_when_a_server_of_it_is_killed(service, server):
    told = TaskSupervisor(lambda task: None)
    service.pool.on_failure(told.note)
    wait_until(lambda: service.pool.ready(), 120)
    running = service.compile("answer", seconds=300, sleep=600)
    wait_until(lambda: "busy" in [worker.state for worker in service.pool.workers()])
    (victim,) = [process for process in service.processes() if process.name() == server]
    victim.kill()
    wait_until(lambda: told.failing().get("ray") == "Unavailable", 60)
    waiting = service.compile("answer", seconds=300)
    with pytest.raises(CompileKilled, match="lost with the job"):
        running.result(60)
    assert waiting.result(300) == b"artifact"
    wait_until(lambda: "ray" not in told.failing())
    assert not victim.is_running()
