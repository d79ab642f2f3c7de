"""What a slot's actor says while a job runs there: progress, queries, and how the job has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any

from ...compiler.api import compiles
from ...compiler.errors import CompileKilled
from ..messages import (
    BadFrame,
    EventRate,
    JobDone,
    JobFailed,
    JobQuery,
    StageEvent,
    WorkerLost,
    decode_answer,
)
from .slots import Slot

log = logging.getLogger(__name__)

OnQuery = Callable[[bytes], Awaitable[bytes]]

_MOST_ANSWERING = 16
"""Queries of one job that are answered at once; a fork server lets half as many be open."""


async def follow_job(
    slot: Slot,
    job_id: str,
    stream: AsyncIterable[Awaitable[bytes]],
    on_progress: Callable[[compiles.Stage, str], None],
    on_query: OnQuery | None,
) -> bytes:
    """Handle the actor's messages until the job ends; its result. Raises WorkerLost, and the job's own error."""
    from ray.exceptions import RayError

    actor = slot.actor
    answering: set[asyncio.Task[None]] = set()
    events = EventRate()
    try:
        async for reference in stream:
            message = decode_answer(await reference)
            match message:
                case StageEvent():
                    if events.allows():
                        on_progress(message.stage, message.detail)
                case JobQuery() if len(answering) < _MOST_ANSWERING:
                    task = asyncio.create_task(_answer(slot, actor, job_id, message, on_query))
                    answering.add(task)
                    task.add_done_callback(answering.discard)
                case JobDone():
                    return message.artifact
                case JobFailed():
                    raise message.error()
        raise CompileKilled(f"worker {slot.worker} ended its answer too early", hint="Try again")
    except asyncio.CancelledError:
        if slot.lost:
            raise WorkerLost(f"worker {slot.worker} was lost with the job: {slot.lost}") from None
        raise
    except BadFrame as error:
        raise CompileKilled(f"worker {slot.worker} sent an invalid message ({error})") from None
    except RayError as error:
        if slot.actor is actor:
            slot.state = "starting"  # not idle: its supervisor will notice as well
        log.warning("worker %s was lost with a job: %s", slot.worker, str(error).strip().partition("\n")[0])
        raise WorkerLost(f"worker {slot.worker} died with the job", hint="Try again") from None
    finally:
        for task in answering:
            task.cancel()


async def _answer(slot: Slot, actor: Any, job_id: str, query: JobQuery, on_query: OnQuery | None) -> None:
    answer = b""
    try:
        if on_query is not None:
            answer = await on_query(query.question)
    except Exception:  # the job goes on without
        log.exception("the query of a job on worker %s failed", slot.worker)
    actor.reply.remote(job_id, query.id, answer)
