"""Candidates made to run: an operator's candidates in; how far off each is, and timed samples of it, out.

On a CPU each runs in a copy of this process: one that crashes or hangs loses its copy and nothing else. On a GPU, which
cannot be used after a fork, they run here. Every sample begins with cold caches: a kernel in a model finds there what
the kernels before it left, not its own inputs. On a CPU one that other work disturbed is taken again.
"""

from __future__ import annotations

import contextlib
import contextvars
import resource
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from ..forking.forked_process import ForkedProcess, ForkedProcessLost
from ..torch_internals import devices
from ..tuning.candidates import Candidates

FIRST_SECONDS = 120.0
SAMPLE_SECONDS = 30.0
"""How long a candidate may take to get ready and run once, and to run again, before it counts as hung."""

RETAKES = 8
UNDISTURBED = 0.01
"""A sample on a CPU is taken again, at most so often, until its threads waited for a processor no longer than this
share of its time; else the least disturbed one counts. Other work takes processors away for milliseconds."""

COPIED_BYTES = 8 << 30
"""What all copies may hold together: whoever watches a job's memory counts in each of them what they share."""

_NUMBER = struct.Struct("d")
_CACHE_BYTES = (1 << 20, 32 << 20, 128 << 20)
"""Least, where the system does not tell, and most."""


class CandidateFailed(Exception):
    """A candidate crashed, hung or raised."""


Watchdog = Callable[[float], AbstractContextManager[None]]
"""Around what may hang, which is given so many seconds."""


@contextlib.contextmanager
def no_watchdog(seconds: float) -> Iterator[None]:
    yield


class CandidateRunner(Protocol):
    """Candidates of one selection that can be run, in a `with` block."""

    def __enter__(self) -> CandidateRunner: ...

    def __exit__(self, *error: object) -> None:
        """Nothing of it is left."""

    def start(self, candidate: int) -> float | None:
        """Run it once; its largest error as a share of the reference's largest value (None: there is no reference).
        Raises CandidateFailed."""

    def take(self, order: Sequence[int]) -> list[float | None]:
        """One sample, in milliseconds, of each candidate named, all of them started; None from where one fails."""


def candidate_runner(selection: Candidates, threads: int) -> CandidateRunner:
    """For a selection that is prepared. threads: that a CPU's kernels run in."""
    reference = selection.reference()
    return (
        ForkedCpuRunner(selection, reference, threads)
        if selection.device == "cpu"
        else GpuRunner(selection, reference)
    )


def error_of(result: torch.Tensor, reference: torch.Tensor | None) -> float | None:
    """Infinite for a result of another shape or that is not a number."""
    if reference is None:
        return None
    if result.shape != reference.shape:
        return float("inf")
    largest = float(reference.abs().max()) if reference.numel() else 0.0
    difference = float((result.double() - reference).abs().max()) if reference.numel() else 0.0
    error = difference / (largest or 1.0)
    return error if error == error else float("inf")


class ForkedCpuRunner:
    """On a CPU. Each started candidate has a process, which takes a sample for each message that it gets."""

    def __init__(self, selection: Candidates, reference: torch.Tensor | None, threads: int) -> None:
        self._selection = selection
        self._reference = reference
        self._threads = threads
        self._running: dict[int, ForkedProcess] = {}

    def __enter__(self) -> ForkedCpuRunner:
        return self

    def __exit__(self, *error: object) -> None:
        for candidate in list(self._running):
            self._running.pop(candidate).close()

    def start(self, candidate: int) -> float | None:
        if (len(self._running) + 1) * _held() > COPIED_BYTES:
            raise CandidateFailed("this process is too large to be copied once more")
        try:
            process = ForkedProcess.running(lambda fork: _in_new_thread(lambda: self._run(candidate, fork)))
        except OSError as error:
            raise CandidateFailed(f"no process could be made: {error}") from error
        try:
            (off,) = _NUMBER.unpack(process.receive(FIRST_SECONDS))
        except ForkedProcessLost as lost:
            process.close()
            raise CandidateFailed(str(lost)) from lost
        self._running[candidate] = process
        return None if self._reference is None else float(off)

    def take(self, order: Sequence[int]) -> list[float | None]:
        return [self._sample(candidate) for candidate in order]

    def _sample(self, candidate: int) -> float | None:
        process = self._running.get(candidate)
        if process is None:
            return None
        try:
            process.send(b"")
            (milliseconds,) = _NUMBER.unpack(process.receive(SAMPLE_SECONDS))
        except ForkedProcessLost:
            self._running.pop(candidate).close()
            return None
        return float(milliseconds)

    def _run(self, candidate: int, fork: ForkedProcess) -> None:
        """In a candidate's process: run it once and send its error; then send one sample for each message."""
        torch.set_num_threads(self._threads)
        result = self._selection.run(candidate, lambda once: once())
        fork.send(_NUMBER.pack(error_of(result, self._reference) or 0.0))
        others = torch.zeros(_cache_bytes(), dtype=torch.uint8)

        def sample(once: Callable[[], Any]) -> tuple[float, float]:
            others.add_(1)
            before, begin = seconds_waited_for_processor(), time.perf_counter()
            once()
            took = max(time.perf_counter() - begin, 1e-9)
            return (seconds_waited_for_processor() - before) / took, took

        def serve(once: Callable[[], Any]) -> None:
            while True:  # until this process is killed
                fork.receive()
                share, took = sample(once)
                for _ in range(RETAKES):
                    if share <= UNDISTURBED:
                        break
                    share, took = min((share, took), sample(once))
                fork.send(_NUMBER.pack(took * 1e3))

        self._selection.run(candidate, serve)


