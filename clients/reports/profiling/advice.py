"""Summaries of ranks' profiles, and what a job told of its steps, in; what to change, in words, out. No torch.

Each rule has one number and one threshold, both told, so that nobody has to believe it. What hurts most comes first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from .summary import TINY_MICROSECONDS, ProfileSummary

Rule = Literal[
    "loader", "tensor_cores", "small", "tiny", "uneven", "communication", "waits", "memory", "pageable", "optimizer",
    "compiles",
]  # fmt: skip

THRESHOLDS: dict[Rule, float] = {
    "loader": 0.10,
    "tensor_cores": 0.50,
    "small": 0.30,
    "tiny": 0.50,
    "uneven": 1.10,
    "communication": 0.15,
    "waits": 1.0,
    "memory": 0.90,
    "pageable": 0.02,
    "optimizer": 0.20,
    "compiles": 1.0,
}
"""loader: of a step's time. tensor_cores: of the time of kernels that multiply matrices, at least. small: of a step's
time without work. tiny: of kernels. uneven: the slowest rank's work as a multiple of the median. communication: of a
step's time, exposed. waits: a step. memory: of the device's. pageable, optimizer: of a step's time.
compiles: of all ranks."""
_PRODUCTS = 0.10
"""Of the kernels' time: with fewer products Tensor Cores do not matter."""
_MANY = 300
"""Kernels of a step, from which tiny ones matter."""
_IDLE = 0.05
"""Of a step's time: a GPU with less is not waiting for its host."""
_TENSOR_CORES_SINCE = [7, 0]


class Advice(Struct, frozen=True, kw_only=True):
    """text: what was found, the number with its threshold, and what to do. number: in the threshold's unit. cost: share
    of a step's time that is at stake, for the order. ranks: whose."""

    rule: Rule
    text: str
    number: float
    threshold: float
    cost: float
    ranks: list[int]


def advice(summaries: Sequence[ProfileSummary]) -> list[Advice]:
    """The same advice for several ranks is said once, with the worst number."""
    found: dict[Rule, Advice] = {}
    for summary in summaries:
        for each in (said for rule in _RULES for said in rule(summary)):
            had = found.get(each.rule)
            if had is None:
                found[each.rule] = each
            else:
                worse = each if each.cost > had.cost else had
                found[each.rule] = _of(worse, sorted({*had.ranks, *each.ranks}))
    every = [*found.values(), *_uneven({s.rank: _work(s) for s in summaries}, "works", "ms", 1e-3)]
    return sorted(every, key=lambda each: -each.cost)


def of_steps(seconds: Mapping[int, Sequence[float]], waited: Mapping[int, Sequence[float]]) -> list[Advice]:
    """What can be said without a profile. seconds, waited: of each rank, for each step that it told of; the time of a
    step, and what of it was spent waiting for data."""
    found = []
    share, rank = max(
        (
            (sum(waited[rank]) / sum(times), rank)
            for rank, times in seconds.items()
            if waited.get(rank) and sum(times)
        ),
        default=(0.0, 0),
    )
    if share >= THRESHOLDS["loader"]:
        found.append(_loader_advice(share, [rank]))
    work = {
        rank: statistics.median(times) - statistics.fmean(waited.get(rank) or [0.0])
        for rank, times in seconds.items()
        if times
    }
    if any(waited.values()):
        return found  # ranks that wait for data wait for each other too
    return [*found, *_uneven(work, "takes", "ms", 1e3)]


def of_compiles(late: int, reasons: Mapping[int, Sequence[str]]) -> list[Advice]:
    """late: misses and fallbacks of all ranks since they started. reasons: of each rank's fallbacks."""
    if late < THRESHOLDS["compiles"]:
        return []
    why = sorted({reason for each in reasons.values() for reason in each})
    said = f" ({', '.join(why)[:300]})" if why else ""
    return [
        Advice(
            rule="compiles",
            text=f"Ranks waited for {late} compiles after they had started (from {THRESHOLDS['compiles']:.0f}){said}: "
            "let the job capture its graphs before, and look at docs/fallbacks.md for what was compiled locally",
            number=late,
            threshold=THRESHOLDS["compiles"],
            cost=0.0,
            ranks=sorted(reasons),
        )
    ]


def _of(advice: Advice, ranks: list[int]) -> Advice:
    return Advice(
        rule=advice.rule,
        text=advice.text,
        number=advice.number,
        threshold=advice.threshold,
        cost=advice.cost,
        ranks=ranks,
    )


