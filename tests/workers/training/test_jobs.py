"""Training jobs on a real Ray: Ray Train starts the ranks, they meet through gloo, and start again. One cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import zipfile
from pathlib import Path

import psutil
import pytest
from pool_parts import no_process_left
from torchrelay.compiler.api.training.events import (
    CheckpointEvent,
    JobNote,
    LogLines,
    NumberedEvent,
    RankEnded,
    RankStarted,
    StateChanged,
)
from torchrelay.compiler.api.training.jobs import TRAIN_ENDED, TrainSpec
from torchrelay.compiler.api.training.node_messages import CapturedGraphs, TrainOrder
from torchrelay.compiler.errors import CompileTimeout
from torchrelay.workers.pool import WorkerLost, why_no_room
from train_engine_parts import FIRST_WAITS, HANG_SECONDS, MEET, Site, captures, drivers, gone


@pytest.fixture
def site(one_site):
    yield one_site
    for job in one_site.jobs:
        job.forget()  # once more: what a test that failed has left holds cores
    one_site.jobs.clear()


@pytest.fixture(scope="module")
def one_site(tmp_path_factory):
    with no_process_left():
        made = Site(tmp_path_factory.mktemp("trains"))
        try:
            made.call(made.pool.start(), 300)  # Ray alone takes half a minute where others work too
            yield made
        finally:
            made.call(made.pool.close())
            made.loop.call_soon_threadsafe(made.loop.stop)


def test_ranks_meet_as_under_torchrun_and_their_news_are_numbered(site):
    job = site.begin(
        MEET
        + """
    import helper
    print(os.environ["FROM_ORDER"], os.environ["FROM_SPEC"], os.environ["LOCAL_RANK"], flush=True)
    dist.destroy_process_group()
    sys.stderr.write("no end of line")
""",
        files={"helper.py": "print('imported', flush=True)"},
        arguments=["--lr", "0.1"],
        environment={"FROM_SPEC": "too"},
    )
    ended = job.end()
    assert (ended.state, ended.restarts) == ("done", 0), job.news
    assert job.states() == ["starting", "running", "done"]
    assert [each.number for each in job.news] == list(range(1, len(job.news) + 1))
    assert job.lines() == sorted(
        line
        for rank in (0, 1)
        for line in (
            f"attempt 0 rank {rank} of 2 sum 3 ['--lr', '0.1']",
            "imported",
            f"yes too {rank}",
        )
    )
    assert {(e.rank, e.code) for e in job.of(RankEnded)} == {(0, 0), (1, 0)}
    assert ["no end of line"] in [log.lines for log in job.of(LogLines) if log.stream == "stderr"]
    folder = site.folder / "jobs" / job.order.job
    assert "attempt 0 rank 1 of 2 sum 3" in (folder / "logs" / "rank-1.log").read_text()
    assert b"token" not in (folder / "events.jsonl").read_bytes()
    assert not (folder / "order.msgpack").exists()
    job.forget()
    with pytest.raises(WorkerLost):
        job.poll()


def workers() -> list[psutil.Process]:
    """Ray's workers of ranks."""
    below = psutil.Process().children(recursive=True)
    return [p for p in below if "RayTrainWorker" in " ".join(p.cmdline())]


@pytest.mark.slow
def test_a_killed_rank_and_a_killed_worker_of_ray_and_all_ranks_start_again(site):
    job = site.begin(MEET + FIRST_WAITS, retries=2, environment={"WAITS": "2"})
    first = job.started()
    job.until(lambda job: len(job.lines()) == 2)
    os.kill(first[1].pid, signal.SIGKILL)
    second = job.started(1)
    job.until(lambda job: len(job.lines()) == 4)
    worker, _ = workers()
    worker.kill()
    assert job.end().state == "done"
    assert job.states() == ["starting", *("running", "recovering") * 2, "running", "done"]
    assert "rank 1 was killed by signal 9" in job.of(StateChanged)[2].detail
    assert [turned.restarts for turned in job.of(StateChanged)] == [0, 0, 1, 1, 2, 2, 2]
    assert gone([rank.pid for rank in (*first.values(), *second.values())])
    assert sum(line.startswith("attempt 2") for line in job.lines()) == 2
    job.forget()


