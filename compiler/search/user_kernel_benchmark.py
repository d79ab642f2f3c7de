"""A user-written kernel's candidates made to run, in a copy of the process: an order in; how each did, out.

The copy may be lost at any candidate (clean_fork_server.py), so it says which one it takes up before it does.
All candidates get
the same arguments; one whose results differ from the first one's by more than rounding is out. Samples are taken as
those of Inductor's candidates (benchmark.py): cold caches, interleaved, in an order that follows from the name.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec
import torch
from msgspec import Struct

from .. import decoding
from ..api.tuning import kernels
from ..graph import numerics, triton_kernels
from ..request import schema
from ..tuning.records import Operand
from . import benchmark, device_lock
from . import ranking as search_ranking

_SLICE = 1 << 26
"""Elements that are compared at a time: in float64 they take half a GiB."""
_THREADS = 8
"""Compilers at once."""


class KernelBenchmarkOrder(Struct, frozen=True):
    """What to run. skip: candidates that ended a copy. name: of the problem; inputs and order of samples follow from
    it. careful: take up one candidate at a time, because a copy was lost and nobody knows at which."""

    source: schema.KernelSource
    grids: list[tuple[int, int, int]]
    tensors: list[tuple[str, Operand]]
    constants: list[tuple[str, schema.KernelConstant]]
    device: Literal["cpu", "cuda"]
    name: str
    settings: search_ranking.RankingSettings
    skip: list[int]
    careful: bool = False


class CandidateStarted(Struct, frozen=True, tag="takes"):
    """It takes up this candidate: if its process ends now, that is why. -1: it does something else."""

    candidate: int


class CandidateFails(Struct, frozen=True, tag="fails"):
    candidate: int
    why: str


class BenchmarkStopped(Struct, frozen=True, tag="stops"):
    """Nothing can be measured here, and why."""

    why: str


class CandidatesRanked(Struct, frozen=True, tag="ranked"):
    """The outcome. timed: in milliseconds. winner: None if every candidate failed. clock: of the GPU meanwhile."""

    winner: int | None
    timed: list[tuple[int, search_ranking.SampleSummary]]
    clock: str


BenchmarkMessage = CandidateStarted | CandidateFails | BenchmarkStopped | CandidatesRanked


def run_benchmark(order: bytes, tell: Callable[[bytes], None]) -> None:
    """clean_fork_server.ForkedWork: messages are BenchmarkMessages."""
    given = decoding.from_msgpack(order, type=KernelBenchmarkOrder)
    _KernelBenchmark(given, lambda told: tell(msgspec.msgpack.encode(told))).run()


class _KernelBenchmark:
    def __init__(self, order: KernelBenchmarkOrder, tell: Callable[[BenchmarkMessage], None]) -> None:
        self._order = order
        self._tell = tell
        made = triton_kernels.build(order.source)
        self._kernel = made.fn if order.source.configs else made
        self._constants = {name: triton_kernels.value_of(value) for name, value in order.constants}
        self._alive = [i for i in range(len(order.grids)) if i not in order.skip]
        self._inputs: dict[str, torch.Tensor] = {}
        self._memory: dict[str, torch.Tensor] = {}
        self._places = benchmark.BufferRotation()
        self._elsewhere = [self._memory]
        """By place."""
        self._ready: dict[tuple[int, int], Callable[[], Any]] = {}
        """By place and candidate."""
        self._place = 0

    def run(self) -> None:
        self._tell(CandidateStarted(-1))
        try:
            self._prepare()
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self._tell(BenchmarkStopped(f"its arguments cannot be made: {error!s:.300}"))
            return
        self._compile()
        reference: dict[str, torch.Tensor] | None = None
        for candidate in list(self._alive):
            self._tell(CandidateStarted(candidate))
            try:
                self._restore()
                self._launch(candidate)
                self._settle()
            except Exception as error:
                traceback.print_exc()
                self._out(candidate, f"does not run: {type(error).__name__}: {error!s:.300}")
                self._check_device()
                continue
            if reference is None:
                reference = {name: tensor.clone() for name, tensor in self._memory.items()}
            elif why := self._disagreement(reference):
                self._out(candidate, why)
        reference = None
        texts = [kernels.config_text(config) for config in self._order.source.configs]
        with device_lock.exclusive(device_lock.gpu_lock_folder() if self._order.device == "cuda" else None):
            self._restore()
            self._others = _other_memory(self._order.device)
            ranking = search_ranking.rank(
                self._take,
                sorted(self._alive, key=lambda candidate: texts[candidate]),
                name=self._order.name,
                settings=self._order.settings,
            )
            clock = device_lock.gpu_clock() if self._order.device == "cuda" else ""
        for candidate in sorted(ranking.failed):
            self._tell(CandidateFails(candidate, "failed while it was measured"))
        self._tell(CandidatesRanked(ranking.winner, sorted(ranking.timed.items()), clock))

    def _out(self, candidate: int, why: str) -> None:
        self._alive.remove(candidate)
        self._tell(CandidateFails(candidate, why))

    # --- arguments -----------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        device = self._order.device
        draw = torch.Generator(device).manual_seed(int(self._order.name[:8], 16))
        for name, operand in self._order.tensors:
            dtype = getattr(torch, operand.dtype)
            value = torch.empty_strided(operand.size, operand.stride, dtype=dtype, device=device)
            self._inputs[name] = numerics.fill(value, draw)
            self._memory[name] = torch.empty_strided(operand.size, operand.stride, dtype=dtype, device=device)

    def _restore(self) -> None:
        """Kernels write to their arguments."""
        for name, value in self._inputs.items():
            self._memory[name].copy_(value)

    def _disagreement(self, reference: dict[str, torch.Tensor]) -> str:
        """Why what the candidate left in its arguments is not what the first one did; '' if it is."""
        for name, want in reference.items():
            difference, largest = _difference(self._memory[name], want)
            allowed = _tolerance(reference)
            if not difference <= allowed * largest:
                return (
                    f"leaves {name} {difference:.3g} off what the first configuration does, where the largest value "
                    f"is {largest:.3g}"
                )
        return ""

    # --- launches ------------------------------------------------------------------------------------------

    def _options(self, candidate: int) -> dict[str, Any]:
        config = self._order.source.configs[candidate]
        chosen = {name: triton_kernels.value_of(value) for name, value in config.kwargs}
        options: dict[str, Any] = {
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "num_ctas": config.num_ctas,
        }
        if config.maxnreg is not None:
            options["maxnreg"] = config.maxnreg
        return {**self._constants, **chosen, **options}

    def _compile(self) -> None:
        """All candidates, several at once; what does not compile fails again when it is launched."""
        if self._order.device != "cuda" or self._order.careful:
            return
        import triton

        with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as pool:
            for some in _parts(list(self._alive), 2 * _THREADS):
                self._tell(CandidateStarted(-1))
                with triton.AsyncCompileMode(pool, ignore_errors=True):
                    for candidate in some:
                        self._warm_up(candidate)

    def _warm_up(self, candidate: int) -> None:
        try:
            self._kernel.warmup(grid=self._order.grids[candidate], **self._memory, **self._options(candidate))
        except Exception as error:
            self._out(candidate, f"does not compile: {type(error).__name__}: {error!s:.300}")

    def _launch(self, candidate: int) -> None:
        self._get_ready(candidate)()

    def _get_ready(self, candidate: int) -> Callable[[], Any]:
        key = self._place, candidate
        if key not in self._ready:
            self._ready[key] = self._launcher(candidate)
        return self._ready[key]

    def _launcher(self, candidate: int) -> Callable[[], Any]:
        """Launches it; on a GPU by what Triton compiled, past what its JIT looks up at every call."""
        grid = tuple(self._order.grids[candidate])
        given = {**self._memory, **self._options(candidate)}
        if self._order.device != "cuda":
            return lambda: self._kernel[grid](**given)
        compiled = self._kernel.warmup(grid=grid, **given)
        if hasattr(compiled, "result"):  # one that was compiled beside others
            compiled = compiled.result()
        bound = [given.get(each.name, each.default) for each in self._kernel.params]
        launch = compiled[grid]
        return lambda: launch(*bound)

    def _settle(self) -> None:
        if self._order.device == "cuda":
            torch.cuda.synchronize()

    def _check_device(self) -> None:
        """Raise if the GPU cannot be used any more: this process ends, and the next copy begins afresh."""
        if self._order.device == "cuda":
            assert int(torch.ones(1024, device="cuda").sum().item()) == 1024

    def _take(self, order: Sequence[int]) -> list[float | None]:
        """ranking.TakeSamples. The GPU is waited for after each round of samples, so that a hang is known by
        its round."""
        if self._order.device == "cuda":
            self._place = self._places.next(self._move)
            for candidate in sorted({*order}):
                with contextlib.suppress(Exception):  # it fails again when it is launched
                    self._get_ready(candidate)
            sample = self._sample_gpu
        else:
            sample = self._sample_cpu
        times: list[float | None] = []
        for part in _parts(order, 1 if self._order.careful else max(len(set(order)), 1)):
            self._tell(CandidateStarted(part[0] if self._order.careful else -1))
            times += sample(part)
        return times

    def _move(self, place: int) -> bool:
        if place == len(self._elsewhere):
            self._elsewhere.append({name: value.clone() for name, value in self._inputs.items()})
        self._memory = self._elsewhere[place]
        return True

    def _sample_cpu(self, order: Sequence[int]) -> list[float | None]:
        times: list[float | None] = []
        for candidate in order:
            self._others.add_(1)
            begin = time.perf_counter()
            try:
                self._launch(candidate)
                times.append(max((time.perf_counter() - begin) * 1e3, 1e-6))
            except Exception:
                traceback.print_exc()
                times.append(None)
        return times

    def _sample_gpu(self, order: Sequence[int]) -> list[float | None]:
        event: Any = torch.cuda.Event
        events: list[tuple[Any, Any] | None] = []
        for candidate in order:
            begin, end = (event(enable_timing=True) for _ in range(2))
            self._others.zero_()  # also keeps the GPU busy while the host enqueues the kernel
            begin.record()
            try:
                self._launch(candidate)
            except Exception:
                traceback.print_exc()
                events.append(None)
                continue
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return [None if pair is None else max(pair[0].elapsed_time(pair[1]), 1e-6) for pair in events]


def _parts(values: Sequence[int], size: int) -> list[Sequence[int]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _other_memory(device: str) -> torch.Tensor:
    """What is written before each sample, so that it finds none of its arguments in a cache."""
    if device == "cpu":
        return torch.zeros(32 << 20, dtype=torch.uint8)
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return torch.empty(max(4 * size, 64 << 20), dtype=torch.uint8, device=device)


def _difference(have: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """The largest difference of two tensors, and the largest value of the second; infinite where one is no number
    and the other is."""
    difference = largest = 0.0
    flat = [_dense(value) for value in (have, want)]
    for start in range(0, flat[0].numel(), _SLICE):
        mine, theirs = (value[start : start + _SLICE] for value in flat)
        if not mine.dtype.is_complex:
            mine, theirs = mine.double(), theirs.double()
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        off = torch.where(same, 0.0, (mine - theirs).abs())
        difference = max(difference, float(off.nan_to_num(nan=float("inf")).max()))
        finite = theirs.abs()[theirs.isfinite()]
        largest = max(largest, float(finite.max()) if finite.numel() else 0.0)
    return difference, largest


def _dense(value: torch.Tensor) -> torch.Tensor:
    """All elements, in one dimension."""
    return value.reshape(-1)


def _tolerance(tensors: dict[str, torch.Tensor]) -> float:
    """Of what the kernel's lowest precision makes of another order of summation; integers must be equal."""
    floating = {tensor.dtype for tensor in tensors.values() if tensor.dtype.is_floating_point}
    return max((numerics.TOLERANCE.get(dtype, _LOW) for dtype in floating), default=0.0)


_LOW = 0.25
"""For dtypes of eight bits."""
