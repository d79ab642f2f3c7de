"""Measures a user-written kernel's configurations in a fork of the compile's process, and reports by messages.

The fork may end at any candidate, so each is announced before it starts. All candidates get the same arguments; one
whose results differ from the first one's by more than rounding fails. Samples are taken as for Inductor's candidates
(benchmark.py).
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Literal

import msgspec
import torch
from msgspec import Struct

from .. import decoding
from ..api.tuning import kernels
from ..graph import triton_kernels
from ..tuning import records
from ..tuning.candidates import RunnableCandidates
from . import benchmark, numerics
from . import ranking as search_ranking
from .device_turn import DeviceTurn

_COMPARED_AT_ONCE = 1 << 26
"""Elements: in float64 they take half a GiB."""
_COMPILERS = 8
_FP8_TOLERANCE = 0.25
_TURN_SECONDS = 100.0
"""Less than the time for which this process may send nothing (user_kernels.COMPILE_SECONDS)."""


class KernelBenchmarkOrder(Struct, frozen=True):
    """skip: candidates that ended a fork before. careful: announce each build and sample, because a fork was lost for
    an unknown reason."""

    kernel: kernels.KernelSpec
    device: Literal["cpu", "cuda"]
    settings: search_ranking.RankingSettings
    skip: list[int] = []
    careful: bool = False


class CandidateStarted(Struct, frozen=True, tag="takes"):
    """If the process ends now, this candidate is the cause; -1: it is unknown which."""

    candidate: int


class CandidateFails(Struct, frozen=True, tag="fails"):
    candidate: int
    why: str


class BenchmarkStopped(Struct, frozen=True, tag="stops"):
    """Nothing can be measured here, and why."""

    why: str


class CandidatesRanked(Struct, frozen=True, tag="ranked"):
    """The result. clock: of the GPU during the measurement. waited: seconds, while others had the device."""

    ranking: search_ranking.Ranking
    clock: str
    waited: float


BenchmarkMessage = CandidateStarted | CandidateFails | BenchmarkStopped | CandidatesRanked


def run_benchmark(task: bytes, send: Callable[[bytes], None]) -> None:
    """The work of a CleanForkServer: a task is a KernelBenchmarkOrder, messages are BenchmarkMessages."""
    given = decoding.from_msgpack(task, type=KernelBenchmarkOrder)
    KernelBenchmark(given, lambda message: send(msgspec.msgpack.encode(message))).measure()


class KernelBenchmark(RunnableCandidates):
    """One order's benchmark, and what it measures."""

    def __init__(self, task: KernelBenchmarkOrder, send: Callable[[BenchmarkMessage], None]) -> None:
        self._task = task
        self._send = send
        kernel = task.kernel
        built = triton_kernels.build(kernel.source)
        self._kernel = built.fn if kernel.source.configs else built
        self._name = records.problem_digest(kernels.problem(kernel))
        self._constants = {name: triton_kernels.value_of(value) for name, value in kernel.constants}
        self._alive = [i for i in range(len(kernel.grids)) if i not in task.skip]
        self.inputs: dict[str, torch.Tensor] = {}
        self.arguments: dict[str, torch.Tensor] = {}
        """What kernels are called with and may write to: one of the copies of the inputs."""
        self._copies: list[dict[str, torch.Tensor]] = []

    def measure(self) -> None:
        """Send the result."""
        on_gpu = self._task.device == "cuda"
        self._send(CandidateStarted(-1))
        try:
            self.make_arguments()
        except RuntimeError as error:
            self._send(BenchmarkStopped(f"its arguments cannot be made: {error!s:.300}"))
            return
        self._compile()
        texts = [kernels.config_text(config) for config in self._task.kernel.source.configs]
        turn = DeviceTurn(self._task.device, waiting=self._wait, seconds=_TURN_SECONDS)
        with turn, self._runner() as runner:
            self._run_each_once(runner)
            ranking = search_ranking.rank(
                runner.take,
                sorted(self._alive, key=lambda candidate: texts[candidate]),
                name=self._name,
                settings=self._task.settings,
            )
            clock = benchmark.gpu_clock() if on_gpu else ""
        self._send(CandidatesRanked(ranking, clock, turn.waited))

    def _wait(self) -> AbstractContextManager[None]:
        self._send(CandidateStarted(-1))  # no candidate hangs
        return contextlib.nullcontext()

    def _runner(self) -> benchmark.InProcessRunner:
        careful = self._task.careful
        runner = benchmark.GpuRunner if self._task.device == "cuda" else InterpreterRunner
        return runner(
            self,
            group=1 if careful else runner.GROUP,
            before_group=lambda group: self._send(CandidateStarted(group[0] if careful else -1)),
        )

    def _run_each_once(self, runner: benchmark.InProcessRunner) -> None:
        """Drop the candidates that do not run or do not agree with the first one."""
        reference: dict[str, torch.Tensor] | None = None
        for candidate in list(self._alive):
            self._send(CandidateStarted(candidate))
            self._restore()
            try:
                runner.start(candidate)
            except benchmark.CandidateFailed as error:
                traceback.print_exc()
                self._fail(candidate, f"does not run: {error!s:.300}")
                if self._task.device == "cuda" and not benchmark.gpu_works():
                    raise  # this process ends, and the next fork has a usable GPU
                continue
            if reference is None:
                reference = {name: tensor.clone() for name, tensor in self.arguments.items()}
            elif why := self._disagreement(reference):
                self._fail(candidate, why)
        self._restore()

    def _fail(self, candidate: int, why: str) -> None:
        self._alive.remove(candidate)
        self._send(CandidateFails(candidate, why))

    # --- arguments -----------------------------------------------------------------------------------------

    def make_arguments(self) -> None:
        device = self._task.device
        generator = torch.Generator(device).manual_seed(int(self._name[:8], 16))
        self.inputs = {name: numerics.fill(value, generator) for name, value in self._allocated().items()}
        self.move(0)

    def _allocated(self) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty_strided(
                operand.size,
                operand.stride,
                dtype=getattr(torch, operand.dtype),
                device=self._task.device,
            )
            for name, operand in self._task.kernel.tensors
        }

    def move(self, copy: int) -> bool:
        """See RunnableCandidates."""
        if copy == len(self._copies):
            self._copies.append(self._allocated())
            self.arguments = self._copies[copy]
            self._restore()
        self.arguments = self._copies[copy]
        return True

    def _restore(self) -> None:
        """Kernels write to their arguments."""
        for name, value in self.inputs.items():
            self.arguments[name].copy_(value)

    def _disagreement(self, reference: dict[str, torch.Tensor]) -> str:
        """How the candidate's results differ from the first one's; '' if they agree."""
        allowed = _tolerance(reference)
        for name, expected in reference.items():
            difference, largest = _difference(self.arguments[name], expected)
            if not difference <= (allowed * largest if expected.dtype.is_floating_point else 0.0):
                return (
                    f"leaves {name} {difference:.3g} off what the first configuration does, where the largest value "
                    f"is {largest:.3g}"
                )
        return ""

    # --- launches ------------------------------------------------------------------------------------------

    def run(self, index: int, body: Callable[[Callable[[], Any]], None]) -> torch.Tensor:
        """See RunnableCandidates; results are in the arguments."""
        body(self.launcher(index))
        return torch.empty(())

    def _options(self, candidate: int) -> dict[str, Any]:
        config = self._task.kernel.source.configs[candidate]
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
        """Compile several candidates at a time; one that does not compile fails again when it is launched."""
        if self._task.device != "cuda" or self._task.careful:
            return
        import triton

        candidates = list(self._alive)
        with ThreadPoolExecutor(min(_COMPILERS, len(os.sched_getaffinity(0)))) as pool:
            for begin in range(0, len(candidates), 2 * _COMPILERS):
                self._send(CandidateStarted(-1))
                with triton.AsyncCompileMode(pool, ignore_errors=True):
                    for candidate in candidates[begin : begin + 2 * _COMPILERS]:
                        self._warm_up(candidate)

    def _warm_up(self, candidate: int) -> None:
        grid = self._task.kernel.grids[candidate]
        try:
            self._kernel.warmup(grid=grid, **self.arguments, **self._options(candidate))
        except Exception as error:
            self._fail(candidate, f"does not compile: {type(error).__name__}: {error!s:.300}")

    def launcher(self, candidate: int) -> Callable[[], Any]:
        """Launches it on the present arguments; on a GPU without the look-ups of Triton's JIT at each call."""
        grid = tuple(self._task.kernel.grids[candidate])
        given = {**self.arguments, **self._options(candidate)}
        if self._task.device != "cuda":
            return lambda: self._kernel[grid](**given)
        compiled = self._kernel.warmup(grid=grid, **given)
        if hasattr(compiled, "result"):  # it was compiled in AsyncCompileMode
            compiled = compiled.result()
        bound = [given.get(each.name, each.default) for each in self._kernel.params]
        launch = compiled[grid]
        return lambda: launch(*bound)


