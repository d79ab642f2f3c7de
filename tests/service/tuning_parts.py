"""Problems, places and entries of the tuning database, for tests of the service."""

from __future__ import annotations

import msgspec
from service_parts import TOOLCHAIN
from torchrelay.compiler import decoding, tuning
from torchrelay.compiler.tuning import Entry, Operand, Place, Problem, Timing

PLACE = Place(
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


def entry(size: int, winner: str = "aten mm", place: Place = PLACE) -> Entry:
    return Entry(
        problem=problem(size), place=place, winner=Timing(winner, 0.25, 0.24, 0.26, 40), candidates=3
    )


def lookup(*sizes: int, place: Place = PLACE) -> bytes:
    return msgspec.msgpack.encode(tuning.Lookup(place, [problem(size) for size in sizes]))


def found(told: Entry) -> bytes:
    return msgspec.msgpack.encode(tuning.Found(told))


def entries(answer: bytes) -> list[Entry]:
    """What an answer tells."""
    return decoding.from_msgpack(answer, type=tuning.Known).entries
