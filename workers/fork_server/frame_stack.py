"""Calls a function with room for all of Python's frames in one chunk of memory.

Python stores frames in chunks of 16 KiB and frees a chunk when the call that began it returns (`push_chunk` and
`_PyThreadState_PopFrame` in CPython's Python/pystate.c). A loop that calls across a chunk's end maps and unmaps 16 KiB
in every iteration: in a large compile that was a quarter of a million pages, depending on how deep the loop began.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_FRAME_WORDS = (4 << 20) // 8
"""A frame of 4 MiB gets a chunk of 8, the next power of two; the rest is for the frames of its calls. Only pages that
are used take memory."""


def with_frame_stack(body: Callable[[], T]) -> T:
    """`body()`, in one chunk with every frame that it needs (thousands)."""

    def large() -> T:
        return body()

    large.__code__ = large.__code__.replace(co_stacksize=_FRAME_WORDS)
    return large()
