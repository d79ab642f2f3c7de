"""A deadline that several calls share."""

from __future__ import annotations

import time

from ...compiler.errors import DeadlineExceeded


class Deadline:
    """Begins when it is made, and ends `seconds` later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left, above 0. Raises DeadlineExceeded."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"no artifact within {self._seconds:g} s")
        return left

    def sleep(self, seconds: float) -> None:
        """Raises DeadlineExceeded at once if the deadline would pass meanwhile."""
        if seconds >= self.remaining():
            raise DeadlineExceeded(f"no artifact within {self._seconds:g} s")
        time.sleep(seconds)
