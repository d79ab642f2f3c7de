"""compiler/search/benchmark.py: candidates that are Python functions, each in a copy of this process."""

import faulthandler
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torchrelay.compiler.search import benchmark
from torchrelay.compiler.search.benchmark import CandidateFailed, ForkedCpuRunner, error_of

REFERENCE = torch.arange(6, dtype=torch.float64).reshape(2, 3)


class Candidates:
    """In a Selection's place: each candidate a function that returns what it computed."""

    device = "cpu"

    def __init__(self, *functions):
        self.functions = functions

    def run(self, index, body):
        result = None

        def once():
            nonlocal result
            result = self.functions[index]()

        body(once)
        return result


def right():
    return REFERENCE.float()


def crash():
    faulthandler.disable()
    signal.raise_signal(signal.SIGSEGV)


def stop():
    signal.pause()


def complain():
    raise RuntimeError("no")


def after(times, then):
    """Right at first, and then something else."""
    runs = 0

    def run():
        nonlocal runs
        runs += 1
        return right() if runs <= times else then()

    return run


def children():
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


@pytest.fixture(autouse=True)
def leave_nothing():
    before = children(), sorted(path.name for path in Path("/proc/self/fd").iterdir())
    yield
    assert (children(), sorted(path.name for path in Path("/proc/self/fd").iterdir())) == before


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(benchmark, "FIRST_SECONDS", 3.0)
    monkeypatch.setattr(benchmark, "SAMPLE_SECONDS", 3.0)


def test_samples_are_times_in_milliseconds():
    def take_20ms():
        time.sleep(0.02)
        return right()

    with ForkedCpuRunner(Candidates(right, take_20ms), REFERENCE, threads=1) as running:
        assert [running.start(candidate) for candidate in (0, 1)] == [0.0, 0.0]
        times = running.take([1, 0, 1, 0, 1])
    assert all(time is not None and time > 0 for time in times)
    assert min(times[0], times[2], times[4]) >= 20
    assert len(times) == 5


@pytest.mark.parametrize("fault", [crash, stop, complain, lambda: os._exit(0)])
def test_a_candidate_that_does_not_start_is_told_from_one_that_does(impatient, fault):
    with ForkedCpuRunner(Candidates(fault, right), REFERENCE, threads=1) as running:
        with pytest.raises(CandidateFailed):
            running.start(0)
        assert running.start(1) == 0.0
        assert running.take([1])[0] > 0


@pytest.mark.parametrize("fault", [crash, stop, complain])
def test_a_candidate_may_fail_later_and_the_others_go_on(impatient, monkeypatch, fault):
    monkeypatch.setattr(benchmark, "RETAKES", 0)  # a sample that is taken again is a run too
    with ForkedCpuRunner(Candidates(right, after(2, fault)), REFERENCE, threads=1) as running:
        running.start(0), running.start(1)
        times = running.take([0, 1, 0, 1, 1, 0])
        assert [time is None for time in times] == [False, False, False, True, True, False]
        assert running.take([1, 0])[0] is None


def kill_once(marker, run_before):
    """SIGKILL from outside, in the first process that gets so far."""
    runs = 0

    def run():
        nonlocal runs
        runs += 1
        if runs > run_before and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return right()

    return run


@pytest.mark.parametrize("run_before", [0, 2])
def test_a_candidate_whose_process_is_killed_is_run_again(tmp_path, monkeypatch, run_before):
    monkeypatch.setattr(benchmark, "RETAKES", 0)
    with ForkedCpuRunner(
        Candidates(kill_once(tmp_path / "killed", run_before)), REFERENCE, threads=1
    ) as running:
        assert running.start(0) == 0.0
        assert all(time is not None for time in running.take([0] * 4))
    assert (tmp_path / "killed").exists()


def test_a_candidate_whose_process_is_killed_each_time_has_failed(monkeypatch):
    monkeypatch.setattr(benchmark, "RETAKES", 0)
    kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    with ForkedCpuRunner(Candidates(after(2, kill), kill), REFERENCE, threads=1) as running:
        running.start(0)
        assert [time is None for time in running.take([0] * 4)] == [False, False, True, True]
        with pytest.raises(CandidateFailed):
            running.start(1)


