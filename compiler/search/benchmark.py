"""Runs an operator's candidates, and takes each one's error and timed samples.

On a CPU each candidate runs in a fork of this process, so that a crash or a hang costs that fork only. On a GPU, which
cannot be used after a fork, candidates run in this process. Every sample begins with cold caches: in a model a kernel
does not find its inputs there either (docs/decisions/0017-how-kernels-are-measured.md).
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import resource
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch

from ..process.forked_process import ForkedProcess, ForkedProcessLost
from ..torch_internals import devices
from ..tuning.candidates import Candidates, RunnableCandidates
from . import numerics

FIRST_SECONDS = 120.0
SAMPLE_SECONDS = 30.0
"""Time limits of a candidate's preparation with its first run, and of a later run."""

RETAKES = 8
UNDISTURBED = 0.01
"""A sample on a CPU is repeated up to RETAKES times until its threads waited for a processor for no more than this
share of its time; otherwise the least disturbed one counts. Other work takes processors away for milliseconds."""

MAX_FORKED_BYTES = 8 << 30
"""Limit for all forks together: a job's memory limit counts shared pages in each of them."""

_NUMBER = struct.Struct("d")
_CACHE_BYTES = (1 << 20, 32 << 20, 128 << 20)
"""Smallest size used, size used if Linux does not report one, largest size used."""


class CandidateFailed(Exception):
    """A candidate crashed, hung or raised."""


Watchdog = Callable[[float], AbstractContextManager[object]]
"""watchdog(seconds): limits the time of the block inside; contextlib.nullcontext sets no limit."""


def error_of(result: torch.Tensor, reference: torch.Tensor | None) -> float | None:
    """Infinite for a result of another shape or with NaN."""
    if reference is None:
        return None
    if result.shape != reference.shape:
        return float("inf")
    largest = float(reference.abs().max()) if reference.numel() else 0.0
    difference = float((result.double() - reference).abs().max()) if reference.numel() else 0.0
    error = difference / (largest or 1.0)
    return error if error == error else float("inf")


class CandidateAgreement:
    """The results of candidates that have no reference: equal ones, but for `tolerance`, form a group.

    The largest group is taken to be right; of equally large ones the first.
    """

    MAX_GROUPS = 8

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._groups: list[tuple[torch.Tensor, list[int]]] = []
        self._others: list[int] = []

    def add(self, candidate: int, result: torch.Tensor) -> None:
        for reference, members in self._groups:
            error = error_of(result, reference)
            if error is not None and error <= self._tolerance:
                members.append(candidate)
                return
        if len(self._groups) < self.MAX_GROUPS and not bool(result.isnan().any()):
            self._groups.append((result.double(), [candidate]))
        else:
            self._others.append(candidate)

    def disagreeing(self) -> list[int]:
        """The candidates outside the largest group."""
        groups = sorted((members for _, members in self._groups), key=len, reverse=True)
        return sorted(sum(groups[1:], self._others))


