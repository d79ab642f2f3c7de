"""How close a kernel comes to its device's ceilings. Needs no torch.

A kernel's work is the minimum: each operand is read once, the result is written once, and the flops are those of the
operator's definition. The ceilings are measured: the memory's by a copy, each dtype's by a large matrix product.
Williams, Waterman, Patterson: Roofline (CACM 52, 2009).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct

from ....compiler.request.allowed_names import DTYPE_BYTES
from ....compiler.tuning.records import Operand, Problem, TuningEntry

Bound = Literal["compute", "memory"]

_MULTIPLIED = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "int_mm"), slice(-2, None)),
    **dict.fromkeys(("scaled_mm", "grouped_mm", "scaled_grouped_mm", "convolution"), slice(2)),
}
"""Which operands of an operator are multiplied."""


class KernelWork(Struct, frozen=True):
    """flops: multiplications and additions. bytes: the minimum that must be moved. None: shapes do not tell. kind: see
    the function `kind`."""

    flops: int | None
    bytes: int | None
    kind: str


class DeviceCeilings(Struct, frozen=True):
    """What one device reaches, as measured: flops a second by kind, and bytes a second; 0: not measured."""

    flops: Mapping[str, float] = {}
    bytes: float = 0.0


class RooflineShare(Struct, frozen=True):
    """share: the shortest time that the ceilings allow, divided by the measured time; above 1 if a cache helped."""

    share: float
    bound: Bound


def kernel_work(entry: TuningEntry) -> KernelWork:
    """The work of the entry's problem on the device that it was measured on."""
    problem = entry.problem
    moved = [*problem.operands] if problem.op.startswith("triton.") else [*problem.operands, problem.result]
    sizes = [_bytes(operand) for operand in moved]
    known = [size for size in sizes if size is not None]
    return KernelWork(_flops(problem), sum(known) if len(known) == len(sizes) else None, kind(entry))


def kind(entry: TuningEntry) -> str:
    """The dtype that is multiplied. float32 in a lower precision is `tf32` on a GPU, and on a CPU, where the library
    decides what that means, like `float32, medium`."""
    problem = entry.problem
    matrices = _matrices(problem)
    operand = matrices[0] if matrices else next(iter(problem.operands), problem.result)
    precision = dict(problem.settings).get("precision", "highest")
    if operand.dtype != "float32" or precision == "highest":
        return operand.dtype
    return f"float32, {precision}" if entry.place.threads else "tf32"


def ceilings(measured: Iterable[TuningEntry], others: Iterable[TuningEntry] = ()) -> DeviceCeilings:
    """measured: copies and large matrix products on one device; the fastest of each counts. others: its other entries;
    a faster one raises the ceiling of its kind, if there is one."""
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
    """The winner's share; None if no ceiling that limits the problem was measured. A user's kernel is compared only
    with the memory's ceiling."""
    work = kernel_work(entry)
    times: dict[Bound, float] = {}
    if work.flops is not None and device.flops.get(work.kind):
        times["compute"] = work.flops / device.flops[work.kind]
    elif work.flops or (work.flops is None and not entry.problem.op.startswith("triton.")):
        return None  # memory alone does not limit a kernel that multiplies
    if work.bytes is not None and device.bytes:
        times["memory"] = work.bytes / device.bytes
    if not times:
        return None
    bound = max(times, key=lambda name: times[name])
    return RooflineShare(times[bound] / (entry.winner.milliseconds / 1e3), bound)


def _bytes(operand: Operand) -> int | None:
    """The bytes of distinct elements: an expanded dimension (stride 0) is read once."""
    each = DTYPE_BYTES.get(operand.dtype)
    if each is None:
        return None
    lengths = zip(operand.size, operand.stride, strict=False)
    return each * math.prod(length for length, stride in lengths if stride or length == 0)


def _matrices(problem: Problem) -> tuple[Operand, ...]:
    return problem.operands[_MULTIPLIED.get(problem.op, slice(0))]


def _flops(problem: Problem) -> int | None:
    """Two for each product that is summed. None: not known from shapes alone (a mask, a user's kernel)."""
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
