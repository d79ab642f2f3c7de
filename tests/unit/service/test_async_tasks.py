"""service/base/async_tasks.py: a cancellation that got lost on the way does not leave a task running."""

import asyncio

import pytest
from torchrelay.service.base import async_tasks


async def loses_one_cancellation():
    """As asyncio.wait_for of Python 3.11 does when it comes with the answer."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.Event().wait()


async def fails_at_the_end():
    try:
        await asyncio.Event().wait()
    finally:
        raise ValueError("of its own")


def test_tasks_end_though_a_cancellation_is_lost(monkeypatch):
    monkeypatch.setattr(async_tasks, "AGAIN_SECONDS", 0.05)

    async def main():
        over = asyncio.create_task(asyncio.sleep(0))
        running = [
            asyncio.create_task(loses_one_cancellation()),
            asyncio.create_task(fails_at_the_end()),
            over,
        ]
        await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            await async_tasks.end(*running)
            await async_tasks.end()
        return running

    lost, failed, over = asyncio.run(main())
    assert lost.cancelled()
    assert isinstance(failed.exception(), ValueError)
    assert over.done() and not over.cancelled()


def test_what_is_done_together_ends_though_a_cancellation_is_lost(monkeypatch):
    monkeypatch.setattr(async_tasks, "AGAIN_SECONDS", 0.05)
    ended = []

    async def work():
        try:
            await loses_one_cancellation()
        finally:
            ended.append("work")

    async def main():
        async def all_of_it():
            await async_tasks.run_together(work(), work())

        whole = asyncio.create_task(all_of_it())
        await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            await async_tasks.end(whole)
        assert whole.cancelled()

    asyncio.run(main())
    assert ended == ["work"] * 2


def test_the_first_that_fails_ends_what_is_done_with_it(monkeypatch):
    monkeypatch.setattr(async_tasks, "AGAIN_SECONDS", 0.05)

    async def fails():
        await asyncio.sleep(0.01)
        raise KeyError("of its own")

    async def main():
        async with asyncio.timeout(30):
            await async_tasks.run_together()
            await async_tasks.run_together(asyncio.sleep(0), asyncio.sleep(0))
            with pytest.raises(ExceptionGroup) as failed:
                await async_tasks.run_together(fails(), loses_one_cancellation(), fails_at_the_end())
        return failed.value.exceptions

    assert [type(error) for error in asyncio.run(main())] == [KeyError, ValueError]