class ForkedCpuRunner:
    """Each started candidate has a forked process, which takes one sample for each message. No candidate is at fault
    when its process gets SIGKILL, from a person or for the machine's memory: it is run again, once."""

    def __init__(self, selection: Candidates, reference: torch.Tensor | None, threads: int) -> None:
        self._selection = selection
        self._reference = reference
        self._threads = threads
        self._running: dict[int, ForkedProcess] = {}
        self._killed: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for candidate in list(self._running):
            self._running.pop(candidate).close()

    def start(self, candidate: int) -> float | None:
        """Run it once; returns its largest error as a share of the reference's largest value, None without a
        reference. Raises CandidateFailed."""
        if (len(self._running) + 1) * _peak_memory() > MAX_FORKED_BYTES:
            raise CandidateFailed("this process is too large to be forked once more")
        try:
            process = ForkedProcess.running(lambda fork: _in_new_thread(lambda: self._run(candidate, fork)))
        except OSError as error:
            raise CandidateFailed(f"no process could be made: {error}") from error
        try:
            (error_share,) = _NUMBER.unpack(process.receive(FIRST_SECONDS))
        except ForkedProcessLost as lost:
            if self._may_run_again(candidate, lost, process.close()):
                return self.start(candidate)
            raise CandidateFailed(str(lost)) from lost
        self._running[candidate] = process
        return None if self._reference is None else float(error_share)

    def take(self, candidates: Sequence[int]) -> list[float | None]:
        """One sample in milliseconds of each started candidate in `order`; None once a candidate has failed."""
        return [self._sample(candidate) for candidate in candidates]

    def _sample(self, candidate: int) -> float | None:
        process = self._running.get(candidate)
        if process is None:
            return None
        try:
            process.send(b"")
            (milliseconds,) = _NUMBER.unpack(process.receive(SAMPLE_SECONDS))
        except ForkedProcessLost as lost:
            if not self._may_run_again(candidate, lost, self._running.pop(candidate).close()):
                return None
            try:
                self.start(candidate)
            except CandidateFailed:
                return None
            return self._sample(candidate)
        return float(milliseconds)

    def _may_run_again(self, candidate: int, lost: ForkedProcessLost, status: int) -> bool:
        again = lost.ended and status == -signal.SIGKILL and candidate not in self._killed
        self._killed.add(candidate)
        return again

    def _run(self, candidate: int, fork: ForkedProcess) -> None:
        """Serve one candidate in its process: run it once, send its error, then send one sample for each message."""
        torch.set_num_threads(self._threads)
        result = self._selection.run(candidate, lambda once: once())
        fork.send(_NUMBER.pack(error_of(result, self._reference) or 0.0))
        flushed = torch.zeros(cache_bytes(), dtype=torch.uint8)

        def sample(once: Callable[[], Any]) -> tuple[float, float]:
            flushed.add_(1)
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
    """OpenMP keeps a team of threads for each thread that uses it. A fork has no such teams, so its first thread would
    wait for its team for ever; a new thread gets a new team."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
    thread.start()
    thread.join()


def seconds_waited_for_processor(tasks: Path = Path("/proc/self/task")) -> float:
    """Sum over this process's threads of the time they were ready to run without a processor; 0 if Linux has no such
    figure (Documentation/scheduler/sched-stats.rst: the second number of schedstat, nanoseconds)."""
    total = 0
    with contextlib.suppress(OSError):
        for task in tasks.iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has ended
                total += int((task / "schedstat").read_bytes().split()[1])
    return total / 1e9


def _peak_memory() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the last-level cache."""
    least, usual, most = _CACHE_BYTES
    sizes = []
    for path in folder.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = path.read_text().strip()
            sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return min(max(max(sizes, default=usual), least), most)


class BufferRotation:
    """Rotates a GPU kernel's operands through several copies in memory: addresses make one kernel a per cent faster and
    the next one slower, and differ in each process (decision 17)."""

    MAX = 64
    SHARE = 0.1
    """Share of the free memory: limit of all copies together."""

    def __init__(self) -> None:
        self._turns = 0
        self._count = self.MAX

    def next(self, move: Callable[[int], bool]) -> int:
        """Returns the next copy's number. move(copy): have candidates use that copy, which the first call makes; False:
        operands cannot be moved from copy 0."""
        copy = self._turns % self._count
        self._turns += 1
        before = torch.cuda.memory_allocated()
        try:
            moved = move(copy)
        except torch.OutOfMemoryError:
            move(0)
            moved = False
        if not moved:
            self._count = 1
            return 0
        if copy == 1 and (size := torch.cuda.memory_allocated() - before) > 0:
            self._count = min(self.MAX, 2 + int(self.SHARE * torch.cuda.mem_get_info()[0] / size))
        return copy


class InProcessRunner(abc.ABC):
    """Runs candidates in this process; a candidate that ends the process ends the search. Subclasses take samples.
    `start` and `take` as in ForkedCpuRunner.

    agreement: gets each started candidate's result. group: samples taken at a time. before_group: called with a group's
    candidates before it is taken.
    """

    GROUP = 48

    def __init__(
        self,
        selection: RunnableCandidates,
        reference: torch.Tensor | None = None,
        *,
        agreement: CandidateAgreement | None = None,
        group: int = GROUP,
        before_group: Callable[[Sequence[int]], None] = lambda group: None,
    ) -> None:
        self._agreement = agreement
        self._selection = selection
        self._reference = reference
        self._group = group
        self._before_group = before_group
        self._ready: dict[tuple[int, int], Callable[[], Any]] = {}
        """What runs a candidate once, by operands' copy and candidate."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ready.clear()
        self._reference = None

    def start(self, candidate: int) -> float | None:
        def body(once: Callable[[], Any]) -> None:
            self._ready[0, candidate] = once
            once()

        try:
            result = self._selection.run(candidate, body)
            self._synchronize()
            if self._agreement is not None:
                self._agreement.add(candidate, result)
            return error_of(result, self._reference)
        except Exception as error:
            self._ready.pop((0, candidate), None)
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise CandidateFailed(text[:500]) from error

    def take(self, candidates: Sequence[int]) -> list[float | None]:
        copy = self._next_copy()
        for candidate in sorted({*candidates}):
            self._bind(copy, candidate)
        times: list[float | None] = []
        for begin in range(0, len(candidates), self._group):
            group = candidates[begin : begin + self._group]
            self._before_group(group)
            times += self._take_group(copy, group)
        return times

    @abc.abstractmethod
    def _synchronize(self) -> None:
        """Wait for what was started, and raise its errors."""

    def _next_copy(self) -> int:
        """Which copy of the operands the next samples use."""
        return 0

    @abc.abstractmethod
    def _take_group(self, copy: int, group: Sequence[int]) -> list[float | None]:
        """Milliseconds of each candidate's sample, in order; None for one that failed."""

    def _bind(self, copy: int, candidate: int) -> None:
        """Prepare a started candidate to run on the present copy of the operands."""
        if (copy, candidate) in self._ready or (0, candidate) not in self._ready:
            return

        def body(once: Callable[[], Any]) -> None:
            self._ready[copy, candidate] = once

        try:
            self._selection.run(candidate, body)
        except Exception:
            self._drop(candidate)

    def _launch(self, copy: int, candidate: int) -> bool:
        """False if it fails, now or earlier."""
        once = self._ready.get((copy, candidate))
        if once is None:
            return False
        try:
            once()
        except Exception:
            self._drop(candidate)
            return False
        return True

    def _drop(self, candidate: int) -> None:
        traceback.print_exc()
        for key in [key for key in self._ready if key[1] == candidate]:
            del self._ready[key]


