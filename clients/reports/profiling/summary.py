"""The summary of one rank's trace. A rank runs this module as a process of its own; it needs no torch.

    python -m torchrelay.clients.reports.profiling.summary TRACE FACTS SUMMARY

Times are microseconds, sums over all profiled steps unless a name says otherwise. Communication: kernels of NCCL by
name, on CPU the spans that gloo writes. Computation: all other kernels, on CPU the operators of the threads that
train. Communication is exposed while nothing is computed.

torch.profiler's key_averages does not give these figures: it counts all threads, and steps that were not finished.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ....compiler import decoding
from ....compiler.errors import ClientError
from ...atomic_file import write_atomically
from . import tensor_cores
from .kineto_trace import Cover, Interval, KinetoTrace, TraceEvent, common, cover, length, read_trace, without
from .memory_timeline import MemoryTimeline, TensorSnapshot, timelines
from .tensor_cores import TensorCoreUse, UsesTensorCores

_LISTED = 60
TINY_MICROSECONDS = 5.0
"""About the time that it takes to launch a kernel."""
_COMMUNICATES = ("nccl", "gloo:")
_WAITS = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "nccl:", "gloo:")
_SYNCHRONIZES = frozenset(
    {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize",
     "cuCtxSynchronize", "cuEventSynchronize"}
)  # fmt: skip
_READS = frozenset({"aten::_local_scalar_dense", "aten::nonzero"})
"""Operators that read a number from the device; they wait for it if it is on a GPU."""
WAITED_MICROSECONDS = 10.0
"""A shorter call did not wait: the device had already finished."""
_LOADER = "enumerate(DataLoader)#"
_BACKWARD = "autograd::engine::evaluate_function"


class ProfileContext(Struct, frozen=True, kw_only=True):
    """What the trace does not contain. first: number of the first profiled step. steps: how many were finished; 0: all.
    snapshots: by device, at each step's boundary. triton: folders of Triton's caches. memory: bytes of each
    device."""

    rank: int
    world_size: int
    first: int
    steps: int = 0
    device: str
    device_name: str = ""
    torch: str = ""
    host: str = ""
    snapshots: dict[str, list[TensorSnapshot]] = {}
    triton: list[str] = []
    nvdisasm: str = ""
    memory: dict[str, int] = {}
    capability: list[int] = []


class ProfiledStep(Struct, frozen=True, kw_only=True):
    """One step. at: since the first step's start. exposed: communication while nothing is computed. loader: waiting for
    data. idle: none of these."""

    number: int
    at: float
    duration: float
    computation: float
    communication: float
    exposed: float
    loader: float
    idle: float


class ProfiledKernel(Struct, frozen=True, kw_only=True):
    """All launches of one CUDA kernel. grid, block, registers (of a thread), shared (bytes): of the configuration that
    took most time. shapes: number of other configurations. op: the operator that launched it most often."""

    name: str
    calls: int
    time: float
    share: float
    grid: list[int]
    block: list[int]
    registers: int
    shared: int
    occupancy: float | None
    shapes: int
    tensor_cores: UsesTensorCores
    how: str
    op: str


class ProfiledOperator(Struct, frozen=True, kw_only=True):
    """All calls of one operator. own: time without what it calls. dims: of the inputs that took most of it."""

    name: str
    calls: int
    own: float
    total: float
    share: float
    dims: str


class ProfiledCalls(Struct, frozen=True):
    """All calls of one name: collectives, or waits of the host for the device."""

    name: str
    calls: int
    time: float


class ProfileSummary(Struct, frozen=True, kw_only=True):
    """One rank's profile. kernel_time: without communication. product_time: of kernels that multiply matrices;
    tensor_yes, tensor_unknown: the part of it on Tensor Cores, and where that is not known. launched: number of kernels
    without communication; tiny: of those shorter than 5 microseconds. optimizer: time of its steps on the host.
    pageable: time of copies to the device from memory that is not pinned. overlap: of communication and computation.
    """

    rank: int
    world_size: int
    device: str
    device_name: str
    torch: str
    host: str
    steps: list[ProfiledStep]
    kernels: list[ProfiledKernel]
    operators: list[ProfiledOperator]
    collectives: list[ProfiledCalls]
    waits: list[ProfiledCalls]
    memory: list[MemoryTimeline]
    kernel_time: float = 0.0
    product_time: float = 0.0
    tensor_yes: float = 0.0
    tensor_unknown: float = 0.0
    launched: int = 0
    tiny: int = 0
    median_kernel: float = 0.0
    optimizer: float = 0.0
    pageable: float = 0.0
    overlap: float = 0.0
    capability: list[int] = []

    def total(self, name: str) -> float:
        """The sum of a ProfiledStep's field."""
        return float(sum(getattr(step, name) for step in self.steps))

    def share(self, name: str) -> float:
        """The field's sum as a share of all steps' time."""
        return self.total(name) / (self.total("duration") or 1.0)

    @property
    def median_step(self) -> float:
        return statistics.median_high(step.duration for step in self.steps)