class InterpreterRunner(benchmark.InProcessRunner):
    """Measures in Triton's interpreter, which runs kernels on a CPU in tests, so slowly that caches do not matter."""

    def _synchronize(self) -> None:
        return  # it has ended when it returns

    def _take_group(self, copy: int, group: Sequence[int]) -> list[float | None]:
        return [self._sample(copy, candidate) for candidate in group]

    def _sample(self, copy: int, candidate: int) -> float | None:
        begin = time.perf_counter()
        works = self._launch(copy, candidate)
        return max((time.perf_counter() - begin) * 1e3, 1e-6) if works else None


def _difference(have: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """The largest difference of two tensors, and the largest finite value of the second. Infinite if only one of two
    elements is NaN."""
    difference = largest = 0.0
    have, want = have.reshape(-1), want.reshape(-1)
    for start in range(0, want.numel(), _COMPARED_AT_ONCE):
        a, b = (value[start : start + _COMPARED_AT_ONCE] for value in (have, want))
        if not a.dtype.is_complex:
            a, b = a.double(), b.double()
        same = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(same, 0.0, (a - b).abs())
        difference = max(difference, float(gap.nan_to_num(nan=float("inf")).max()))
        finite = b.abs()[b.isfinite()]
        largest = max(largest, float(finite.max()) if finite.numel() else 0.0)
    return difference, largest


def _tolerance(tensors: dict[str, torch.Tensor]) -> float:
    """What another order of summation may change at the kernel's lowest precision; integers must be equal."""
    floating = {tensor.dtype for tensor in tensors.values() if tensor.dtype.is_floating_point}
    return max((numerics.TOLERANCE.get(dtype, _FP8_TOLERANCE) for dtype in floating), default=0.0)
