"""Reads a profiler's trace, as Kineto writes it for Chrome and Perfetto. Needs no torch.

Times are microseconds. An interval is a pair (start, end). A cover is a sorted list of intervals that do not
touch. Upstream: kineto/libkineto/src/output_json.cpp.
"""

from __future__ import annotations

import gzip
import itertools
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from ....compiler import decoding
from ....compiler.errors import ClientError

Interval = tuple[float, float]
Cover = list[Interval]

_NO_NUMBER = re.compile(rb"([:\[,]\s*)-?(?:inf|nan|Infinity|NaN)\b")


class TraceArguments(Struct, frozen=True, gc=False):
    """The arguments of an event that are used. grid, block, registers, shared, occupancy: of a CUDA kernel. size: of an
    allocation, below 0 where memory is given back; allocated: on the device after it; kind: 0 CPU, 1 CUDA."""

    external: int = field(default=0, name="External id")
    dims: Any = field(default=None, name="Input Dims")
    grid: Any = None
    block: Any = None
    registers: int = field(default=0, name="registers per thread")
    shared: int = field(default=0, name="shared memory")
    occupancy: float | None = field(default=None, name="est. achieved occupancy %")
    size: int = field(default=0, name="Bytes")
    address: int = field(default=0, name="Addr")
    allocated: int = field(default=0, name="Total Allocated")
    kind: int = field(default=-1, name="Device Type")
    number: int = field(default=-1, name="Device Id")

    @property
    def launch(self) -> tuple[object, ...]:
        """How a kernel was launched."""
        return tuple(self.grid or ()), tuple(self.block or ()), self.registers, self.shared


class TraceEvent(Struct, frozen=True, gc=False):
    """ph: X for one with a duration, i for an instant, s and f for a link's two ends, M for a name."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    tid: Any = None
    ts: float = 0.0
    dur: float = 0.0
    id: Any = None
    args: TraceArguments = TraceArguments()

    @property
    def end(self) -> float:
        return self.ts + self.dur

    @property
    def interval(self) -> Interval:
        return self.ts, self.end


class KinetoTrace(Struct, frozen=True):
    """The parts of a trace that are used."""

    events: list[TraceEvent] = field(name="traceEvents")


def read_trace(path: Path) -> KinetoTrace:
    """A trace's file, compressed with gzip or not. Raises ClientError for another file."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise ClientError(f"{path} cannot be read: {error}", hint="Profile again") from None
    try:
        return decoding.from_json(data, type=KinetoTrace, strict=False)
    except msgspec.MsgspecError:
        pass
    try:  # Kineto has written divisions by zero as they print
        return decoding.from_json(_NO_NUMBER.sub(rb"\1null", data), type=KinetoTrace, strict=False)
    except msgspec.MsgspecError as error:
        raise ClientError(f"{path} is not a profiler's trace: {error}", hint="Profile again") from None


def cover(intervals: Iterable[Interval]) -> Cover:
    """The union of the intervals."""
    found: Cover = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        elif end > start:
            found.append((start, end))
    return found


def length(covered: Iterable[Interval]) -> float:
    return sum(end - start for start, end in covered)


def common(first: Cover, other: Cover) -> Cover:
    """The intersection."""
    found: Cover = []
    i = j = 0
    while i < len(first) and j < len(other):
        start, end = max(first[i][0], other[j][0]), min(first[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(first: Cover, other: Cover) -> Cover:
    """The difference: `first` without `other`."""
    edges = [-math.inf, *itertools.chain.from_iterable(other), math.inf]
    return common(first, list(zip(edges[::2], edges[1::2], strict=True)))