def summarize(trace: KinetoTrace, facts: ProfileContext) -> ProfileSummary:
    """Raises ClientError for a trace without a step."""
    events = [e for e in trace.events if e.ph == "X"]
    steps = sorted((e for e in events if _is_step(e)), key=lambda e: e.ts)[: facts.steps or None]
    if not steps:
        raise ClientError("the trace has no step of the profiler", hint="Profile more than one step")
    windows = _windows(events, steps)
    begin, end = min(steps[0].ts, windows[0][0]), max(steps[-1].end, windows[-1][1])
    events = [e for e in events if e.end >= begin and e.ts <= end]
    host = [e for e in events if e.cat in ("cpu_op", "user_annotation") and not _is_step(e)]
    kernels = [e for e in events if e.cat == "kernel"]
    device = [e for e in events if e.cat in ("kernel", "gpu_memcpy", "gpu_memset")]
    backwards = [e for e in host if e.name.startswith(_BACKWARD)]
    training = {e.tid for e in backwards} | {steps[0].tid}
    loaded = cover(e.interval for e in host if e.name.startswith(_LOADER))
    communicated, computed = _covers(host, device, training, loaded)
    cores = _tensor_cores({e.name for e in kernels}, facts)
    own = [e for e in kernels if not _communicates(e.name)]
    products = [e for e in own if cores[e.name].answer == "yes" or tensor_cores.multiplies(e.name)]
    return ProfileSummary(
        rank=facts.rank,
        world_size=facts.world_size,
        device="cuda" if device else "cpu",
        device_name=facts.device_name,
        torch=facts.torch,
        host=facts.host,
        steps=[
            _step(facts.first + number, window, windows[0][0], communicated, computed, loaded)
            for number, window in enumerate(windows)
        ],
        kernels=_kernels(kernels, host, cores),
        operators=_operators([e for e in host if e.tid in training]),
        collectives=_collectives(host, kernels),
        waits=_waits(host, events) if device else [],  # on CPU there is nothing to wait for
        memory=timelines(
            [e for e in trace.events if e.name == "[memory]"],
            boundaries=[*(step.ts for step in steps), steps[-1].end],
            snapshots=facts.snapshots,
            backwards=_first_in_each(steps, backwards),
            clears=[e.ts for e in host if e.name.startswith("Optimizer.zero_grad")],
            limits=facts.memory,
        ),
        kernel_time=_time(own),
        product_time=_time(products),
        tensor_yes=_time(e for e in products if cores[e.name].answer == "yes"),
        tensor_unknown=_time(e for e in products if cores[e.name].answer == "unknown"),
        launched=len(own),
        tiny=sum(e.dur < TINY_MICROSECONDS for e in own),
        median_kernel=statistics.median_high(e.dur for e in own) if own else 0.0,
        optimizer=length(cover(e.interval for e in host if e.name.startswith("Optimizer.step#"))),
        pageable=_time(
            e for e in device if e.cat == "gpu_memcpy" and "HtoD" in e.name and "Pageable" in e.name
        ),
        overlap=length(common(common(communicated, computed), [(begin, end)])),
        capability=facts.capability,
    )


def _is_step(event: TraceEvent) -> bool:
    return event.cat == "user_annotation" and event.name.startswith("ProfilerStep#")


