"""service/tasks.py: a cancellation that got lost on the way does not leave a task running."""

import asyncio

from torchrelay.service import tasks


async def loses_one_cancellation():
    """As asyncio.wait_for of Python 3.11 does when it comes with the answer."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(60)


async def fails_at_the_end():
    try:
        await asyncio.sleep(60)
    finally:
        raise ValueError("of its own")


def test_tasks_end_though_a_cancellation_is_lost(monkeypatch):
    monkeypatch.setattr(tasks, "_AGAIN_SECONDS", 0.05)

    async def main():
        over = asyncio.create_task(asyncio.sleep(0))
        running = [
            asyncio.create_task(loses_one_cancellation()),
            asyncio.create_task(fails_at_the_end()),
            over,
        ]
        await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            await tasks.end(*running)
            await tasks.end()
        return running

    lost, failed, over = asyncio.run(main())
    assert lost.cancelled()
    assert isinstance(failed.exception(), ValueError)
    assert over.done() and not over.cancelled()
