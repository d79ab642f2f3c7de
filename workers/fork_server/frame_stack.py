"""Room for Python's frames, all at once: a deep call in; the same result out, without a thousand maps of memory.

Python keeps frames in chunks of 16 KiB, and gives a chunk back as soon as the call that began it returns (`push_chunk`
and `_PyThreadState_PopFrame` in CPython's Python/pystate.c). A loop that happens to call across a chunk's end maps
and unmaps 16 KiB each time around: in a large compile a quarter of a million pages, by the luck of how deep it began.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_FRAME_WORDS = (4 << 20) // 8
"""A frame of 4 MiB gets a chunk of 8, the next power of two: the rest is for all that it calls. Only what they use of
it becomes memory."""


def with_frame_stack(body: Callable[[], T]) -> T:
    """`body()`, in one chunk with every frame that it needs (thousands)."""

    def large() -> T:
        return body()

    large.__code__ = large.__code__.replace(co_stacksize=_FRAME_WORDS)
    return large()
