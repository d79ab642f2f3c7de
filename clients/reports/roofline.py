"""How close a kernel comes to its device's ceilings. Needs no torch.

A kernel reads each operand once, writes its result once and multiplies as often as the operator is defined to. How
fast a device does that is measured on it: a copy says what its memory can do, a large matrix product what its units
can do in a dtype. Williams, Waterman, Patterson: Roofline (CACM 52, 2009).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct

from ...compiler.request.allowed_names import DTYPE_BYTES
from ...compiler.tuning.records import Operand, Problem, TuningEntry

Bound = Literal["compute", "memory"]

_LAST_TWO = frozenset({"mm", "addmm", "bmm", "baddbmm", "int_mm"})
"""Their last two operands are multiplied."""
_FIRST_TWO = frozenset({"scaled_mm", "grouped_mm", "scaled_grouped_mm"})


class KernelWork(Struct, frozen=True):
    """flops: multiplications and additions. bytes: the least that must be moved. None: not known from shapes alone.
    kind: of the units that multiply: a dtype, and of float32 the precision: `tf32` on a GPU, `float32, medium` on a
    CPU, where the library decides what that is."""

    flops: int | None
    bytes: int | None
    kind: str


class DeviceCeilings(Struct, frozen=True):
    """Of one device, as measured: flops a second by kind, and bytes a second; 0: not measured."""

    flops: Mapping[str, float] = {}
    bytes: float = 0.0


class RooflineShare(Struct, frozen=True):
    """share: the shortest time that the ceilings allow, of the time it took; above 1 where a cache helped."""

    share: float
    bound: Bound


def kernel_work(entry: TuningEntry) -> KernelWork:
    """The work of the entry's problem in the place where it was measured."""
    problem = entry.problem
    moved = [*problem.operands] if problem.op.startswith("triton.") else [*problem.operands, problem.result]
    sizes = [_bytes(operand) for operand in moved]
    known = [size for size in sizes if size is not None]
    return KernelWork(_flops(problem), sum(known) if len(known) == len(sizes) else None, kind(entry))


def kind(entry: TuningEntry) -> str:
    """Which of the device's units multiply."""
    problem = entry.problem
    matrices = _matrices(problem)
    operand = matrices[0] if matrices else next(iter(problem.operands), problem.result)
    precision = dict(problem.settings).get("precision", "highest")
    if operand.dtype != "float32" or precision == "highest":
        return operand.dtype
    return f"float32, {precision}" if entry.place.threads else "tf32"


def ceilings(measured: Iterable[TuningEntry], others: Iterable[TuningEntry] = ()) -> DeviceCeilings:
    """From entries of one device: copies, and large matrix products. The fastest of each counts; where there is one,
    any of the `others` that multiplied faster shows that the device can."""
    flops: dict[str, float] = {}
    moved = 0.0
    for entry in measured:
        work, seconds = kernel_work(entry), entry.winner.milliseconds / 1e3
        if entry.problem.op == "copy" and work.bytes is not None:
            moved = max(moved, work.bytes / seconds)
        elif work.flops:
            flops[work.kind] = max(flops.get(work.kind, 0.0), work.flops / seconds)
    for entry in others:
        work = kernel_work(entry)
        if work.flops and work.kind in flops:
            flops[work.kind] = max(flops[work.kind], work.flops / (entry.winner.milliseconds / 1e3))
    return DeviceCeilings(flops, moved)


def share(entry: TuningEntry, device: DeviceCeilings) -> RooflineShare | None:
    """The winner's share. None where no ceiling that limits the problem was measured. Of a user's kernel only the
    memory is known."""
    work = kernel_work(entry)
    times: dict[Bound, float] = {}
    if work.flops is not None and device.flops.get(work.kind):
        times["compute"] = work.flops / device.flops[work.kind]
    elif work.flops or (work.flops is None and not entry.problem.op.startswith("triton.")):
        return None  # memory alone says too little of a kernel that multiplies
    if work.bytes is not None and device.bytes:
        times["memory"] = work.bytes / device.bytes
    if not times:
        return None
    bound = max(times, key=lambda name: times[name])
    return RooflineShare(times[bound] / (entry.winner.milliseconds / 1e3), bound)


def _bytes(operand: Operand) -> int | None:
    """Of distinct elements: one that is expanded (stride 0) is read once."""
    each = DTYPE_BYTES.get(operand.dtype)
    if each is None:
        return None
    lengths = zip(operand.size, operand.stride, strict=False)
    return each * math.prod(length for length, stride in lengths if stride or length == 0)


def _matrices(problem: Problem) -> tuple[Operand, ...]:
    if problem.op in _LAST_TWO:
        return problem.operands[-2:]
    if problem.op in _FIRST_TWO or problem.op == "convolution":
        return problem.operands[:2]
    return ()


def _flops(problem: Problem) -> int | None:
    """Two for each product that is summed. None: it depends on more than shapes (a mask, a user's kernel)."""
    if problem.op == "copy":
        return 0
    pair = _matrices(problem)
    if len(pair) != 2:
        return None
    one, other = pair
    if problem.op == "convolution":
        transposed = dict(problem.settings).get("arg.transposed") == "True"
        outer = one if transposed else problem.result
        return 2 * math.prod(outer.size) * math.prod(other.size[1:]) if len(other.size) > 2 else None
    if not one.size or not other.size:
        return None
    if problem.op.endswith("grouped_mm") and len(one.size) == len(other.size) == 2:
        return 2 * one.size[0] * one.size[1] * other.size[1]  # the groups divide what is summed over
    return 2 * math.prod(problem.result.size) * one.size[-1]
