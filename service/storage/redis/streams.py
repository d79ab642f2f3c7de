"""Ids of Redis streams' entries: where to begin, which texts are ids, and their order."""

from __future__ import annotations

import re

STREAM_START = "0-0"
_STREAM_ID = re.compile(r"\d{1,20}-\d{1,20}", re.ASCII)


def stream_order(event_id: str) -> tuple[int, int]:
    """What to compare ids by."""
    milliseconds, _, count = event_id.partition("-")
    return int(milliseconds), int(count)


def is_stream_id(text: str) -> bool:
    return _STREAM_ID.fullmatch(text) is not None
