"""Bytes of blobs in this gateway's memory, by digest: read once, however many ask at one time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any
from weakref import WeakValueDictionary, finalize


class SharedBytes:
    """`size` bytes that are read once and shared by all who ask for them."""

    def __init__(self, size: int, reading: asyncio.Task[bytes]) -> None:
        self.size = size
        self._reading = reading

    async def read(self) -> bytes:
        """Raises what the one read raises."""
        if self._reading.done():
            return self._reading.result()
        return await asyncio.shield(self._reading)


class ByteCache:
    """Holds at most `limit` bytes. What a caller still refers to counts too, so that many slow downloads of different
    blobs do not hold more. The least recently used go first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._recent: OrderedDict[str, SharedBytes] = OrderedDict()
        self._referred: WeakValueDictionary[str, SharedBytes] = WeakValueDictionary()
        self._used = 0

    def get(
        self, digest: str, size: int, read: Callable[[], Coroutine[Any, Any, bytes]]
    ) -> SharedBytes | None:
        """The blob; `read` begins unless it is here or on its way. None: there is no room for it now.

        Bytes that could not be read are forgotten, so that the next call reads them again.
        """
        blob = self._referred.get(digest)
        if blob is None:
            if not self._make_room(size):
                return None
            blob = SharedBytes(size, asyncio.create_task(read()))
            self._used += size
            release = finalize(blob, self._release, size)
            release.atexit = False
            blob._reading.add_done_callback(lambda reading: self._forget_failed(digest, reading, release))
            self._referred[digest] = blob
        self._recent[digest] = blob
        self._recent.move_to_end(digest)
        return blob

    def find(self, digest: str) -> SharedBytes | None:
        """The blob, if it is here or on its way."""
        if (blob := self._referred.get(digest)) is not None:
            self._recent[digest] = blob
            self._recent.move_to_end(digest)
        return blob

    def _make_room(self, size: int) -> bool:
        if size > self._limit:
            return False
        while self._used + size > self._limit:
            if not self._recent:
                return False
            self._recent.popitem(last=False)
        return True

    def size(self) -> int:
        """Bytes that are here, or being read."""
        return self._used

    def _release(self, size: int) -> None:
        self._used -= size

    def _forget_failed(
        self, digest: str, reading: asyncio.Task[bytes], release: Callable[[], object]
    ) -> None:
        if reading.cancelled() or reading.exception() is not None:
            self._recent.pop(digest, None)
            self._referred.pop(digest, None)
            release()