def _communicates(name: str) -> bool:
    return name.lower().startswith(_COMMUNICATES)


def _time(events: Iterable[TraceEvent]) -> float:
    return float(sum(e.dur for e in events))


# --- time of steps -----------------------------------------------------------------------------------------


def _windows(events: Sequence[TraceEvent], steps: Sequence[TraceEvent]) -> list[Interval]:
    """When each step ran. On a GPU, which runs behind the host, from its first kernel to the next step's."""
    on_device: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.cat == "gpu_user_annotation":
            on_device[event.name].append(event)
    if not all(step.name in on_device for step in steps):
        return [step.interval for step in steps]
    starts = [min(e.ts for e in on_device[step.name]) for step in steps]
    return list(itertools.pairwise([*starts, max(e.end for e in on_device[steps[-1].name])]))


def _covers(
    host: Sequence[TraceEvent], device: Sequence[TraceEvent], training: set[Any], loaded: Cover
) -> tuple[Cover, Cover]:
    """Communication and computation. On CPU a data loader's own operators count as neither."""
    if device:
        return (
            cover(e.interval for e in device if _communicates(e.name)),
            cover(e.interval for e in device if not _communicates(e.name)),
        )
    waits = [e for e in host if e.name.startswith(_WAITS)]
    works = [e for e in host if e.tid in training and (e.cat == "cpu_op" or e.name.startswith("Optimizer."))]
    communicated = cover(e.interval for e in waits if e.tid in training or _communicates(e.name))
    waiting = cover(e.interval for e in waits if e.tid in training)
    return communicated, without(without(cover(e.interval for e in works), waiting), loaded)


def _step(
    number: int, window: Interval, begin: float, communicated: Cover, computed: Cover, loaded: Cover
) -> ProfiledStep:
    """Waiting for data counts only while the GPU does nothing."""
    communication, computation = common(communicated, [window]), common(computed, [window])
    busy = cover([*communication, *computation])
    loader = length(without(common(loaded, [window]), busy))
    duration = window[1] - window[0]
    return ProfiledStep(
        number=number,
        at=window[0] - begin,
        duration=duration,
        computation=length(computation),
        communication=length(communication),
        exposed=length(without(communication, computation)),
        loader=loader,
        idle=max(duration - length(busy) - loader, 0.0),
    )


def _first_in_each(steps: Sequence[TraceEvent], events: Sequence[TraceEvent]) -> list[float]:
    """When the first of the events begins in each step that has one."""
    inside = ([e.ts for e in events if step.ts <= e.ts <= step.end] for step in steps)
    return [min(starts) for starts in inside if starts]


# --- by name -----------------------------------------------------------------------------------------------


def _tensor_cores(names: set[str], facts: ProfileContext) -> dict[str, TensorCoreUse]:
    compiled = tensor_cores.of_triton(
        {name for name in names if name.startswith("triton_")},
        map(Path, facts.triton),
        nvdisasm=Path(facts.nvdisasm) if facts.nvdisasm else None,
    )
    return {name: tensor_cores.of_kernel(name, compiled) for name in names}


def _kernels(
    kernels: Sequence[TraceEvent], host: Sequence[TraceEvent], cores: Mapping[str, TensorCoreUse]
) -> list[ProfiledKernel]:
    by_name: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in kernels:
        by_name[event.name].append(event)
    total = _time(kernels) or 1.0
    ops = {e.args.external: e.name for e in host if e.args.external and e.cat == "cpu_op"}
    found = []
    for name, launches in by_name.items():
        like: dict[tuple[Any, ...], list[TraceEvent]] = defaultdict(list)
        for event in launches:
            like[event.args.launch].append(event)
        slowest = max(like.values(), key=_time)[0].args
        callers = Counter(ops[e.args.external] for e in launches if e.args.external in ops)
        found.append(
            ProfiledKernel(
                name=name[:400],
                calls=len(launches),
                time=_time(launches),
                share=_time(launches) / total,
                grid=slowest.grid or [],
                block=slowest.block or [],
                registers=slowest.registers,
                shared=slowest.shared,
                occupancy=slowest.occupancy or None,  # Kineto's 0: it could not tell
                shapes=len(like) - 1,
                tensor_cores=cores[name].answer,
                how=cores[name].how,
                op=callers.most_common(1)[0][0] if callers else "",
            )
        )
    return sorted(found, key=lambda kernel: -kernel.time)[:_LISTED]


