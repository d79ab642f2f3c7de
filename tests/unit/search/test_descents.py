"""Coordinate descents that take turns: PyTorch's own tuner ends where it would have ended alone, in a few runs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
from torch._inductor.runtime.runtime_utils import triton_config_to_hashable
from torchrelay.compiler.tuning.batched_descent import BatchedDescents, DescentDeferred

SIZES = {"x": 1 << 20, "y": 4096}


@dataclass
class Config:
    kwargs: dict[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1

    def __hash__(self) -> int:
        return id(self)


class Kernel:
    """One whose best configuration lies some steps away, along a bent way."""

    def __init__(self, name: str, best: tuple[int, int, int]) -> None:
        self.name = name
        self.best = best
        self.tuner = self.new_tuner()
        self.config = Config({"XBLOCK": 64, "YBLOCK": 16}, num_warps=4)
        self.measured: list[Any] = []
        self.ended: Any = None

    def new_tuner(self) -> CoordescTuner:
        return CoordescTuner(size_hints=SIZES, inductor_meta={"warp_size": 32, "max_threads_per_block": 1024})  # type: ignore[no-untyped-call]

    def time(self, config: Config) -> float:
        self.measured.append(triton_config_to_hashable(config))
        if config.num_warps > 16:
            raise ValueError("out of resources")
        x, y, warps = (config.kwargs["XBLOCK"], config.kwargs["YBLOCK"], config.num_warps)
        far = [abs(a.bit_length() - b.bit_length()) for a, b in zip((x, y, warps), self.best, strict=True)]
        return 1.0 + sum(far) + 0.3 * far[0] * far[1]

    def alone(self) -> tuple[Any, list[Any]]:
        other = Kernel(self.name, self.best)
        best = other.tuner.autotune(other.time, copy.deepcopy(other.config), None)
        return triton_config_to_hashable(best), other.measured


def built_at_once(descents: list[Future[Any]]) -> None:
    for future in descents:
        if not future.done():
            future.set_result(None)


def test_descents_end_where_each_would_have_ended_alone_in_few_runs() -> None:
    kernels = [Kernel(f"k{i}", best) for i, best in enumerate([(512, 64, 8), (16, 16, 2), (64, 16, 4)])]
    begun: list[Future[Any]] = []
    runs = 0

    def build(source: str, config: Config) -> Future[Any]:
        begun.append(Future())
        return begun[-1]

    descents = BatchedDescents(build, triton_config_to_hashable)

    def run() -> None:
        nonlocal runs
        built_at_once(begun)
        runs += 1
        for kernel in kernels:
            if kernel.ended is not None:
                continue
            try:
                tuned = descents.of(kernel.name, kernel.tuner.autotune)
                kernel.ended = tuned(kernel.time, kernel.config, None)
            except DescentDeferred:
                pass

    waited: list[int] = []

    def step() -> None:
        run()
        waited.append(sum(not future.done() for future in begun))
        built_at_once(begun)

    step()
    descents.settle(step)
    for kernel in kernels:
        where, measured = kernel.alone()
        assert triton_config_to_hashable(kernel.ended) == where
        assert kernel.measured == measured
    assert waited[0] > 10, "the first run has all neighbours of all kernels built at once"
    assert 2 * runs < max(len(kernel.measured) for kernel in kernels)


def test_what_fails_on_the_device_is_tried_once_however_often_its_descent_runs() -> None:
    class Small(Kernel):
        def time(self, config: Config) -> float:
            taken = super().time(config)
            if config.kwargs["YBLOCK"] > 16:
                raise ValueError("out of shared memory")
            return taken

    kernel = Small("k", (512, 64, 8))
    begun: list[Future[Any]] = []

    def build(source: str, config: Config) -> Future[Any]:
        begun.append(Future())
        return begun[-1]

    descents = BatchedDescents(build, triton_config_to_hashable)
    runs = 0

    def run() -> None:
        nonlocal runs
        built_at_once(begun)
        runs += 1
        with contextlib.suppress(DescentDeferred):
            kernel.ended = descents.of("k", kernel.tuner.autotune)(kernel.time, kernel.config, None)
        built_at_once(begun)

    run()
    descents.settle(run)
    failing = [measured for measured in kernel.measured if ("YBLOCK", 32) in measured]
    assert runs > 3 and failing
    assert len(kernel.measured) == len(set(kernel.measured))
    alone = Small("k", (512, 64, 8))
    best = alone.tuner.autotune(alone.time, alone.config, None)
    assert triton_config_to_hashable(kernel.ended) == triton_config_to_hashable(best)


def test_what_does_not_build_elsewhere_is_tried_where_it_is_measured() -> None:
    def build(source: str, config: Config) -> Future[Any]:
        failed: Future[Any] = Future()
        failed.set_exception(OSError("the process was killed"))
        return failed

    kernel = Kernel("k", (512, 64, 8))
    descents = BatchedDescents(build, triton_config_to_hashable)

    def run() -> None:
        kernel.ended = descents.of("k", kernel.tuner.autotune)(kernel.time, kernel.config, None)

    run()
    descents.settle(run)
    assert triton_config_to_hashable(kernel.ended) == kernel.alone()[0]


def test_without_processes_all_is_measured_at_once() -> None:
    def build(source: str, config: Config) -> Future[Any]:
        raise RuntimeError("cannot schedule new futures after shutdown")

    kernel = Kernel("k", (512, 64, 8))
    tuned = BatchedDescents(build, triton_config_to_hashable).of("k", kernel.tuner.autotune)
    assert triton_config_to_hashable(tuned(kernel.time, kernel.config, None)) == kernel.alone()[0]


def test_processes_that_end_on_the_way_hold_nothing_up() -> None:
    """What they had begun has failed, and no more can be begun."""
    left = 4

    def build(source: str, config: Config) -> Future[Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("a process of the pool was terminated abruptly")
        return Future()

    kernel = Kernel("k", (512, 64, 8))
    descents = BatchedDescents(build, triton_config_to_hashable)

    def run() -> None:
        with contextlib.suppress(DescentDeferred):
            kernel.ended = descents.of("k", kernel.tuner.autotune)(kernel.time, kernel.config, None)

    run()
    assert descents.waiting
    begun = list(descents._builds.values())
    for future in begun:
        if not future.done():
            future.set_exception(RuntimeError("it was terminated abruptly"))
    assert concurrent.futures.wait(begun, timeout=0).not_done == set(), "else settling waits for its limit"
    descents.settle(run)
    assert triton_config_to_hashable(kernel.ended) == kernel.alone()[0]