def _in_new_thread(work: Callable[[], None]) -> None:
    """OpenMP keeps a team of threads for each thread that uses it. After a fork, the thread that was copied would wait
    for ever for its team, which was not; a new thread gets a team of its own."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
    thread.start()
    thread.join()


def seconds_waited_for_processor(tasks: Path = Path("/proc/self/task")) -> float:
    """Seconds that this process's threads were ready to run and had no processor, all together; 0 where Linux does not
    tell (Documentation/scheduler/sched-stats.rst: the second number of schedstat, nanoseconds)."""
    total = 0
    with contextlib.suppress(OSError):
        for task in tasks.iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has ended
                total += int((task / "schedstat").read_bytes().split()[1])
    return total / 1e9


def _held() -> int:
    """Bytes of memory that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the last-level cache."""
    least, usual, most = _CACHE_BYTES
    sizes = []
    for path in folder.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = path.read_text().strip()
            sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return min(max(max(sizes, default=usual), least), most)


class BufferRotation:
    """Where in a GPU's memory operands are to lie for the next samples: in a few places by turns, as many as there is
    room for. Where they lie makes one kernel a per cent faster and the next one slower, and they lie elsewhere in each
    process (decision 17)."""

    MOST = 64
    SHARE = 0.1
    """Of the memory that is free: what all copies may take."""

    def __init__(self) -> None:
        self._turns = 0
        self._count = self.MOST

    def next(self, move: Callable[[int], bool]) -> int:
        """move: has the operands in a place, the first time by copying them; False: they stay in place 0."""
        place = self._turns % self._count
        self._turns += 1
        before = torch.cuda.memory_allocated()
        try:
            moved = move(place)
        except torch.OutOfMemoryError:
            move(0)
            moved = False
        if not moved:
            self._count = 1
            return 0
        if place == 1 and (taken := torch.cuda.memory_allocated() - before) > 0:
            self._count = min(self.MOST, 2 + int(self.SHARE * torch.cuda.mem_get_info()[0] / taken))
        return place


class GpuRunner:
    """On the current GPU, in this process; a candidate that ends the process's use of the GPU ends the search.

    The inputs lie elsewhere at each call of `take` (Places).

    A few dozen samples are enqueued behind a kernel that does nothing for longer than that takes, so that no wait of
    the host's (another thread, an import, other work) stands between them: else they are taken again. Each starts with
    a write of four times the L2 cache; the events stand around nothing but the candidate.
    """

    AT_ONCE = 48
    """Samples in line: Python enqueues them in about a millisecond, and CUDA's queue has room for them."""
    LEAD_SECONDS = (2e-3, 0.1)
    """How long the first of them waits at first, and at most."""
    ATTEMPTS = 4

    def __init__(self, selection: Candidates, reference: torch.Tensor | None) -> None:
        self._selection = selection
        self._reference = reference
        self._once: dict[tuple[int, int], Callable[[], Any]] = {}
        """By place and candidate."""
        self._places = BufferRotation()
        self._others: torch.Tensor | None = None
        self._lead = self.LEAD_SECONDS[0]

    def __enter__(self) -> GpuRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self._once.clear()
        self._others = None
        self._reference = None

    def start(self, candidate: int) -> float | None:
        def body(once: Callable[[], Any]) -> None:
            self._once[0, candidate] = once
            once()

        try:
            result = self._selection.run(candidate, body)
            torch.cuda.synchronize()
            return error_of(result, self._reference)
        except Exception as error:
            self._once.pop((0, candidate), None)
            raise CandidateFailed(" ".join(str(error).split())[:500] or type(error).__name__) from error

    def take(self, order: Sequence[int]) -> list[float | None]:
        if self._others is None:
            size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            self._others = torch.empty(max(4 * size, 64 << 20), dtype=torch.uint8, device="cuda")
        place = self._places.next(self._selection.move)
        for candidate in sorted({*order}):
            self._bind(place, candidate)
        times: list[float | None] = []
        for begin in range(0, len(order), self.AT_ONCE):
            times += self._in_line(place, order[begin : begin + self.AT_ONCE], self._others)
        return times

    def _bind(self, place: int, candidate: int) -> None:
        """Have the candidate ready on the inputs where they are now."""
        if (place, candidate) in self._once or (0, candidate) not in self._once:
            return

        def body(once: Callable[[], Any]) -> None:
            self._once[place, candidate] = once

        try:
            self._selection.run(candidate, body)
        except Exception:
            self._lose(candidate)

    def _lose(self, candidate: int) -> None:
        traceback.print_exc()
        for key in [key for key in self._once if key[1] == candidate]:
            del self._once[key]

    def _in_line(self, place: int, order: Sequence[int], others: torch.Tensor) -> list[float | None]:
        least, most = self.LEAD_SECONDS
        for _ in range(self.ATTEMPTS):
            begun = time.perf_counter()
            started = _event()
            devices.delay_current_stream(self._lead)
            started.record()
            events = [self._enqueue(place, candidate, others) for candidate in order]
            in_time = not started.query()
            self._lead = min(max(2 * (time.perf_counter() - begun), least), most)
            torch.cuda.synchronize()
            if in_time:
                break
        return [None if pair is None else max(pair[0].elapsed_time(pair[1]), 1e-6) for pair in events]

    def _enqueue(self, place: int, candidate: int, others: torch.Tensor) -> tuple[Any, Any] | None:
        once = self._once.get((place, candidate))
        if once is None:
            return None
        begin, end = _event(), _event()
        others.zero_()
        begin.record()
        try:
            once()
        except Exception:
            self._lose(candidate)
            return None
        end.record()
        return begin, end


def _event() -> Any:
    event: Any = torch.cuda.Event
    return event(enable_timing=True)
