"""Advice from ranks' profiles and from the times of their steps: texts that say what to change.

Each rule compares one number with one threshold. The text gives both, so that a reader can check it. Needs no torch.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from .summary import TINY_MICROSECONDS, ProfileSummary

Rule = Literal[
    "loader", "tensor_cores", "small", "tiny", "uneven", "communication", "waits", "memory", "pageable", "optimizer",
    "compiles",
]  # fmt: skip


class _Text(Struct, frozen=True):
    """The advice is given if `applies(number, threshold)`. text: a format string."""

    threshold: float
    text: str
    applies: Callable[[float, float], bool] = operator.ge


_TEXTS: dict[Rule, _Text] = {
    # of a step's time
    "loader": _Text(
        0.10,
        "The data loader is waited for {number:.0%} of the time (from {threshold:.0%}): give it workers (num_workers, "
        "persistent_workers=True), let it fetch ahead (prefetch_factor), or prepare the data before",
    ),
    # of the time of kernels that multiply matrices
    "tensor_cores": _Text(
        0.50,
        "{use} of the time of matrix products (expected: {threshold:.0%}), which are {products:.0%} of the kernels' "
        "time: precision bf16 (or fp16) by autocast, or tf32 for float32; sizes should be multiples of 8",
        operator.lt,
    ),
    # of a step's time, without work
    "small": _Text(
        0.30,
        "{what} {number:.0%} of the time (from {threshold:.0%}){memory}: the batch is too small for what Python does "
        "between operators. Enlarge it, compile the model, or use mode='reduce-overhead' on a GPU",
    ),
    # of the number of kernels
    "tiny": _Text(
        0.50,
        "{number:.0%} of {kernels:,} kernels a step (from {threshold:.0%}) take less than {tiny:.0f} \N{MICRO SIGN}s, "
        "about what it takes to launch one: compile the model, use a fused or foreach optimizer, or "
        "mode='reduce-overhead'",
    ),
    # the slowest rank's work as a multiple of the others' median
    "uneven": _Text(
        1.10,
        "Ranks are uneven: rank {rank} {verb} {most:.1f} ms a step, {number:.2f}\N{MULTIPLICATION SIGN} as long as the "
        "others' {rest:.1f} ms (from {threshold:.2f}\N{MULTIPLICATION SIGN}), which wait for it: give all ranks "
        "batches of one length, and look at its host's other work",
    ),
    # of a step's time, exposed
    "communication": _Text(
        0.15,
        "Communication that nothing hides takes {number:.0%} of the time (from {threshold:.0%}); {hidden:.0%} of it "
        "is hidden behind computation: accumulate gradients over several batches, compress them "
        "(train.ddp(model, hook='bf16')), or enlarge the batch; where ranks are uneven, part of it is waiting",
    ),
    # in a step
    "waits": _Text(
        1.0,
        "The host waits for the GPU {number:.1f} times a step (more than {threshold:.0f}; mostly {most}), and the GPU "
        "then has nothing to do ({idle:.0%} of the time): read losses with .item() only every few steps, and avoid "
        "nonzero and .cpu() in a step",
        operator.gt,
    ),
    # of the device's memory
    "memory": _Text(
        0.90,
        "{device} is {number:.0%} full at its peak (from {threshold:.0%}), {activations:.0%} of it activations: "
        "activation checkpointing, a smaller batch with gradient accumulation, or FSDP2",
    ),
    # of a step's time
    "pageable": _Text(
        0.02,
        "Copies to the GPU from memory that is not pinned take {number:.0%} of the time (from {threshold:.0%}): "
        "DataLoader(pin_memory=True) and .to(device, non_blocking=True)",
    ),
    # of a step's time on the host
    "optimizer": _Text(
        0.20,
        "The optimizer takes {number:.0%} of the host's time (from {threshold:.0%}){idle}: fused=True where the "
        "optimizer has it, or a larger batch for each of its steps",
    ),
    # of all ranks
    "compiles": _Text(
        1.0,
        "Ranks waited for {number} compiles after they had started (from {threshold:.0f}){reasons}: let the job "
        "capture its graphs before, and look at docs/fallbacks.md for what was compiled locally",
    ),
}
THRESHOLDS: dict[Rule, float] = {rule: text.threshold for rule, text in _TEXTS.items()}
_PRODUCTS = 0.10
"""Tensor Cores do not matter if matrix products take less than this share of the kernels' time."""
_MANY = 300
"""Tiny kernels matter only in steps with at least this many kernels."""
_IDLE = 0.05
"""A GPU that is idle for less than this share of a step's time does not wait for its host."""
_TENSOR_CORES_SINCE = [7, 0]