def _loader(summary: ProfileSummary) -> Iterator[Advice]:
    share = summary.share("loader")
    if share >= THRESHOLDS["loader"]:
        yield _loader_advice(share, [summary.rank])


def _loader_advice(share: float, ranks: list[int]) -> Advice:
    return Advice(
        rule="loader",
        text=f"The data loader is waited for {share:.0%} of the time (from {THRESHOLDS['loader']:.0%}): give it "
        "workers (num_workers, persistent_workers=True), let it fetch ahead (prefetch_factor), or prepare the data "
        "before",
        number=share,
        threshold=THRESHOLDS["loader"],
        cost=share,
        ranks=ranks,
    )


def _tensor_cores(summary: ProfileSummary) -> Iterator[Advice]:
    known = summary.product_time - summary.tensor_unknown
    if summary.device != "cuda" or known <= 0 or summary.product_time < _PRODUCTS * summary.kernel_time:
        return
    if summary.capability and summary.capability < _TENSOR_CORES_SINCE:
        return
    share = summary.tensor_yes / known
    if share < THRESHOLDS["tensor_cores"]:
        said = "No Tensor Cores are used: 0%" if share < 0.005 else f"Tensor Cores do only {share:.0%}"
        yield Advice(
            rule="tensor_cores",
            text=f"{said} of the time of matrix products (expected: {THRESHOLDS['tensor_cores']:.0%}), which are "
            f"{summary.product_time / summary.kernel_time:.0%} of the kernels' time: precision bf16 (or fp16) by "
            "autocast, or tf32 for float32; sizes should be multiples of 8",
            number=share,
            threshold=THRESHOLDS["tensor_cores"],
            cost=(1 - share) * known / (summary.total("duration") or 1.0),
            ranks=[summary.rank],
        )


def _small(summary: ProfileSummary) -> Iterator[Advice]:
    """Neither computing, nor communicating, nor waiting for data."""
    share = summary.share("idle")
    if share < THRESHOLDS["small"]:
        return
    room = [t for t in summary.memory if t.limit and t.peak < t.limit / 2]
    memory = f", and {room[0].peak / room[0].limit:.0%} of its memory is used" if room else ""
    what = "The GPU has nothing to do" if summary.device == "cuda" else "No operator runs"
    yield Advice(
        rule="small",
        text=f"{what} {share:.0%} of the time (from {THRESHOLDS['small']:.0%}){memory}: the batch is too small for "
        "what Python does between operators. Enlarge it, compile the model, or use mode='reduce-overhead' on a GPU",
        number=share,
        threshold=THRESHOLDS["small"],
        cost=share,
        ranks=[summary.rank],
    )


def _tiny(summary: ProfileSummary) -> Iterator[Advice]:
    steps = len(summary.steps) or 1
    share = summary.tiny / (summary.launched or 1)
    if summary.launched < _MANY * steps or share < THRESHOLDS["tiny"]:
        return
    yield Advice(
        rule="tiny",
        text=f"{share:.0%} of {summary.launched // steps:,} kernels a step (from {THRESHOLDS['tiny']:.0%}) take "
        f"less than {TINY_MICROSECONDS:.0f} \N{MICRO SIGN}s, about what it takes to launch one: compile the model, use "
        "a fused or foreach optimizer, or mode='reduce-overhead'",
        number=share,
        threshold=THRESHOLDS["tiny"],
        cost=summary.share("idle") * share,
        ranks=[summary.rank],
    )


def _communication(summary: ProfileSummary) -> Iterator[Advice]:
    share = summary.share("exposed")
    if share < THRESHOLDS["communication"]:
        return
    both = summary.total("communication") or 1.0
    yield Advice(
        rule="communication",
        text=f"Communication that nothing hides takes {share:.0%} of the time (from "
        f"{THRESHOLDS['communication']:.0%}); "
        f"{summary.overlap / both:.0%} of it is hidden behind computation: accumulate gradients over several "
        "batches, compress them (train.ddp(model, hook='bf16')), or enlarge the batch; where ranks are uneven, part of "
        "it is waiting",
        number=share,
        threshold=THRESHOLDS["communication"],
        cost=share,
        ranks=[summary.rank],
    )


