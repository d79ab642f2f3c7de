"""Simulated time: an event loop and threads that simulate long work. It passes only while all of them wait.

Only one of them runs at a time, so a simulation of the same program ends at the same simulated moment each time,
however busy the machine is. Requests to real servers (Redis) take no simulated time: see `outside`.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import selectors
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

Wake = Callable[[], None]


class _Selector(selectors.DefaultSelector):
    """Where a loop would wait, its time jumps to where it would wait for."""

    loop: SimulatedLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if self.loop.asking or timeout is None:
            return super().select(None if timeout is None else 0.05)
        events = super().select(0)
        if not events:
            self.loop.now += max(timeout, 0.0)
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    """now: seconds since it was made."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asking = 0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self._threads = threading.local()

    def time(self) -> float:
        return self.now

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Inside the block somebody else is asked, and no time passes until he answers."""
        self.asking += 1
        try:
            yield
        finally:
            self.asking -= 1

    def simulate(self, body: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run `body` in a thread that may call the methods below; what it returns or raises."""
        ended: asyncio.Future[Any] = self.create_future()
        thread = _Thread(self)

        def run() -> None:
            self._threads.own = thread
            thread.goes.wait()
            thread.goes.clear()
            try:
                result, error = body(), None
            except BaseException as raised:
                result, error = None, raised

            def end(wake: Wake) -> None:
                if ended.done():
                    return
                if error is not None:
                    ended.set_exception(error)
                else:
                    ended.set_result(result)

            thread.arrange = end
            thread.rests.set()

        threading.Thread(target=run, daemon=True).start()
        self.call_soon(thread.go_on)
        return ended

    # --- in a simulated thread ----------------------------------------------------------------------------

    def rest(self, arrange: Callable[[Wake], Any]) -> None:
        """Until what `arrange`, which runs in the loop, is given is called there."""
        thread: _Thread = self._threads.own
        thread.arrange = arrange
        thread.rests.set()
        thread.goes.wait()
        thread.goes.clear()

    def sleep(self, seconds: float) -> None:
        self.rest(lambda wake: self.call_later(seconds, wake))

    def result(self, asked: Callable[[], Awaitable[Any]]) -> Any:
        """What a coroutine of the loop's returns."""
        tasks: list[asyncio.Future[Any]] = []

        def arrange(wake: Wake) -> None:
            tasks.append(asyncio.ensure_future(asked()))
            tasks[0].add_done_callback(lambda task: wake())

        self.rest(arrange)
        return tasks[0].result()


class _Thread:
    def __init__(self, loop: SimulatedLoop) -> None:
        self.goes, self.rests = threading.Event(), threading.Event()
        self.arrange: Callable[[Wake], Any] = lambda wake: None
        self._loop = loop

    def go_on(self) -> None:
        """Let it run until it rests again; the loop stands still meanwhile."""
        self.goes.set()
        self.rests.wait()
        self.rests.clear()
        woken = False

        def wake() -> None:
            nonlocal woken
            if not woken:
                woken = True
                self._loop.call_soon(self.go_on)

        self.arrange(wake)


@contextlib.contextmanager
def simulated_loop() -> Iterator[SimulatedLoop]:
    """A loop whose time is everybody's in the block."""
    loop = SimulatedLoop()
    asyncio.set_event_loop(loop)
    try:
        with mock.patch.object(time, "monotonic", loop.time), mock.patch.object(time, "sleep", loop.sleep):
            yield loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


class Processors:
    """So many of a host, which all its pools share: where more work at once, all are slower."""

    def __init__(self, loop: SimulatedLoop, count: int) -> None:
        self._loop = loop
        self._count = count
        self._work: list[tuple[float, int, Callable[[], None]]] = []
        """By how much must be done, in all, until it is: done for each since the beginning, and what then."""
        self._done = self._since = self._worked = 0.0
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float, then: Callable[[], None]) -> None:
        self._advance()
        self._number += 1
        heapq.heappush(self._work, (self._done + seconds, self._number, then))
        self._set()

    def _speed(self) -> float:
        return min(1.0, self._count / max(1, len(self._work)))

    @property
    def used(self) -> float:
        """Seconds in which each was at work, on average."""
        self._advance()
        return self._worked / self._count

    def _advance(self) -> None:
        self._worked += (self._loop.now - self._since) * min(self._count, len(self._work))
        self._done += (self._loop.now - self._since) * self._speed()
        self._since = self._loop.now

    def _set(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._work:
            left = max(0.0, self._work[0][0] - self._done) / self._speed()
            self._timer = self._loop.call_later(left, self._end)

    def _end(self) -> None:
        self._advance()
        ended = []
        while self._work and self._work[0][0] <= self._done + 1e-9:
            ended.append(heapq.heappop(self._work)[2])
        for then in ended:
            then()
        self._set()


class Pool:
    """Processes that take work in its order, each one at a time."""

    def __init__(self, processors: Processors, most: int) -> None:
        self._processors = processors
        self._free = most
        self._waiting: deque[tuple[float, Future[None]]] = deque()

    def submit(self, seconds: float) -> Future[None]:
        """In the loop, or in a simulated thread."""
        future: Future[None] = Future()
        self._waiting.append((seconds, future))
        self._take()
        return future

    def _take(self) -> None:
        while self._free and self._waiting:
            seconds, future = self._waiting.popleft()
            self._free -= 1
            self._processors.begin(seconds, lambda future=future: self._ended(future))  # type: ignore[misc]

    def _ended(self, future: Future[None]) -> None:
        self._free += 1
        future.set_result(None)
        self._take()
