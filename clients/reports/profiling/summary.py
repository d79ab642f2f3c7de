"""One rank's trace, and what the rank knew, in; one small Summary out. No torch; a rank runs it as a process of its
own.

    python -m torchrelay.clients.reports.profiling.summary TRACE FACTS SUMMARY

Times are microseconds, sums over all profiled steps unless a name says otherwise. Communication: kernels of NCCL by
name, on CPU the spans that gloo writes. Computation: all other kernels, on CPU the operators of the threads that
train. What is communicated while nothing is computed is exposed.
"""

from __future__ import annotations

import bisect
import itertools
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
from . import kineto_trace, tensor_cores
from .kineto_trace import Cover, Interval, TraceEvent
from .memory_timeline import MemoryTimeline, TensorSnapshot, timelines
from .tensor_cores import TensorCoreUse, UsesTensorCores

_LISTED = 60
TINY_MICROSECONDS = 5.0
"""Shorter than it takes to launch one."""
_COMMUNICATES = ("nccl", "gloo:")
_WAITS = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "nccl:", "gloo:")
_SYNCHRONIZES = frozenset(
    {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize",
     "cuCtxSynchronize", "cuEventSynchronize"}
)  # fmt: skip
_READS = frozenset({"aten::_local_scalar_dense", "aten::nonzero"})
"""Operators that wait for the device, to have a number on the host: if the number is there."""
WAITED_MICROSECONDS = 10.0
"""A shorter call found the device done, or an event long past."""
_LOADER = "enumerate(DataLoader)#"
_BACKWARD = "autograd::engine::evaluate_function"


