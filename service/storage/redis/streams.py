"""Ids of Redis streams' entries: the first, and their order."""

from __future__ import annotations

STREAM_START = "0-0"


def stream_order(event_id: str) -> tuple[int, int]:
    """What to compare ids by."""
    milliseconds, _, count = event_id.partition("-")
    return int(milliseconds), int(count)