@pytest.mark.slow
def test_what_ranks_had_told_when_another_failed_is_not_lost(site, tmp_path):
    written = tmp_path / "written"
    job = site.begin(
        """
        import itertools, os, sys, time
        if os.environ["RANK"] == "1":
            time.sleep(2)
            sys.exit(3)
        with open(sys.argv[1], "a") as file:
            for number in itertools.count():
                line = f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {number}"
                print(line, flush=True)
                print(line, file=file, flush=True)
                time.sleep(0.01)
        """,
        arguments=[str(written)],
        retries=1,
    )
    ended = job.end()
    assert (ended.state, ended.detail) == ("failed", "rank 1 ended with exit code 3")
    assert [(e.attempt, e.rank) for e in job.of(RankEnded)] == [(0, 1), (0, 0), (1, 1), (1, 0)]
    assert set(written.read_text().splitlines()) <= set(job.lines())
    job.forget()


@pytest.mark.slow
def test_a_job_that_fails_too_often_has_failed_and_says_with_what(site):
    job = site.begin(
        """
        import os, sys
        if os.environ["RANK"] == "1":
            raise ValueError("no such thing as a learning rate of " + os.environ["TORCHELASTIC_RESTART_COUNT"])
        import signal; signal.pause()
        """,
        retries=1,
    )
    ended = job.end()
    assert ended.state == "failed"
    assert ended.detail == "rank 1 ended with exit code 1: ValueError: no such thing as a learning rate of 1"
    assert ended.restarts == 1
    job.begin()  # the same once more: it has ended
    job.poll()
    assert job.news[-1].event == ended
    job.begin(resumes=1)
    job.news.append(NumberedEvent(job.news[-1].number, JobNote(level="info", text="resumed")))
    later = job.until(
        lambda job: next((t for t in job.of(StateChanged)[::-1] if t.state == "failed" and t != ended), None)
    )
    assert later.detail.endswith("of 3")
    assert [each.number for each in job.news[-2:]] == [job.news[-1].number - 1, job.news[-1].number]
    job.forget()


def test_an_error_that_comes_twice_before_any_step_is_not_tried_a_third_time(site):
    job = site.begin("import nothing_of_this_name", workers=1, retries=3)
    ended = job.end()
    assert (ended.state, ended.restarts) == ("failed", 1)
    error, _, why = ended.detail.partition("; ")
    assert (
        error == "rank 0 ended with exit code 1: ModuleNotFoundError: No module named 'nothing_of_this_name'"
    )
    assert why == "not tried again: it ended so twice, before any step"
    assert {event.attempt for event in job.of(RankStarted)} == {0, 1}
    job.forget()


@pytest.mark.slow
def test_what_another_start_may_mend_is_tried_as_often_as_the_job_says(site):
    job = site.begin(
        """
        import os, signal, sys
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt in (0, 2):
            raise ValueError("the node's own trouble")
        elif attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        elif attempt in (3, 4):
            raise MemoryError
        elif attempt == 5:
            raise ValueError("another")
        print("went through", flush=True)
        """,
        workers=1,
        retries=6,
    )
    assert job.end(HANG_SECONDS).state == "done", job.news
    assert job.lines() == ["went through"]
    job.forget()


@pytest.mark.slow
def test_the_same_error_after_a_step_is_tried_as_often_as_the_job_says(site):
    job = site.begin(
        """
        import os
        import torch
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        if attempt == 0:
            optimizer.step()
        if attempt < 3:
            raise OSError("its store is away")
        print("went through", flush=True)
        """,
        workers=1,
        retries=3,
    )
    assert job.end(HANG_SECONDS).state == "done", job.news
    assert job.lines() == ["went through"]
    job.forget()


def test_a_cancelled_job_frees_everything_within_ten_seconds(site):
    job = site.begin(
        MEET
        + """
    import signal, subprocess
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("sleeper", sleeper.pid, flush=True)
    signal.pause()
"""
    )
    ranks = job.started()
    job.until(lambda job: len(job.lines()) == 4)
    pids = [rank.pid for rank in ranks.values()]
    pids += [int(line.split()[1]) for line in job.lines() if line.startswith("sleeper")]
    began = time.monotonic()
    site.call(site.pool.training.cancel(job.order.job))
    assert job.end(30).state == "cancelled"
    assert gone(pids)
    assert time.monotonic() - began < 30  # 10 s on a machine that is not loaded; a hang would be minutes
    job.forget()
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob(f"torchrelay-train-*{job.order.job}"))


def test_what_a_driver_held_that_does_not_answer_any_more_is_free_again(site):
    cores = float(os.cpu_count() or 1)
    job = site.begin("import signal; signal.pause()", workers=1, cpus=cores)
    job.started(ranks=1)
    (driver,) = drivers()
    driver.suspend()
    job.forget()
    job.begin(resumes=1)
    job.until(lambda job: job.of(RankStarted)[-1].attempt == 1)
    job.forget()