class ProfileContext(Struct, frozen=True, kw_only=True):
    """What a trace lacks. first: number of the first profiled step. steps: those that were finished; 0: all.
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
    """One step. busy: of the GPU, or of the host's operators where there is none. idle: neither computed, communicated
    nor waited for data."""

    number: int
    at: float
    duration: float
    computation: float
    communication: float
    exposed: float
    loader: float
    idle: float


class ProfiledKernel(Struct, frozen=True, kw_only=True):
    """A CUDA kernel's name; grid, block, registers (of a thread), shared (bytes): of its launches that took most time,
    `shapes` others there are. op: the operator that launched most of it."""

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
    """own: without what it calls. dims: of the inputs that took most of it."""

    name: str
    calls: int
    own: float
    total: float
    share: float
    dims: str


class ProfiledCollective(Struct, frozen=True, kw_only=True):
    name: str
    calls: int
    time: float


class HostWait(Struct, frozen=True, kw_only=True):
    """Calls in which the host waited for the device."""

    name: str
    calls: int
    time: float


class ProfileSummary(Struct, frozen=True, kw_only=True):
    """What a rank's profile says. tensor_yes, no, unknown: time of kernels that multiply. launched: kernels. tiny:
    those shorter than 5 us. links: pairs of forward and backward operators. copies, pageable: of host to device, and
    without pinned memory."""

    rank: int
    world_size: int
    device: str
    device_name: str
    torch: str
    host: str
    steps: list[ProfiledStep]
    kernels: list[ProfiledKernel]
    operators: list[ProfiledOperator]
    collectives: list[ProfiledCollective]
    waits: list[HostWait]
    memory: list[MemoryTimeline]
    kernel_time: float = 0.0
    product_time: float = 0.0
    tensor_yes: float = 0.0
    tensor_unknown: float = 0.0
    launched: int = 0
    tiny: int = 0
    tiny_time: float = 0.0
    median_kernel: float = 0.0
    optimizer: float = 0.0
    copies: float = 0.0
    pageable: float = 0.0
    overlap: float = 0.0
    links: int = 0
    capability: list[int] = []

    def total(self, name: str) -> float:
        """Of a Step's field, over all steps."""
        return float(sum(getattr(step, name) for step in self.steps))

    def share(self, name: str) -> float:
        """Of all steps' time."""
        return self.total(name) / (self.total("duration") or 1.0)

    @property
    def median_step(self) -> float:
        return sorted(step.duration for step in self.steps)[len(self.steps) // 2]


def summarize(read: kineto_trace.KinetoTrace, facts: ProfileContext) -> ProfileSummary:
    """Raises ClientError for a trace without a step."""
    events = [event for event in read.events if event.ph == "X"]
    spans = sorted((e for e in events if _is_step(e)), key=lambda e: e.ts)
    if facts.steps:
        spans = spans[: facts.steps]
    if not spans:
        raise ClientError("the trace has no step of the profiler", hint="Profile more than one step")
    windows = _windows(events, spans)
    window = (min(spans[0].ts, windows[0][0]), max(spans[-1].end, windows[-1][1]))
    events = [e for e in events if e.end >= window[0] and e.ts <= window[1]]
    host = [e for e in events if e.cat in ("cpu_op", "user_annotation") and not _is_step(e)]
    kernels = [e for e in events if e.cat == "kernel"]
    device = [e for e in events if e.cat in ("kernel", "gpu_memcpy", "gpu_memset")]
    runtime = [e for e in events if e.cat in ("cuda_runtime", "cuda_driver")]
    training = {e.tid for e in host if e.name.startswith(_BACKWARD)} | {spans[0].tid}
    backwards = [e for e in host if e.name.startswith(_BACKWARD)]
    loaded = kineto_trace.cover(e.interval for e in host if e.name.startswith(_LOADER))
    communicated, computed = _covers(host, device, training, loaded)
    found = tensor_cores.of_triton(
        {e.name for e in kernels if e.name.startswith("triton_")},
        map(Path, facts.triton),
        nvdisasm=Path(facts.nvdisasm) if facts.nvdisasm else None,
    )
    cores = {name: tensor_cores.of_kernel(name, found) for name in {e.name for e in kernels}}
    own = [e for e in kernels if not _communicates(e.name)]
    products = [e for e in own if _is_product(e.name, cores)]
    tiny = [e for e in own if e.dur < TINY_MICROSECONDS]
    copies = [e for e in device if e.cat == "gpu_memcpy" and "HtoD" in e.name]
    memory = [e for e in read.events if e.name == "[memory]"]
    return ProfileSummary(
        rank=facts.rank,
        world_size=facts.world_size,
        device="cuda" if device else "cpu",
        device_name=facts.device_name,
        torch=facts.torch,
        host=facts.host,
        steps=[
            _step(facts.first + number, each, windows[0][0], communicated, computed, loaded)
            for number, each in enumerate(windows)
        ],
        kernels=_kernels(kernels, host, cores),
        operators=_operators([e for e in host if e.tid in training]),
        collectives=_collectives(host, kernels),
        waits=_waits(host, runtime, bool(device)),
        memory=timelines(
            memory,
            boundaries=[*(span.ts for span in spans), spans[-1].end],
            snapshots=facts.snapshots,
            backwards=_begins(backwards, spans),
            clears=[e.ts for e in host if e.name.startswith("Optimizer.zero_grad")],
            limits=facts.memory,
        ),
        kernel_time=sum(e.dur for e in own),
        product_time=sum(e.dur for e in products),
        tensor_yes=sum(e.dur for e in products if cores[e.name].answer == "yes"),
        tensor_unknown=sum(e.dur for e in products if cores[e.name].answer == "unknown"),
        launched=len(own),
        tiny=len(tiny),
        tiny_time=sum(e.dur for e in tiny),
        median_kernel=sorted(e.dur for e in own)[len(own) // 2] if own else 0.0,
        optimizer=kineto_trace.length(
            kineto_trace.cover(e.interval for e in host if e.name.startswith("Optimizer.step#"))
        ),
        copies=sum(e.dur for e in copies),
        pageable=sum(e.dur for e in copies if "Pageable" in e.name),
        overlap=kineto_trace.length(_inside(kineto_trace.common(communicated, computed), window)),
        links=_links(read.events),
        capability=facts.capability,
    )


def _is_step(event: TraceEvent) -> bool:
    return event.cat == "user_annotation" and event.name.startswith("ProfilerStep#")


def _communicates(name: str) -> bool:
    return name.lower().startswith(_COMMUNICATES)


def _is_product(name: str, cores: Mapping[str, TensorCoreUse]) -> bool:
    return cores[name].answer == "yes" or tensor_cores.multiplies(name)


def _covers(
    host: Sequence[TraceEvent], device: Sequence[TraceEvent], training: set[Any], loaded: Cover
) -> tuple[Cover, Cover]:
    """Communication and computation; a loader's own operators, on CPU, are neither."""
    if device:
        return (
            kineto_trace.cover(e.interval for e in device if _communicates(e.name)),
            kineto_trace.cover(e.interval for e in device if not _communicates(e.name)),
        )
    waits = [e for e in host if e.name.startswith(_WAITS)]
    works = kineto_trace.cover(
        e.interval
        for e in host
        if e.tid in training and (e.cat == "cpu_op" or e.name.startswith("Optimizer."))
    )
    communicated = kineto_trace.cover(e.interval for e in waits if e.tid in training or _communicates(e.name))
    waiting = kineto_trace.cover(e.interval for e in waits if e.tid in training)
    return communicated, kineto_trace.without(kineto_trace.without(works, waiting), loaded)


def _inside(covered: Cover, window: Interval) -> Cover:
    return kineto_trace.common(covered, [window])


def _windows(events: Sequence[TraceEvent], spans: Sequence[TraceEvent]) -> list[Interval]:
    """When each step ran: on a GPU, which the host runs ahead of, from its first kernel to the next step's."""
    there: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.cat == "gpu_user_annotation":
            there[event.name].append(event)
    if not all(span.name in there for span in spans):
        return [span.interval for span in spans]
    starts = [min(each.ts for each in there[span.name]) for span in spans]
    last = max(each.end for each in there[spans[-1].name])
    return list(itertools.pairwise([*starts, last]))


def _step(
    number: int, window: Interval, begin: float, communicated: Cover, computed: Cover, loaded: Cover
) -> ProfiledStep:
    """Waiting for data counts where it is not hidden behind what a GPU does meanwhile."""
    moved, worked = _inside(communicated, window), _inside(computed, window)
    busy = kineto_trace.cover([*moved, *worked])
    waited = kineto_trace.without(_inside(loaded, window), busy)
    took = window[1] - window[0]
    return ProfiledStep(
        number=number,
        at=window[0] - begin,
        duration=took,
        computation=kineto_trace.length(worked),
        communication=kineto_trace.length(moved),
        exposed=kineto_trace.length(kineto_trace.without(moved, worked)),
        loader=kineto_trace.length(waited),
        idle=max(took - kineto_trace.length(busy) - kineto_trace.length(waited), 0.0),
    )


def _begins(backwards: Sequence[TraceEvent], spans: Sequence[TraceEvent]) -> list[float]:
    """When the backward passes of each step begin: after a gap in which operators ran forward, once a step."""
    found = []
    for span in spans:
        inside = [e.ts for e in backwards if span.ts <= e.ts <= span.end]
        if inside:
            found.append(min(inside))
    return found


def _links(events: Iterable[TraceEvent]) -> int:
    starts = {e.id for e in events if e.cat == "fwdbwd" and e.ph == "s"}
    return sum(e.id in starts for e in events if e.cat == "fwdbwd" and e.ph == "f")


def _kernels(
    kernels: Sequence[TraceEvent], host: Sequence[TraceEvent], cores: Mapping[str, TensorCoreUse]
) -> list[ProfiledKernel]:
    by_name: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in kernels:
        by_name[event.name].append(event)
    total = sum(e.dur for e in kernels) or 1.0
    ops = {e.args.external: e.name for e in host if e.args.external and e.cat == "cpu_op"}
    found = []
    for name, launches in by_name.items():
        times: Counter[tuple[Any, ...]] = Counter()
        for e in launches:
            times[_launch(e)] += e.dur  # type: ignore[assignment]
        most = times.most_common(1)[0][0]
        like = next(e for e in launches if _launch(e) == most)
        callers = Counter(ops[e.args.external] for e in launches if e.args.external in ops)
        time = sum(e.dur for e in launches)
        found.append(
            ProfiledKernel(
                name=name[:400],
                calls=len(launches),
                time=time,
                share=time / total,
                grid=list(most[0]),
                block=list(most[1]),
                registers=like.args.registers,
                shared=like.args.shared,
                occupancy=like.args.occupancy or None,  # Kineto's 0: it could not tell
                shapes=len(times) - 1,
                tensor_cores=cores[name].answer,
                how=cores[name].how,
                op=callers.most_common(1)[0][0] if callers else "",
            )
        )
    return sorted(found, key=lambda kernel: -kernel.time)[:_LISTED]


def _launch(event: TraceEvent) -> tuple[Any, ...]:
    args = event.args
    return tuple(args.grid or ()), tuple(args.block or ()), args.registers, args.shared


def _operators(host: Sequence[TraceEvent]) -> list[ProfiledOperator]:
    """By their own time: what a thread's inner events took is taken from the outer one's."""
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    shapes: dict[str, Counter[str]] = defaultdict(Counter)
    by_thread: dict[Any, list[TraceEvent]] = defaultdict(list)
    for event in host:
        by_thread[event.tid].append(event)
    for events in by_thread.values():
        open_events: list[TraceEvent] = []
        for event in sorted(events, key=lambda e: (e.ts, -e.dur)):
            while open_events and open_events[-1].end <= event.ts:
                open_events.pop()
            if open_events:
                own[open_events[-1].name] -= event.dur  # type: ignore[assignment]
            own[event.name] += event.dur  # type: ignore[assignment]
            if all(outer.name != event.name for outer in open_events):
                total[event.name] += event.dur  # type: ignore[assignment]
            calls[event.name] += 1
            if event.args.dims:
                shapes[event.name][_dims(event.args.dims)] += event.dur  # type: ignore[assignment]
            open_events.append(event)
    every = sum(own.values()) or 1.0
    return [
        ProfiledOperator(
            name=name[:400],
            calls=calls[name],
            own=float(time),
            total=float(total[name]),
            share=time / every,
            dims=shapes[name].most_common(1)[0][0] if shapes[name] else "",
        )
        for name, time in own.most_common(_LISTED)
        if time > 0
    ]


def _dims(dims: Any) -> str:
    """Sizes of the inputs that have any."""
    sizes = [size for size in dims if isinstance(size, list) and size and isinstance(size[0], int)]
    return ", ".join("\N{MULTIPLICATION SIGN}".join(map(str, size)) for size in sizes)[:120]


def _collectives(host: Sequence[TraceEvent], kernels: Sequence[TraceEvent]) -> list[ProfiledCollective]:
    spans = [e for e in kernels if _communicates(e.name)]
    spans = (
        spans
        or [e for e in host if e.name.startswith("gloo:")]
        or [e for e in host if e.name.startswith(_WAITS)]
    )
    time: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for e in spans:
        name = e.name.partition("(")[0][:200]
        time[name] += e.dur  # type: ignore[assignment]
        calls[name] += 1
    return [
        ProfiledCollective(name=name, calls=calls[name], time=float(each))
        for name, each in time.most_common(20)
    ]


def _waits(host: Sequence[TraceEvent], runtime: Sequence[TraceEvent], device: bool) -> list[HostWait]:
    if not device:  # on CPU there is nothing to wait for
        return []
    spans = [e for e in runtime if e.name in _SYNCHRONIZES and e.dur >= WAITED_MICROSECONDS]
    begun: dict[Any, list[float]] = {}
    for e in sorted(spans, key=lambda e: e.ts):
        begun.setdefault(e.tid, []).append(e.ts)
    for e in host:
        starts = begun.get(e.tid, [])
        inside = bisect.bisect_left(starts, e.ts)
        if e.name in _READS and inside < len(starts) and starts[inside] <= e.end:
            spans.append(e)
    time: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for e in spans:
        time[e.name] += e.dur  # type: ignore[assignment]
        calls[e.name] += 1
    return [HostWait(name=name, calls=calls[name], time=float(each)) for name, each in time.most_common(20)]


def main(arguments: Sequence[str]) -> None:
    """TRACE FACTS SUMMARY: files."""
    source, facts, target = map(Path, arguments)
    summary = summarize(
        kineto_trace.read_trace(source), decoding.from_json(facts.read_bytes(), type=ProfileContext)
    )
    write_atomically(target, msgspec.json.encode(summary))


if __name__ == "__main__":
    main(sys.argv[1:])
