"""Problems, places and entries of the tuning database, for tests of the service."""

from __future__ import annotations

import msgspec
from service_parts import TOOLCHAIN
from torchrelay.compiler import decoding
from torchrelay.compiler.tuning import queries
from torchrelay.compiler.tuning.records import DeviceEnvironment, Operand, Problem, Timing, TuningEntry

PLACE = DeviceEnvironment(
    device="A CPU",
    capability="",
    driver="",
    torch=TOOLCHAIN.torch,
    triton=TOOLCHAIN.triton,
    cuda=TOOLCHAIN.cuda,
    threads=1,
)
"""Where a compile for service_parts.TARGET measures."""


def problem(size: int) -> Problem:
    side = Operand("bfloat16", (size, size), (size, 1))
    return Problem("mm", (side, side), side)


def entry(size: int, winner: str = "aten mm", place: DeviceEnvironment = PLACE) -> TuningEntry:
    return TuningEntry(
        problem=problem(size), place=place, winner=Timing(winner, 0.25, 0.24, 0.26, 40), candidates=3
    )


def lookup(*sizes: int, place: DeviceEnvironment = PLACE) -> bytes:
    return msgspec.msgpack.encode(queries.EntryLookup(place, [problem(size) for size in sizes]))


def found(told: TuningEntry) -> bytes:
    return msgspec.msgpack.encode(queries.SearchResult(told))


def entries(answer: bytes) -> list[TuningEntry]:
    """What an answer tells."""
    return decoding.from_msgpack(answer, type=queries.KnownEntries).entries
