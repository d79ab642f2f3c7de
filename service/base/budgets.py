"""Stage 4: what one process may hold at one time, whoever listens in it: connections, bytes of bodies, event streams,
work that takes a processor, lines of its log. At a limit a sender is told to come back; everyone else is served.

Each is shared by whoever uses it, by the rule by which compiles are queued: one holds no more than is free for anybody
(dynamic thresholds, Choudhury and Hahne 1998). One that floods alone gets half; n that flood get one of n + 1 parts
each.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from ...compiler.errors import Overloaded
from .settings import ServiceSettings

DESCRIPTORS = 1 << 16
"""The soft limit is raised to this, or to the hard one. Beyond that a process gains nothing."""
_RETRY_SECONDS = 2
_FORGET_SECONDS = 300.0
"""Work that somebody had done counts against him for so long."""


def raise_descriptor_limit() -> int:
    """The process' soft limit of descriptors, which is 1,024 on most systems, raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


class AcceptedConnection(Protocol):
    """What a server tells of a connection."""

    def give_way(self) -> None:
        """It is closed: it waits for a request, and another connection needs its place."""


class Connections:
    """The connections of one server. Where all places are taken, the oldest that has sent no request yet goes; if there
    is none, one that is idle between two requests."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: set[AcceptedConnection] = set()
        self._silent: dict[AcceptedConnection, None] = {}
        self._idle: dict[AcceptedConnection, None] = {}

    def add(self, connection: AcceptedConnection) -> bool:
        """False: there is no place, and none can be made."""
        if len(self._open) >= self.most:
            oldest = next(iter(self._silent), None) or next(iter(self._idle), None)
            if oldest is None:
                return False
            self.remove(oldest)
            oldest.give_way()
        self._open.add(connection)
        self._silent[connection] = None
        return True

    def works(self, connection: AcceptedConnection) -> None:
        """A request of it has begun."""
        self._silent.pop(connection, None)
        self._idle.pop(connection, None)

    def rests(self, connection: AcceptedConnection) -> None:
        """It has been answered."""
        if connection in self._open:
            self._idle[connection] = None

    def remove(self, connection: AcceptedConnection) -> None:
        self._open.discard(connection)
        self.works(connection)

    def __len__(self) -> int:
        return len(self._open)


class Shares:
    """`total` of something. `name`: in words, for who gets no more. most: what a token, the last of the owners, may
    hold however much is free."""

    def __init__(self, name: str, total: int, *, most: int | None = None) -> None:
        self._name = name
        self._total = total
        self._most = total if most is None else most
        self._owned: dict[str, int] = {}
        self.used = 0

    def take(self, amount: int, owners: tuple[str, ...]) -> None:
        """owners: a namespace and a token of it, say; neither may have more than its share. Raises Overloaded."""
        free = self._total - self.used
        for owner in owners:
            owned = self._owned.get(owner, 0) + amount
            if owned > free or (owner == owners[-1] and owned > self._most):
                whose = f"{owner} holds its share" if amount <= free else "they are all held"
                raise Overloaded(
                    f"this process has no more {self._name} to give: {whose}",
                    hint="Try again after the Retry-After delay",
                    retry_after=_RETRY_SECONDS,
                )
        self.used += amount
        for owner in owners:
            self._owned[owner] = self._owned.get(owner, 0) + amount

    def give(self, amount: int, owners: tuple[str, ...]) -> None:
        self.used -= amount
        for owner in owners:
            left = self._owned.pop(owner) - amount
            if left:
                self._owned[owner] = left


class FairWork:
    """Work that takes a processor: `together` pieces at once, of one owner one fewer. A free place goes to the owner
    whose work has taken least time lately, whatever the others have waiting."""

    def __init__(self, together: int) -> None:
        self._places = together
        self._most = max(1, together - 1)
        self._running = Counter[str]()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._spent: dict[str, tuple[float, float]] = {}
        """Seconds, and when they were counted last."""

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """The context begins when it is this owner's turn."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, []).append(turn)
        self._serve()
        began: float | None = None
        try:
            await turn
            began = time.monotonic()
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._running[owner] -= 1
                if began is not None:
                    self._spend(owner, time.monotonic() - began)
            else:
                self._drop(owner, turn)
            self._serve()

    def _serve(self) -> None:
        while self._running.total() < self._places:
            ready = [owner for owner in self._waiting if self._running[owner] < self._most]
            if not ready:
                return
            owner = min(ready, key=lambda owner: (self._seconds(owner), self._running[owner]))
            turn = self._waiting[owner][0]
            self._drop(owner, turn)
            if not turn.done():
                self._running[owner] += 1
                turn.set_result(None)

    def _drop(self, owner: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(owner, [])
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._waiting.pop(owner, None)

    def _seconds(self, owner: str) -> float:
        """What its work took, of which a part is forgotten with time."""
        seconds, at = self._spent.get(owner, (0.0, 0.0))
        return max(0.0, seconds - seconds * (time.monotonic() - at) / _FORGET_SECONDS)

    def _spend(self, owner: str, seconds: float) -> None:
        self._spent[owner] = self._seconds(owner) + seconds, time.monotonic()
        if len(self._spent) > 1000:
            self._spent = {owner: spent for owner, spent in self._spent.items() if self._seconds(owner)}


class Budgets:
    """Those of one process, beside its servers' connections."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.bodies = Shares("memory for bodies", settings.bodies_bytes)
        self.uploads = Shares("room for uploads", settings.uploads_bytes)
        streams = max(1, most_connections(settings) // 2)
        self.streams = Shares("event streams", streams, most=settings.token_streams)
        self.work = FairWork(settings.checks_at_once)


HELD = "torchrelay.held"
"""The name by which a request's ASGI scope has its Held."""


class Held:
    """What one request holds, until it has been answered."""

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self._taken: list[tuple[Shares, int, tuple[str, ...]]] = []
        self.owners: tuple[str, ...] = ()
        """The namespace and the token whose request it is, once these are known."""

    def body(self, amount: int) -> None:
        """Raises Overloaded."""
        self._take(self._budgets.bodies, amount)

    def upload(self, amount: int) -> None:
        """Raises Overloaded."""
        self._take(self._budgets.uploads, amount)

    def stream(self) -> None:
        """Raises Overloaded."""
        self._take(self._budgets.streams, 1)

    def _take(self, shares: Shares, amount: int) -> None:
        shares.take(amount, self.owners)
        self._taken.append((shares, amount, self.owners))

    def owned_by(self, namespace: str, token: str) -> None:
        self.owners = f"namespace {namespace}", f"token {token}"

    def give_back(self) -> None:
        for shares, amount, owners in self._taken:
            shares.give(amount, owners)
        self._taken.clear()


def most_connections(settings: ServiceSettings) -> int:
    """How many one server takes: well under the process' limit of descriptors, which its Redis, files and processes
    need too."""
    descriptors = raise_descriptor_limit()
    return max(
        8, min(settings.connections, descriptors * 3 // 4 if descriptors >= 1024 else descriptors // 2)
    )


class Rate:
    """Allows at most `most` a second on average, and as many at once. `dropped`: how many were refused since it was
    last set to 0."""

    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._left = most
        self._at = clock()
        self.dropped = 0

    def allows(self, cost: float = 1) -> bool:
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._most)
        self._at = now
        if self._left < min(cost, self._most):
            self.dropped += 1
            return False
        self._left -= cost
        return True