def test_a_candidate_runs_in_as_many_threads_as_the_kernels_will_whatever_this_process_did_before():
    """OpenMP's threads do not survive a fork, and who waits for them waits for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(3_000_000).add_(1).sum()  # in several threads
        found = []

        def parallel():
            torch.randn(3_000_000).add_(1).sum()
            found.append(torch.get_num_threads())
            return right() if found == [2] else None

        with ForkedCpuRunner(Candidates(parallel), REFERENCE, threads=2) as running:
            assert running.start(0) == 0.0
    finally:
        torch.set_num_threads(before)


def by_turns(*seconds):
    """Takes so long, run by run, and then the last of them for ever."""
    runs = 0

    def run():
        nonlocal runs
        time.sleep(seconds[min(runs, len(seconds) - 1)])
        runs += 1
        return right()

    return run


def ready_without_a_processor(monkeypatch, *shares):
    """Have each sample, in turn, be disturbed for so many seconds; the last one's share is that of all that follow."""
    told, total = [0], [0.0]

    def waited():
        if told[0] % 2:  # after a sample
            total[0] += shares[min(told[0] // 2, len(shares) - 1)]
        told[0] += 1
        return total[0]

    monkeypatch.setattr(benchmark, "seconds_waited_for_processor", waited)


def test_a_sample_that_other_work_disturbed_is_taken_again(monkeypatch):
    ready_without_a_processor(monkeypatch, 0.04, 0.04, 0.0)
    with ForkedCpuRunner(Candidates(by_turns(0, 0.05, 0.05, 0.001)), REFERENCE, threads=1) as running:
        running.start(0)
        assert 1 <= running.take([0])[0] < 50


def test_where_every_sample_is_disturbed_the_least_disturbed_counts(monkeypatch):
    ready_without_a_processor(monkeypatch, *[0.5] * 3, 0.02, *[0.5] * benchmark.RETAKES)
    seconds = [0.2] * 3 + [0.1] + [0.2] * 20
    with ForkedCpuRunner(Candidates(by_turns(0, *seconds)), REFERENCE, threads=1) as running:
        running.start(0)
        assert 100 <= running.take([0])[0] < 200


def test_how_long_threads_waited_is_the_second_number_of_each(tmp_path):
    for number, text in enumerate(["719785330 536858630 243\n", "1 2000000000 3", "", "garbage here 1"]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "schedstat").write_text(text)
    (tmp_path / "gone").mkdir()
    assert benchmark.seconds_waited_for_processor(tmp_path) == pytest.approx(2.536858630)
    assert benchmark.seconds_waited_for_processor(tmp_path / "none") == 0.0
    assert benchmark.seconds_waited_for_processor() >= 0.0


def test_what_a_candidate_changes_is_not_seen_by_others():
    shared = torch.zeros(3)

    def change():
        shared.add_(1)
        return right()

    with ForkedCpuRunner(Candidates(change), None, threads=1) as running:
        assert running.start(0) is None
        running.take([0, 0])
    assert shared.tolist() == [0, 0, 0]


def test_a_process_too_large_to_be_copied_is_not(monkeypatch):
    monkeypatch.setattr(benchmark, "MAX_FORKED_BYTES", 1 << 20)
    with (
        ForkedCpuRunner(Candidates(right), REFERENCE, threads=1) as running,
        pytest.raises(CandidateFailed, match="too large"),
    ):
        running.start(0)


@pytest.mark.parametrize(
    "result, error",
    [
        (REFERENCE, 0.0),
        (REFERENCE + 0.5, 0.1),
        (REFERENCE.float() * 1.01, 0.01),
        (REFERENCE.bfloat16(), 0.0),
        (torch.full((2, 3), float("nan")), float("inf")),
        (torch.full((2, 3), float("inf")), float("inf")),
        (REFERENCE[:, :2], float("inf")),
    ],
)
def test_an_error_is_a_share_of_the_largest_value(result, error):
    assert error_of(result, REFERENCE) == pytest.approx(error, rel=1e-4)


def test_without_a_reference_there_is_no_error():
    assert error_of(REFERENCE, None) is None
    assert error_of(torch.zeros(0), torch.zeros(0, dtype=torch.float64)) == 0.0
    assert error_of(torch.ones(2), torch.zeros(2, dtype=torch.float64)) == 1.0


@pytest.mark.parametrize(
    "files, size",
    [
        ({"index0/size": "48K", "index2/size": "2048K", "index3/size": "36M"}, 36 << 20),
        ({"index0/size": "32K\n"}, 1 << 20),
        ({"index3/size": "1G"}, 128 << 20),
        ({"index3/size": "much"}, 32 << 20),
        ({}, 32 << 20),
    ],
)
def test_the_last_level_cache_is_asked_for(tmp_path, files, size):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    assert benchmark.cache_bytes(tmp_path) == size


class Memory:
    """A GPU's, in bytes: what its tensors take, and what is free."""

    def __init__(self, monkeypatch, free):
        self.taken, self.free = 0, free
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.taken)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (self.free, 0))

    def places(self, turns, size):
        """Where operands of that size lie, turn after turn."""
        places, made = benchmark.BufferRotation(), {0}

        def move(place):
            if place not in made:
                if size > self.free:
                    raise torch.OutOfMemoryError
                made.add(place)
                self.taken += size
                self.free -= size
            return True

        return [places.next(move) for _ in range(turns)]


def test_operands_lie_in_one_place_after_the_other_and_begin_anew(monkeypatch):
    most = benchmark.BufferRotation.MAX
    assert Memory(monkeypatch, 1 << 30).places(2 * most + 3, size=1000) == [
        *range(most),
        *range(most),
        0,
        1,
        2,
    ]


def test_copies_of_operands_take_a_share_of_the_free_memory_and_no_more(monkeypatch):
    memory = Memory(monkeypatch, 1000)
    assert memory.places(8, size=20) == [0, 1, 2, 3, 4, 5, 0, 1]
    assert memory.free == 900
    assert Memory(monkeypatch, 50).places(4, size=100) == [0, 0, 0, 0]


def test_operands_that_cannot_be_moved_stay(monkeypatch):
    Memory(monkeypatch, 1000)
    places = benchmark.BufferRotation()
    assert [places.next(lambda place: False) for _ in range(3)] == [0, 0, 0]