class GpuRunner(InProcessRunner):
    """On the current GPU. Each call of `take` uses another copy of the operands (BufferRotation).

    A group of samples is enqueued behind a kernel that does nothing until all of them are enqueued, so that no delay of
    the host falls between them; if it ended too early, the group is taken again. A group of InProcessRunner.GROUP fits
    into CUDA's queue, and Python enqueues it in about a millisecond. Each sample starts with a write of four times the
    L2 cache, and its events enclose the candidate only.
    """

    LEAD_SECONDS = (2e-3, 0.1)
    """How long the first sample waits at first, and at most."""
    ATTEMPTS = 4

    _rotation: BufferRotation
    _flushed: torch.Tensor

    def __enter__(self) -> Self:
        size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flushed = torch.empty(max(4 * size, 64 << 20), dtype=torch.uint8, device="cuda")
        self._rotation = BufferRotation()
        self._lead = self.LEAD_SECONDS[0]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        del self._flushed

    def _synchronize(self) -> None:
        torch.cuda.synchronize()

    def _next_copy(self) -> int:
        return self._rotation.next(self._selection.move)

    def _take_group(self, copy: int, group: Sequence[int]) -> list[float | None]:
        least, most = self.LEAD_SECONDS
        for _ in range(self.ATTEMPTS):
            begun = time.perf_counter()
            started = _event()
            devices.delay_current_stream(self._lead)
            started.record()
            events = [self._enqueue(copy, candidate) for candidate in group]
            in_time = not started.query()
            self._lead = min(max(2 * (time.perf_counter() - begun), least), most)
            torch.cuda.synchronize()
            if in_time:
                break
        return [None if pair is None else max(pair[0].elapsed_time(pair[1]), 1e-6) for pair in events]

    def _enqueue(self, copy: int, candidate: int) -> tuple[Any, Any] | None:
        begin, end = _event(), _event()
        self._flushed.zero_()
        begin.record()
        if not self._launch(copy, candidate):
            return None
        end.record()
        return begin, end


def _event() -> Any:
    event: Any = torch.cuda.Event
    return event(enable_timing=True)


def gpu_works() -> bool:
    """Whether this process can still use its GPU."""
    try:
        return int(torch.ones(1024, device="cuda").mul_(2).sum().item()) == 2048
    except Exception:
        return False


def candidate_runner(
    selection: Candidates, threads: int
) -> tuple[ForkedCpuRunner | GpuRunner, CandidateAgreement | None]:
    """The runner for a prepared selection, to be used in a `with` block, and what compares candidates with one another
    where none is PyTorch's own kernel, which a reference needs. threads: for kernels on a CPU."""
    reference = selection.reference()
    if selection.device == "cpu":
        return ForkedCpuRunner(selection, reference, threads), None
    agreement = None
    if reference is None and not selection.aten:
        agreement = CandidateAgreement(
            numerics.TOLERANCE.get(getattr(torch, selection.problem.result.dtype), 0.0)
        )
    return GpuRunner(selection, reference, agreement=agreement), agreement


def gpu_clock() -> str:
    """The multiprocessors' present clock; '' without NVML."""
    try:
        return f"{torch.cuda.clock_rate()} MHz"
    except Exception:
        return ""
