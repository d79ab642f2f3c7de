"""How often one address may send tokens that nobody has issued, or that have ended. Each costs a round trip to Redis.

Counted in this gateway's memory. A good token is not refused here, so that others behind the same proxy keep working
while one of them tries tokens.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from ...compiler.errors import RateLimited, Unauthenticated

PER_SECOND = 20.0
AT_ONCE = 500
REMEMBERED = 8192
"""Addresses, and as many tokens."""
_NETWORK_BITS = 64
"""Bits of an IPv6 address that count: whoever has one address has all with the same beginning."""
V = TypeVar("V")


class UnknownTokens:
    def __init__(self) -> None:
        self._whole_again: OrderedDict[str, float] = OrderedDict()  # by address, when nothing counts any more
        self._good: OrderedDict[str, None] = OrderedDict()
        self._looked_up: Counter[str] = Counter()  # now

    @asynccontextmanager
    async def look_up(
        self, address: str, token: str, known: Callable[[], Awaitable[bool]]
    ) -> AsyncGenerator[None]:
        """The block looks a token up, and raises Unauthenticated for one that is not good. address: of the client;
        token: its digest; known: whether it seems to be good, by what asks Redis little. Raises RateLimited before the
        block, and what `known` raises."""
        address = _network(address)
        counted = token not in self._good and not self._looked_up[token]
        if token not in self._good and (wait := self._wait(address)) > 0 and not await known():
            raise RateLimited(
                "this address has sent too many tokens that are not known", retry_after=math.ceil(wait)
            )
        # counted before the answer is there: many may be asked for at once
        self._count(address, counted)
        self._looked_up[token] += 1
        bad = False
        try:
            yield
            _remember(self._good, token, None)
        except Unauthenticated:
            self._good.pop(token, None)
            bad = True
            raise
        finally:
            self._count(address, bad - counted)
            self._looked_up[token] -= 1
            if not self._looked_up[token]:
                del self._looked_up[token]

    def _wait(self, address: str) -> float:
        """Seconds until one more is allowed."""
        left = self._whole_again.get(address, 0.0) - time.monotonic()
        return left + (1 - AT_ONCE) / PER_SECOND

    def _count(self, address: str, tokens: int) -> None:
        if not tokens:
            return
        now = time.monotonic()
        _remember(
            self._whole_again, address, max(self._whole_again.get(address, 0.0), now) + tokens / PER_SECOND
        )


def _network(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket's
        return address
    if found.version == 4:
        return address
    return str(ipaddress.ip_network((found, _NETWORK_BITS), strict=False))


def _remember(known: OrderedDict[str, V], name: str, value: V) -> None:
    known[name] = value
    known.move_to_end(name)
    if len(known) > REMEMBERED:
        known.popitem(last=False)