@pytest.mark.slow
def test_a_job_is_cancelled_between_two_starts_of_its_ranks_and_before_the_first(site):
    for early in (False, True):
        script = "import os; raise SystemExit(os.environ['TORCHELASTIC_RESTART_COUNT'])"
        job = site.begin(script, workers=1, cpus=float(os.cpu_count() or 1), retries=1000)
        if not early:
            job.until(lambda job: job.states().count("recovering") >= 2)
        site.call(site.pool.training.cancel(job.order.job))
        assert job.end(30).state == "cancelled"
        job.forget()


def test_a_job_that_no_node_can_hold_is_told_from_one_that_waits(site):
    def room(**spec):
        return why_no_room(TrainSpec(name="test", script="s.py", **spec), site.pool.node_resources())

    assert room(workers=1) == ""
    assert room(workers=1, device="cuda") == "no node has a GPU"
    assert "the job needs 4000" in room(workers=4000)
    assert room(workers=4000, min_workers=1) == ""
    assert "GiB" in room(workers=1, memory_bytes=1 << 50)


@pytest.mark.slow
def test_a_job_waits_for_the_cores_of_another_and_can_be_cancelled_meanwhile(site):
    cores = os.cpu_count() or 1
    holds = site.begin("import signal; signal.pause()", workers=1, cpus=float(cores))
    holds.started(ranks=1)
    another = TrainSpec(name="test", cpus=float(cores))
    assert why_no_room(another, site.pool.node_resources()) == ""
    assert why_no_room(another, site.call(site.pool.training.free_resources())) != ""
    waits = site.begin("print('ran')", workers=1, cpus=float(cores))
    time.sleep(3)
    waits.poll()
    assert waits.states() == ["starting"]
    site.call(site.pool.training.cancel(waits.order.job))
    assert waits.end(60).state == "cancelled"
    after = site.begin("print('ran', flush=True)", workers=1, cpus=float(cores))
    site.call(site.pool.training.cancel(holds.order.job))
    assert holds.end(60).state == "cancelled"
    assert after.end().state == "done"
    assert after.lines() == ["ran"]
    for job in (holds, waits, after):
        job.forget()


@pytest.mark.slow
def test_jobs_that_each_need_all_cores_are_begun_together_and_all_get_them(site):
    """None holds half of what another waits for."""
    half = (os.cpu_count() or 1) / 2
    script = "import time; time.sleep(2); print('ran', flush=True)"
    jobs = [site.begin(script, workers=2, cpus=half) for _ in range(3)]
    jobs.append(site.begin(script, workers=2, min_workers=1, cpus=half))
    for job in jobs:
        assert job.end(HANG_SECONDS).state == "done", job.news
        assert set(job.lines()) == {"ran"}
        job.forget()


@pytest.mark.slow
def test_requirements_that_cannot_be_installed_fail_the_job_and_it_says_so(site):
    job = site.begin("print('ran')", workers=1, requirements=["/there/is/no/such-1.0-py3-none-any.whl"])
    ended = job.end(HANG_SECONDS)  # Ray copies this Python's environment first
    assert ended.state == "failed"
    assert ended.detail.startswith("its requirements cannot be installed: ")
    assert not job.of(RankStarted)
    job.forget()


