"""What a running compile asks of its team's tuning database: a question's bytes in; Known's bytes out, or none.

The process that asks runs a tenant's graph, and may have been taken over by it. Its bytes are decoded within limits
against closed structs. What it reports is kept only of the device and versions that it was given to compile for. A
compile of user-written source can claim anything, and its claim would choose others' kernels (docs/decisions/0015): it
is believed of calls of its only source, and of nothing else (0021). It may ask: the entries are its own team's. It may
want problems searched: the service's own code does that elsewhere (service/farm.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import structlog
from redis.exceptions import RedisError

from ..compiler import decoding, tune_kernels, tuning, wire
from ..compiler.errors import LimitExceeded, MalformedRequest, RelayError
from ..compiler.target import capability
from ..compiler.tuning import Entry, Found, Known, Lookup, Place, Wanted
from .intake import Ask
from .tunings import Tunings

if TYPE_CHECKING:
    from .farm import Farm

log = structlog.get_logger(__name__)

_SECONDS = 8.0
"""For one answer: the compile waits for ten (workers/questions.py)."""


Hear = Callable[[tuning.Question, Sequence[Entry]], None]
"""Hears, in the event loop, what a compile asked and which entries it was answered."""


class Questions:
    """The questions of one compile. `ask`: what it was given to compile. hear: who else wants to know of them."""

    def __init__(self, tunings: Tunings, farm: Farm, ask: Ask, hear: Hear | None = None) -> None:
        self._tunings = tunings
        self._farm = farm
        self._ask = ask
        self._hear = hear
        self._complained = False

    async def answer(self, question: bytes) -> bytes:
        """Raises nothing: b'' where there is no answer, and the first time a line in the log."""
        try:
            async with asyncio.timeout(_SECONDS):
                asked = decoded(question)
                known = await self._known(asked)
        except (RelayError, RedisError, TimeoutError) as error:
            if not self._complained:
                self._complained = True
                log.warning(
                    "tuning_unanswered", key=self._ask.key, error=f"{type(error).__name__}: {error}"[:500]
                )
            return b""
        if self._hear is not None:
            self._hear(asked, known.entries)
        return msgspec.msgpack.encode(known)

    async def _known(self, question: tuning.Question) -> Known:
        match question:
            case Lookup(place, problems):
                return Known(await self._tunings.known(place, problems))
            case Wanted(place, problems, patience):
                return await self._farm.want(place, problems, self._ask, patience=patience)
            case Found(entry) if self._believes(entry):
                return Known([kept.entry for kept in await self._tunings.keep([entry])])
            case Found(entry):
                return Known(await self._tunings.known(entry.place, [entry.problem]))
            case _:
                raise MalformedRequest(f"no compile asks {type(question).__name__}")

    def _believes(self, entry: Entry) -> bool:
        if not measurable(entry.place, self._ask.toolchain, self._ask.target):
            return False
        if tune_kernels.is_of_source(entry.problem):
            return [tune_kernels.source_of(entry.problem)] == self._ask.sources
        return not self._ask.sources


def measurable(place: Place, versions: wire.Toolchain, target: wire.Target) -> bool:
    """Whether what is made so could be measured there. The gateway cannot tell one CPU's model from another's."""
    if (place.torch, place.triton, place.cuda) != (versions.torch, versions.triton, versions.cuda):
        return False
    if target.kind == "cuda":
        return (place.device, place.capability) == (target.name, target.capability)
    return place.capability == capability(target.cpu) and place.threads > 0  # a GPU's have none


def decoded(question: bytes) -> tuning.Question:
    """What a child wrote. Raises LimitExceeded, MalformedRequest."""
    if len(question) > tuning.QUESTION_LIMIT:
        raise LimitExceeded(f"a question of {len(question)} bytes, limit {tuning.QUESTION_LIMIT}")
    try:
        return decoding.from_msgpack(question, type=tuning.Question)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequest(f"a question that is none: {error}") from None
