"""Search lanes on a real embedded Ray: a searcher beside a worker's compiles, and what ends it. One cluster for all."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from pathlib import Path

import engine
import msgspec
import psutil
import pytest
from pool_parts import GPU, EmbeddedPool, compile_when_idle, no_process_left
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training import working_directory
from torchrelay.compiler.api.training.jobs import TrainSpec
from torchrelay.compiler.api.training.node_messages import TrainOrder
from torchrelay.compiler.api.tuning.jobs import SearchJobSpec
from torchrelay.compiler.errors import CompileFailed, CompileKilled, CompileTimeout, NoWorker, Overloaded
from torchrelay.compiler.tuning import queries
from torchrelay.workers.pool import SearchDevice, WorkerLost
from waiting import wait_until

HERE = Path(__file__).parents[1] / "parts"
ORDER = msgspec.msgpack.encode(SearchJobSpec(engine.TOOLCHAIN, engine.TARGET, 1))


class Tasks:
    """Hands out tasks one by one, then says that it is over; keeps what it is asked."""

    def __init__(self, *problems, over=True):
        self._left = [queries.TuningTask(id=f"t{i}", problem=each) for i, each in enumerate(problems)]
        self.over = over
        self.asked = []

    async def __call__(self, question):
        asked = decoding.from_msgpack(question, type=queries.TuningQuery)
        self.asked.append(asked)
        if isinstance(asked, queries.TaskRequest):
            tasks = [self._left.pop(0)] if self._left else []
            if not tasks and not self.over:
                await asyncio.sleep(0.5)
            over = not tasks and self.over and not asked.holding
            return msgspec.msgpack.encode(queries.TaskBatch(tasks, over))
        return msgspec.msgpack.encode(queries.KnownEntries([]))

    def of(self, kind):
        return [asked for asked in self.asked if isinstance(asked, kind)]


class Service(EmbeddedPool):
    def lanes(self):
        return self.pool.search_devices(engine.TOOLCHAIN, engine.TARGET)

    def search(self, tasks, worker=None, seconds=60.0):
        return self.submit(
            self.pool.search(
                ORDER,
                worker=worker or self.lanes()[0].worker,
                namespace="default",
                toolchain=engine.TOOLCHAIN,
                target=engine.TARGET,
                on_query=tasks,
                deadline_seconds=seconds,
            )
        )

    def compile(self, do, seconds=30.0, **order):
        return self.submit(
            compile_when_idle(
                self.pool,
                msgspec.json.encode({"do": do, **order}),
                key="key",
                toolchain=engine.TOOLCHAIN,
                target=engine.TARGET,
                deadline_seconds=seconds,
                on_progress=lambda *_: None,
            )
        )

    def wait_for_rest(self):
        """Two workers, and nothing is done on either."""
        wait_until(lambda: [w.state for w in self.pool.workers()] == ["idle"] * 2)
        wait_until(
            lambda: [(lane.searching, lane.compiling) for lane in self.lanes()] == [(False, False)] * 2
        )


@pytest.fixture(scope="module")
def one_service():
    with no_process_left(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        made = Service()
        try:
            made.submit(made.pool.start()).result(60)
            wait_until(made.pool.ready)
            yield made
        finally:
            made.submit(made.pool.close()).result(60)
            made.loop.call_soon_threadsafe(made.loop.stop)


@pytest.fixture
def service(one_service):
    one_service.wait_for_rest()
    return one_service


def problem(size, **settings):
    return engine.problem(size, **settings)


def test_a_searcher_takes_tasks_tells_what_it_tries_and_finds_and_ends_when_it_is_over(service):
    tasks = Tasks(problem(2), problem(3))
    service.search(tasks).result(60)
    assert [(t.task, t.candidate) for t in tasks.of(queries.CandidateAttempt)] == [
        (task, name) for task in ("t0", "t1") for name in "abc"
    ]
    assert [found.entry.problem for found in tasks.of(queries.SearchResult)] == [problem(2), problem(3)]
    assert [question.holding for question in tasks.of(queries.TaskRequest)] == [0, 1, 2, 1, 0]


def test_a_worker_compiles_while_it_searches_and_says_so(service):
    tasks = Tasks(over=False)
    lane = service.lanes()[0].worker
    searching = service.search(tasks, lane)
    wait_until(lambda: tasks.asked)
    assert [w.searching for w in service.pool.workers()] == [w.id == lane for w in service.pool.workers()]
    both = [service.compile("answer", sleep=2.0) for _ in range(2)]
    wait_until(
        lambda: (
            sorted(service.lanes(), key=lambda each: each.worker != lane)[0]
            == SearchDevice(lane, searching=True, compiling=True)
        )
    )
    assert [job.result(30) for job in both] == [b"artifact"] * 2
    tasks.over = True
    searching.result(30)
    assert not any(w.searching for w in service.pool.workers())


def test_a_device_is_searched_by_one_at_a_time(service):
    tasks = Tasks(over=False)
    lane, other = (lane.worker for lane in service.lanes())
    searching = service.search(tasks, lane)
    wait_until(lambda: tasks.asked)
    with pytest.raises(Overloaded, match="is being searched"):
        service.search(Tasks(), lane).result(30)
    service.search(Tasks(problem(2)), other).result(60)
    tasks.over = True
    searching.result(30)


def test_what_no_worker_searches_is_refused_and_names_what_there_is(service):
    with pytest.raises(NoWorker, match=r"no worker for NVIDIA H200.*there is: CPU"):
        service.pool.search_devices(engine.TOOLCHAIN, GPU)
    wider = msgspec.structs.replace(engine.TARGET, cpu=["avx2", "avx512"])
    with pytest.raises(NoWorker):
        service.pool.search_devices(engine.TOOLCHAIN, wider)
    with pytest.raises(NoWorker, match="worker nobody is not there"):
        service.search(Tasks(), "nobody").result(30)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"do": "die"}, CompileKilled, "search process ended with exit status 9"),
        ({"do": "raise"}, CompileFailed, "a searcher's own mistake"),
    ],
    ids=["dies", "raises"],
)
def test_a_searcher_that_ends_badly_is_an_error_and_the_lane_serves_on(service, settings, error, words):
    with pytest.raises(error, match=words):
        service.search(Tasks(problem(2, **settings))).result(60)
    tasks = Tasks(problem(3))
    service.search(tasks).result(60)
    assert len(tasks.of(queries.SearchResult)) == 1


def test_a_searcher_past_its_deadline_is_killed(service):
    with pytest.raises(CompileTimeout, match="the search was still running"):
        service.search(Tasks(problem(2, do="hang")), seconds=3.0).result(60)


def test_a_cancelled_searcher_is_killed_and_its_worker_compiles_on(service):
    tasks = Tasks(problem(2, do="hang"))
    searching = service.search(tasks)
    wait_until(lambda: len(tasks.asked) == 2)
    jobs = {each.id: each.jobs_done for each in service.pool.workers()}
    searching.cancel()
    service.wait_for_rest()
    assert {each.id: each.jobs_done for each in service.pool.workers()} == jobs
    assert [service.compile("answer").result(30) for _ in range(2)] == [b"artifact"] * 2


def servers(worker):
    """The fork servers that search for `worker`, with the jobs that they have forked."""
    below = psutil.Process().children(recursive=True)
    return [p for p in below if _slot(p) == f"{worker}-search"]


def _slot(process):
    try:
        return process.environ().get("TORCHRELAY_SLOT", "") if "fork_server" in str(process.cmdline()) else ""
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def test_a_searcher_cancelled_while_its_server_comes_up_leaves_the_worker_alive(service):
    lane = service.lanes()[0].worker
    for server in servers(lane):
        server.kill()
    wait_until(lambda: not servers(lane))
    time.sleep(2)  # its actor looks twice a second whether it lives
    searching = service.search(Tasks(problem(2)), lane)
    wait_until(lambda: any(lane.searching for lane in service.lanes()))
    searching.cancel()
    service.wait_for_rest()
    assert lane in [each.worker for each in service.lanes()]
    service.search(Tasks(problem(2)), lane).result(60)


def test_the_death_of_a_searching_server_ends_the_search_and_not_the_compile_beside_it(service):
    tasks = Tasks(problem(2, do="hang"))
    lane = service.lanes()[0].worker
    searching = service.search(tasks, lane)
    wait_until(lambda: len(tasks.asked) == 2)
    compiling = [service.compile("answer", sleep=3.0) for _ in range(2)]
    wait_until(lambda: all(each.compiling for each in service.lanes()))
    for server in servers(lane):
        server.kill()
    with pytest.raises(CompileKilled, match="lost its job"):
        searching.result(60)
    assert [job.result(30) for job in compiling] == [b"artifact"] * 2


def test_a_lost_worker_is_told_apart_from_a_searcher_that_died(service):
    tasks = Tasks(problem(2, do="hang"))
    lane = service.lanes()[0].worker
    searching = service.search(tasks, lane)
    wait_until(lambda: len(tasks.asked) == 2)
    (server, *_) = servers(lane)
    (actor,) = (p for p in server.parents() if "CompileSlot" in " ".join(p.cmdline()))
    actor.send_signal(signal.SIGKILL)
    with pytest.raises(WorkerLost):
        searching.result(60)
    assert lane not in [each.worker for each in service.lanes()]
    service.wait_for_rest()
    service.search(Tasks(problem(2)), lane).result(60)


def test_nothing_is_measured_where_a_training_job_runs_and_compiles_go_on(service, tmp_path):
    (tmp_path / "script.py").write_text("import signal; signal.pause()")
    order = TrainOrder(
        job=uuid.uuid4().hex[:16],
        namespace="default",
        spec=TrainSpec(name="test", script="script.py", cpus=0.5, compile="off"),
        package=working_directory.pack(tmp_path, ["script.py"]),
        environment={},
        folder=str(tmp_path / "jobs"),
    )
    tasks = Tasks(over=False)
    searching = service.search(tasks, seconds=300)
    wait_until(lambda: tasks.asked)
    service.submit(service.pool.training.begin(order)).result(60)
    try:
        with pytest.raises(WorkerLost, match="a training job holds the device"):
            searching.result(180)
        with pytest.raises(NoWorker, match="training jobs hold all devices"):
            service.lanes()
        with pytest.raises(Overloaded, match="a training job holds the device"):
            service.search(Tasks(), worker=service.pool.workers()[0].id).result(10)
        assert service.compile("answer").result(30) == b"artifact"
        service.submit(service.pool.training.cancel(order.job)).result(30)
        wait_until(lambda: not service.pool.slots.rank_devices, 60)
        assert len(service.lanes()) == 2
    finally:
        service.submit(service.pool.training.forget(order.job)).result(60)