@pytest.mark.slow
def test_requirements_are_there_for_ranks_and_for_nobody_else(site, tmp_path):
    pytest.importorskip("virtualenv", reason="Ray makes environments with it")
    pytest.importorskip("pip", reason="Ray clones an environment, and wants its pip")
    wheel = tmp_path / "of_this_test-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("of_this_test.py", "VALUE = 41")
        packed.writestr(
            "of_this_test-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: of-this-test\nVersion: 1.0\n"
        )
        packed.writestr(
            "of_this_test-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        packed.writestr("of_this_test-1.0.dist-info/RECORD", "")
    script = "import of_this_test; print('value', of_this_test.VALUE, flush=True)"
    job = site.begin(script, workers=1, requirements=[str(wheel)], retries=0)
    assert job.end(HANG_SECONDS).state == "done", job.news
    assert job.lines() == ["value 41"]
    job.forget()
    without = site.begin(script, workers=1, retries=0)
    assert "of_this_test" in without.end().detail
    without.forget()


CAPTURED = """
    import os, torch
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model)
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
    compiled(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    raise SystemExit("after the step")
"""


def test_a_capture_runs_the_script_up_to_its_first_step_and_brings_its_graphs(site):
    async def placed() -> None:
        return

    def capture(order: TrainOrder, seconds: float = 100) -> CapturedGraphs:
        return site.call(site.pool.training.capture(order, world=2, seconds=seconds, placed=placed))

    captured = capture(site.order(CAPTURED, compile="torchrelay"))
    assert captured.bodies, captured
    assert "rank 0 of 2" in captured.log
    assert "after the step" not in captured.ended
    failed = capture(site.order("import nothing_of_this_name"))
    assert failed.bodies == []
    assert "nothing_of_this_name" in failed.ended + failed.log
    with pytest.raises(CompileTimeout):
        capture(site.order("import signal; signal.pause()"), seconds=8)
    assert gone(captures())


@pytest.mark.slow
def test_a_capture_waits_for_room_and_its_time_begins_when_it_has_some(site):
    holds = site.begin("import signal; signal.pause()", workers=1, cpus=float(os.cpu_count() or 1))
    holds.started(ranks=1)
    placed = threading.Event()

    async def tell() -> None:
        placed.set()

    order = site.order(CAPTURED, compile="torchrelay")
    capture = asyncio.run_coroutine_threadsafe(
        site.pool.training.capture(order, world=3, seconds=100, placed=tell), site.loop
    )
    assert not placed.wait(5)
    holds.forget()
    captured = capture.result(120)
    assert placed.is_set()
    assert captured.bodies
    assert "rank 0 of 3" in captured.log


@pytest.mark.slow
def test_a_killed_driver_goes_on_where_it_was(site):
    job = site.begin(MEET + FIRST_WAITS)
    first = job.started()
    job.until(lambda job: len(job.lines()) == 2)
    (driver,) = drivers()
    driver.kill()
    job.until_told(lambda job: "done" in job.states())
    assert [each.number for each in job.news] == list(range(1, len(job.news) + 1))
    assert gone([rank.pid for rank in first.values()])
    assert {event.attempt for event in job.of(RankStarted)} == {0, 1}
    job.forget()


def over(job):
    return next((turned for turned in job.of(StateChanged) if turned.state in TRAIN_ENDED), None)


@pytest.mark.slow
def test_a_jobs_time_goes_on_when_its_driver_is_started_again(site):
    job = site.begin("import signal; signal.pause()", workers=1, timeout_seconds=30)
    job.until(lambda job: "running" in job.states())
    (driver,) = drivers()
    driver.kill()
    ended = job.until_told(over)
    first, second = [turned.at for turned in job.of(StateChanged) if turned.state == "running"]
    assert (ended.state, ended.detail) == ("failed", "it ran longer than its 30 s")
    assert 30 <= ended.at - first < 30 + (second - first)
    job.forget()


@pytest.mark.slow
def test_a_cancel_outlives_the_driver_that_heard_it(site):
    job = site.begin("import signal; signal.signal(15, signal.SIG_IGN); signal.pause()", workers=1)
    (rank,) = job.started(ranks=1).values()
    site.call(site.pool.training.cancel(job.order.job))
    (driver,) = drivers()
    driver.kill()
    assert job.until_told(over).state == "cancelled"
    assert {event.attempt for event in job.of(RankStarted)} == {0}
    assert gone([rank.pid])
    job.forget()


TRAINS = """
    import os, time
    import torch, torch.distributed as dist
    from torchrelay import train
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    net = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    checkpoints = train.Checkpoints()
    state = {"model": net, "optimizer": optimizer}
    start = checkpoints.restore(**state) or 0
    for step in range(start, 24):
        draw = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        loss = net(torch.randn(4, 8, generator=draw)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        train.report(step=step, loss=loss)
        if (step + 1) % 4 == 0:
            checkpoints.save(step + 1, **state)
        time.sleep(0.1)
    checkpoints.wait()
    print(f"started at {start}, rank {dist.get_rank()} ended with {loss.item()!r}", flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_job_whose_ranks_were_killed_ends_with_the_very_loss_of_one_undisturbed(site):
    def losses(job):
        assert job.end(HANG_SECONDS).state == "done", job.news
        ends = [line for line in job.lines() if "ended with" in line]
        return sorted(line.partition(", ")[2] for line in ends), {line.split(",")[0] for line in ends}

    calm, from_the_start = losses(site.begin(TRAINS))
    assert len(calm) == 2
    assert from_the_start == {"started at 0"}
    job = site.begin(TRAINS, retries=2)
    first = job.started()
    job.until(lambda job: any(c.kept and c.step >= 8 for c in job.of(CheckpointEvent)))
    os.kill(first[1].pid, signal.SIGKILL)
    job.started(1)
    disturbed, later = losses(job)
    assert disturbed == calm
    assert later != from_the_start
    assert job.of(StateChanged)[-1].restarts == 1
    job.forget()