class Advice(Struct, frozen=True, kw_only=True):
    """text: what was found, the number with its threshold, and what to do. number: in the threshold's unit. cost: the
    share of a step's time that may be saved; it gives the order. ranks: those that the advice is about."""

    rule: Rule
    text: str
    number: float
    threshold: float
    cost: float
    ranks: list[int]


def advice(summaries: Sequence[ProfileSummary]) -> list[Advice]:
    """The largest cost comes first. The same advice for several ranks is given once, with the worst number."""
    found: dict[Rule, Advice] = {}
    for summary in summaries:
        for each in (each for rule in _RULES for each in rule(summary)):
            other = found.get(each.rule, each)
            worse = each if each.cost > other.cost else other
            ranks = sorted({*other.ranks, *each.ranks})
            found[each.rule] = msgspec.structs.replace(worse, ranks=ranks)
    work = {each.rank: _work(each) / 1e3 for each in summaries}
    return sorted([*found.values(), *_uneven(work, "works")], key=lambda each: -each.cost)


def of_steps(seconds: Mapping[int, Sequence[float]], waited: Mapping[int, Sequence[float]]) -> list[Advice]:
    """Advice that needs no profile. seconds, waited: by rank, for each step that it reported: the step's time, and the
    part of it that was spent waiting for data."""
    shares = {
        rank: sum(waited[rank]) / sum(times)
        for rank, times in seconds.items()
        if waited.get(rank) and sum(times)
    }
    slowest = max(shares, key=lambda rank: (shares[rank], rank), default=0)
    loader = _advice("loader", shares.get(slowest, 0.0), [slowest])
    if loader or any(waited.values()):  # ranks that wait for data wait for each other too
        return loader
    return _uneven(
        {rank: 1e3 * statistics.median(times) for rank, times in seconds.items() if times}, "takes"
    )


def of_compiles(late: int, reasons: Mapping[int, Sequence[str]]) -> list[Advice]:
    """late: misses and fallbacks of all ranks since they started. reasons: of each rank's fallbacks."""
    every = ", ".join(sorted({reason for each in reasons.values() for reason in each}))
    shown = f" ({every[:300]})" if every else ""
    return _advice("compiles", late, sorted(reasons), cost=0.0, reasons=shown)


def _advice(
    rule: Rule, number: float, ranks: list[int], *, cost: float | None = None, **values: object
) -> list[Advice]:
    """The rule's advice; none if the number does not pass the threshold. values: what else the text names."""
    text = _TEXTS[rule]
    if not text.applies(number, text.threshold):
        return []
    return [
        Advice(
            rule=rule,
            text=text.text.format(number=number, threshold=text.threshold, **values),
            number=number,
            threshold=text.threshold,
            cost=number if cost is None else cost,
            ranks=ranks,
        )
    ]


# --- rules -------------------------------------------------------------------------------------------------


def _loader(summary: ProfileSummary) -> list[Advice]:
    return _advice("loader", summary.share("loader"), [summary.rank])