def _waits(summary: ProfileSummary) -> Iterator[Advice]:
    steps = len(summary.steps) or 1
    reads = sum(each.calls for each in summary.waits if each.name.startswith("aten::")) / steps
    calls = sum(each.calls for each in summary.waits if not each.name.startswith("aten::")) / steps
    number = max(reads, calls)
    idle = summary.share("idle")
    if summary.device != "cuda" or number <= THRESHOLDS["waits"] or idle < _IDLE:
        return
    most = max(summary.waits, key=lambda each: each.calls)
    yield Advice(
        rule="waits",
        text=f"The host waits for the GPU {number:.1f} times a step (more than {THRESHOLDS['waits']:.0f}; mostly "
        f"{most.name}), and the GPU then has nothing to do ({idle:.0%} of the time): read losses with .item() only "
        "every few steps, and avoid nonzero and .cpu() in a step",
        number=number,
        threshold=THRESHOLDS["waits"],
        cost=idle / 2,
        ranks=[summary.rank],
    )


def _memory(summary: ProfileSummary) -> Iterator[Advice]:
    for timeline in summary.memory:
        if timeline.limit and timeline.peak >= THRESHOLDS["memory"] * timeline.limit:
            share = timeline.peak / timeline.limit
            kept = timeline.at_peak.get("activations", 0) / timeline.peak
            yield Advice(
                rule="memory",
                text=f"{timeline.device} is {share:.0%} full at its peak (from {THRESHOLDS['memory']:.0%}), "
                f"{kept:.0%} of it activations: activation checkpointing, a smaller batch with gradient accumulation, "
                "or FSDP2",
                number=share,
                threshold=THRESHOLDS["memory"],
                cost=0.05,
                ranks=[summary.rank],
            )


def _pageable(summary: ProfileSummary) -> Iterator[Advice]:
    share = summary.pageable / (summary.total("duration") or 1.0)
    if share >= THRESHOLDS["pageable"]:
        yield Advice(
            rule="pageable",
            text=f"Copies to the GPU from memory that is not pinned take {share:.0%} of the time "
            f"(from {THRESHOLDS['pageable']:.0%}): DataLoader(pin_memory=True) and .to(device, non_blocking=True)",
            number=share,
            threshold=THRESHOLDS["pageable"],
            cost=share,
            ranks=[summary.rank],
        )


def _optimizer(summary: ProfileSummary) -> Iterator[Advice]:
    """A GPU that is busy meanwhile does not mind how long its host takes."""
    share = summary.optimizer / (summary.total("duration") or 1.0)
    gpu, idle = summary.device == "cuda", summary.share("idle")
    if share < THRESHOLDS["optimizer"] or (gpu and idle < _IDLE):
        return
    then = f", and the GPU has nothing to do {idle:.0%} of the time" if gpu else ""
    yield Advice(
        rule="optimizer",
        text=f"The optimizer takes {share:.0%} of the host's time (from {THRESHOLDS['optimizer']:.0%}){then}: "
        "fused=True where the optimizer has it, or a larger batch for each of its steps",
        number=share,
        threshold=THRESHOLDS["optimizer"],
        cost=min(share / 2, idle) if gpu else share / 2,
        ranks=[summary.rank],
    )


def _work(summary: ProfileSummary) -> float:
    """A step's time without what is spent on waiting for other ranks."""
    return (summary.total("duration") - summary.total("exposed")) / (len(summary.steps) or 1)


def _uneven(work: Mapping[int, float], verb: str, unit: str, factor: float) -> Iterable[Advice]:
    if len(work) < 2:
        return
    rank, most = max(work.items(), key=lambda item: item[1])
    rest = statistics.median(time for other, time in work.items() if other != rank)
    ratio = most / rest if rest > 0 else 1.0
    if ratio >= THRESHOLDS["uneven"]:
        yield Advice(
            rule="uneven",
            text=f"Ranks are uneven: rank {rank} {verb} {most * factor:.1f} {unit} a step, "
            f"{ratio:.2f}\N{MULTIPLICATION SIGN} as "
            f"long as the others' {rest * factor:.1f} {unit} (from "
            f"{THRESHOLDS['uneven']:.2f}\N{MULTIPLICATION SIGN}), which wait for "
            "it: give all ranks batches of one length, and look at its host's other work",
            number=ratio,
            threshold=THRESHOLDS["uneven"],
            cost=1 - 1 / ratio,
            ranks=[rank],
        )


_RULES: tuple[Callable[[ProfileSummary], Iterator[Advice]], ...] = (
    _loader,
    _tensor_cores,
    _small,
    _tiny,
    _communication,
    _waits,
    _memory,
    _pageable,
    _optimizer,
)