class _OperatorTimes:
    """Sums over one operator's calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.own = self.total = 0.0
        self.by_dims: dict[str, float] = defaultdict(float)


def _operators(host: Iterable[TraceEvent]) -> list[ProfiledOperator]:
    """Sorted by own time: the time of an event without that of the events inside it, on the same thread."""
    times: dict[str, _OperatorTimes] = defaultdict(_OperatorTimes)
    open_events: dict[Any, list[TraceEvent]] = defaultdict(list)
    for event in sorted(host, key=lambda e: (e.ts, -e.dur)):
        outer = open_events[event.tid]
        while outer and outer[-1].end <= event.ts:
            outer.pop()
        if outer:
            times[outer[-1].name].own -= event.dur
        mine = times[event.name]
        mine.calls += 1
        mine.own += event.dur
        if all(each.name != event.name for each in outer):
            mine.total += event.dur
        if event.args.dims:
            mine.by_dims[_dims(event.args.dims)] += event.dur
        outer.append(event)
    every = sum(mine.own for mine in times.values()) or 1.0
    return [
        ProfiledOperator(
            name=name[:400],
            calls=mine.calls,
            own=mine.own,
            total=mine.total,
            share=mine.own / every,
            dims=max(mine.by_dims, key=lambda dims: mine.by_dims[dims], default=""),
        )
        for name, mine in sorted(times.items(), key=lambda item: -item[1].own)[:_LISTED]
        if mine.own > 0
    ]


def _dims(dims: Any) -> str:
    """Sizes of the inputs that are tensors with dimensions."""
    sizes = [size for size in dims if isinstance(size, list) and size and isinstance(size[0], int)]
    return ", ".join("\N{MULTIPLICATION SIGN}".join(map(str, size)) for size in sizes)[:120]


def _collectives(host: Sequence[TraceEvent], kernels: Sequence[TraceEvent]) -> list[ProfiledCalls]:
    """NCCL's kernels, else gloo's spans, else the operators that wait."""
    spans = [e for e in kernels if _communicates(e.name)]
    spans = spans or [e for e in host if e.name.startswith("gloo:")]
    spans = spans or [e for e in host if e.name.startswith(_WAITS)]
    return _calls((e.name.partition("(")[0][:200], e.dur) for e in spans)


def _waits(host: Sequence[TraceEvent], events: Sequence[TraceEvent]) -> list[ProfiledCalls]:
    runtime = [e for e in events if e.cat in ("cuda_runtime", "cuda_driver")]
    spans = [e for e in runtime if e.name in _SYNCHRONIZES and e.dur >= WAITED_MICROSECONDS]
    starts: dict[Any, list[float]] = defaultdict(list)
    for e in sorted(spans, key=lambda e: e.ts):
        starts[e.tid].append(e.ts)
    for e in host:
        if e.name in _READS:
            mine = starts[e.tid]
            first = bisect.bisect_left(mine, e.ts)
            if first < len(mine) and mine[first] <= e.end:
                spans.append(e)
    return _calls((e.name, e.dur) for e in spans)


def _calls(spans: Iterable[tuple[str, float]]) -> list[ProfiledCalls]:
    """By name, the largest total time first."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, took in spans:
        times[name].append(took)
    found = [ProfiledCalls(name, len(each), float(sum(each))) for name, each in times.items()]
    return sorted(found, key=lambda each: -each.time)[:20]


def main(arguments: Sequence[str]) -> None:
    """arguments: the files TRACE, FACTS (a ProfileContext) and SUMMARY (written)."""
    source, facts, target = map(Path, arguments)
    context = decoding.from_json(facts.read_bytes(), type=ProfileContext)
    write_atomically(target, msgspec.json.encode(summarize(read_trace(source), context)))


if __name__ == "__main__":
    main(sys.argv[1:])