def _tensor_cores(summary: ProfileSummary) -> list[Advice]:
    known = summary.product_time - summary.tensor_unknown
    if summary.device != "cuda" or known <= 0 or summary.product_time < _PRODUCTS * summary.kernel_time:
        return []
    if summary.capability and summary.capability < _TENSOR_CORES_SINCE:
        return []
    share = summary.tensor_yes / known
    return _advice(
        "tensor_cores",
        share,
        [summary.rank],
        cost=(1 - share) * known / (summary.total("duration") or 1.0),
        use="No Tensor Cores are used: 0%" if share < 0.005 else f"Tensor Cores do only {share:.0%}",
        products=summary.product_time / summary.kernel_time,
    )


def _small(summary: ProfileSummary) -> list[Advice]:
    room = [t for t in summary.memory if t.limit and t.peak < t.limit / 2]
    return _advice(
        "small",
        summary.share("idle"),
        [summary.rank],
        what="The GPU has nothing to do" if summary.device == "cuda" else "No operator runs",
        memory=f", and {room[0].peak / room[0].limit:.0%} of its memory is used" if room else "",
    )


def _tiny(summary: ProfileSummary) -> list[Advice]:
    steps = len(summary.steps) or 1
    if summary.launched < _MANY * steps:
        return []
    share = summary.tiny / summary.launched
    return _advice(
        "tiny",
        share,
        [summary.rank],
        cost=summary.share("idle") * share,
        kernels=summary.launched // steps,
        tiny=TINY_MICROSECONDS,
    )


def _communication(summary: ProfileSummary) -> list[Advice]:
    hidden = summary.overlap / (summary.total("communication") or 1.0)
    return _advice("communication", summary.share("exposed"), [summary.rank], hidden=hidden)


def _waits(summary: ProfileSummary) -> list[Advice]:
    idle = summary.share("idle")
    if summary.device != "cuda" or idle < _IDLE or not summary.waits:
        return []
    reads = sum(each.calls for each in summary.waits if each.name.startswith("aten::"))
    others = sum(each.calls for each in summary.waits) - reads
    number = max(reads, others) / (len(summary.steps) or 1)
    most = max(summary.waits, key=lambda each: each.calls).name
    return _advice("waits", number, [summary.rank], cost=idle / 2, most=most, idle=idle)


def _memory(summary: ProfileSummary) -> list[Advice]:
    limited = [each for each in summary.memory if each.limit]
    if not limited:
        return []
    fullest = max(limited, key=lambda each: each.peak / each.limit)
    return _advice(
        "memory",
        fullest.peak / fullest.limit,
        [summary.rank],
        cost=0.05,
        device=fullest.device,
        activations=fullest.at_peak.get("activations", 0) / (fullest.peak or 1),
    )


def _pageable(summary: ProfileSummary) -> list[Advice]:
    return _advice("pageable", summary.pageable / (summary.total("duration") or 1.0), [summary.rank])


def _optimizer(summary: ProfileSummary) -> list[Advice]:
    """On a GPU the host's time matters only where the GPU is idle."""
    share = summary.optimizer / (summary.total("duration") or 1.0)
    if summary.device != "cuda":
        return _advice("optimizer", share, [summary.rank], cost=share / 2, idle="")
    idle = summary.share("idle")
    if idle < _IDLE:
        return []
    shown = f", and the GPU has nothing to do {idle:.0%} of the time"
    return _advice("optimizer", share, [summary.rank], cost=min(share / 2, idle), idle=shown)


def _work(summary: ProfileSummary) -> float:
    """Microseconds of a step without exposed communication, which includes waiting for other ranks."""
    return (summary.total("duration") - summary.total("exposed")) / (len(summary.steps) or 1)


def _uneven(work: Mapping[int, float], verb: str) -> list[Advice]:
    """work: milliseconds a step, by rank."""
    if len(work) < 2:
        return []
    rank, most = max(work.items(), key=lambda item: item[1])
    rest = statistics.median(time for other, time in work.items() if other != rank)
    ratio = most / rest if rest > 0 else 1.0
    return _advice("uneven", ratio, [rank], cost=1 - 1 / ratio, rank=rank, verb=verb, most=most, rest=rest)


_RULES = (
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
