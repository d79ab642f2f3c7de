"""The memory cache of blobs: one read for all who ask, and no more bytes than its limit."""

from __future__ import annotations

import asyncio

import pytest
from torchrelay.service.storage.byte_cache import ByteCache, SharedBytes


class Store:
    """Counts what is read of it."""

    def __init__(self, cache: ByteCache) -> None:
        self.cache = cache
        self.reads: list[str] = []
        self.broken = False

    async def _read(self, name: str, size: int) -> bytes:
        self.reads.append(name)
        await asyncio.sleep(0)
        if self.broken:
            raise OSError(name)
        return name.encode() * size

    async def get(self, name: str, size: int) -> SharedBytes | None:
        blob = self.cache.get(name, size, lambda: self._read(name, size))
        if blob is not None:
            assert await blob.read() == name.encode() * size
        return blob


def test_who_asks_at_one_time_or_later_shares_one_read() -> None:
    async def ask() -> None:
        store = Store(ByteCache(100))
        await asyncio.gather(*(store.get("a", 60) for _ in range(10)))
        await store.get("a", 60)
        assert store.reads == ["a"]

    asyncio.run(ask())


def test_the_least_recently_used_go_when_room_is_needed() -> None:
    async def ask() -> None:
        store = Store(ByteCache(100))
        for name in ("a", "b", "a", "c", "a", "b"):
            await store.get(name, 40)
        assert store.reads == ["a", "b", "c", "b"]
        assert store.cache.size() == 80

    asyncio.run(ask())


def test_what_is_referred_to_or_being_read_leaves_no_room_for_others_and_is_still_shared() -> None:
    async def ask() -> None:
        store = Store(ByteCache(100))
        held = await store.get("a", 60)
        assert await store.get("b", 60) is None
        assert await store.get("a", 60) is held
        del held
        first, second = await asyncio.gather(store.get("b", 60), store.get("c", 60))
        assert (first is None, second is None) == (False, True)
        assert await store.get("d", 101) is None
        assert store.reads == ["a", "b"]

    asyncio.run(ask())


def test_a_read_that_fails_fails_for_all_who_wait_and_is_tried_again_later() -> None:
    async def ask() -> None:
        store = Store(ByteCache(100))
        store.broken = True
        failed = await asyncio.gather(*(store.get("a", 60) for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in failed] == [OSError] * 3
        store.broken = False
        assert await store.get("a", 60) is not None
        assert store.reads == ["a", "a"]

    asyncio.run(ask())


def test_the_work_of_making_room_does_not_grow_with_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[SharedBytes] = []

    def size(blob: SharedBytes) -> int:
        looked.append(blob)
        return blob.__dict__["size"]

    monkeypatch.setattr(
        SharedBytes, "size", property(size, lambda blob, size: blob.__dict__.update(size=size)), raising=False
    )

    async def ask() -> None:
        store = Store(ByteCache(1000))
        for number in range(2000):
            await store.get(str(number), 1)
        assert await store.get("large", 900)
        assert store.cache.size() == 1000

    asyncio.run(ask())
    assert len(looked) < 10_000
