"""Sends what one rank reports to the job's driver: through the node's relay, or itself if it is alone on its node."""

from __future__ import annotations

import socket
import time
from collections import deque
from typing import Any

import msgspec

from ....compiler import decoding
from ....compiler.api.training.events import TrainEvent
from ..messages import RankReport, StopOrder
from .environment import RankAssignment
from .relay import ANSWER, REPORT

SEND_SECONDS = 0.2
"""Between two calls of the driver by a node, at least; a stop order arrives as late as that."""
_TO_RELAY_SECONDS = 0.05
"""Between two reports to the relay, at least."""
_CALLS = 400
"""How many all nodes make in a second: a driver's process answers more than twice as many on one core."""
_SOCKET_SECONDS = 30.0
"""A relay that takes no report for so long is given up."""


def report_seconds(nodes: int) -> float:
    """Between two calls of the driver by a node of a job that has so many."""
    return max(SEND_SECONDS, nodes / _CALLS)


class DriverLost(Exception):
    """The job's driver died: its ranks end."""


class ReportSender:
    """Sends events to the driver; the answers are its orders. For one thread."""

    def __init__(
        self, driver: Any, assignment: RankAssignment, *, relay: str = "", seconds: float = SEND_SECONDS
    ) -> None:
        """driver: the actor. relay: the socket of the node's relay; '': there is none. seconds: between two calls
        of the driver."""
        self.rank = assignment.rank
        self.stopping = False
        self.unstored = 0
        """Bytes of events that the driver has not acknowledged."""
        self._driver, self._attempt, self._seconds = driver, assignment.attempt, seconds
        self._waiting: list[TrainEvent] = []
        self._waiting_bytes = 0
        self._number = 0
        self._unstored: deque[RankReport] = deque()
        """Sent, but not acknowledged."""
        self._call: Any = None
        self.next_send = 0.0
        self._stop = -1.0
        self._received = b""
        self._relay: socket.socket | None = None
        if relay:
            self._connect(relay)

    def add(self, events: list[TrainEvent], size: int = 0) -> None:
        """size: their bytes, about."""
        self._waiting += events
        self._waiting_bytes += size
        self.unstored += size

    def poll_seconds(self) -> float:
        """How long the caller may wait before the next `exchange`."""
        return SEND_SECONDS if self._relay is None or not self._waiting else _TO_RELAY_SECONDS

    def exchange(self) -> float:
        """Send what waits, and take the answers that there are; the `stop` of the driver's last StopOrder. Raises
        DriverLost, RayError."""
        if self._relay is not None:
            if self._waiting and time.monotonic() >= self.next_send:
                self.next_send = time.monotonic() + _TO_RELAY_SECONDS
                self._to_relay()
            self._take_answers(wait=False)
        elif self._answered() and time.monotonic() >= self.next_send:
            self.next_send = time.monotonic() + self._seconds
            self._to_driver()
        return self._stop

    def finish(self, events: list[TrainEvent]) -> None:
        """Send all that is left; the driver has stored it when this returns. Raises DriverLost, RayError."""
        self.add(events)
        if self._relay is not None:
            self._to_relay(urgent=True)
            while self._relay is not None and self._unstored:
                self._take_answers(wait=True)
        if self._relay is None:
            self._wait()
            self._to_driver()
            self._wait()

    def _connect(self, path: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_SOCKET_SECONDS)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
        else:
            self._relay = connection
            self._to_relay()  # from now on it sends orders

    def _report(self) -> RankReport:
        self._number += 1
        events, self._waiting = msgspec.msgpack.encode(self._waiting), []
        report = RankReport(self.rank, self._number, events)
        self._unstored.append(report)
        self.unstored += len(events) - self._waiting_bytes
        self._waiting_bytes = 0
        return report

    def _acknowledge(self, number: int) -> None:
        while self._unstored and self._unstored[0].number <= number:
            self.unstored -= len(self._unstored.popleft().events)

    # --- through the relay -----------------------------------------------------------------------------

    def _to_relay(self, *, urgent: bool = False) -> None:
        assert self._relay is not None
        data = msgspec.msgpack.encode(self._report())
        try:
            self._relay.settimeout(_SOCKET_SECONDS)
            self._relay.sendall(REPORT.pack(len(data), urgent) + data)
        except OSError:
            self._lose_relay()

    def _take_answers(self, *, wait: bool) -> None:
        if self._relay is None:
            return
        try:
            self._relay.settimeout(_SOCKET_SECONDS if wait else 0.0)
            data = self._relay.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return
        except OSError:
            data = b""
        if not data:
            self._lose_relay()
            return
        self._received += data
        whole = len(self._received) - len(self._received) % ANSWER.size
        for stop, stored, lost in ANSWER.iter_unpack(self._received[:whole]):
            if lost:
                raise DriverLost
            self._acknowledge(stored)
            self._take(stop)
        self._received = self._received[whole:]

    def _lose_relay(self) -> None:
        """Call the driver from now on; what was not acknowledged is sent again, under its numbers."""
        assert self._relay is not None
        self._relay.close()
        self._relay = None

    # --- to the driver itself --------------------------------------------------------------------------

    def _to_driver(self) -> None:
        self._report()
        reports = list(self._unstored)
        self._call = self._driver.record.remote(self._attempt, msgspec.msgpack.encode(reports))

    def _answered(self) -> bool:
        """Whether no call is open."""
        import ray

        if self._call is not None and not ray.wait([self._call], timeout=0)[0]:
            return False
        self._wait()
        return True

    def _wait(self) -> None:
        import ray

        if self._call is not None:
            answer = decoding.from_msgpack(ray.get(self._call), type=StopOrder)
            self._call = None
            self._acknowledge(self._number)
            self._take(answer.stop)

    def _take(self, stop: float) -> None:
        self._stop = stop
        if stop >= 0:
            self.stopping = True
