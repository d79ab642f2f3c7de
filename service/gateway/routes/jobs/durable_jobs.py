"""What the routes of tuning and training jobs share: the stream of a job's events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any

import structlog
from fastapi import Header, Request, Response
from redis.exceptions import RedisError

from ....jobs.records import ENDED_STATES, DurableJobs
from ...http.event_stream import EventBatch, ServerEvent
from ...parts import GatewayParts

log = structlog.get_logger(__name__)

Jobs = DurableJobs[Any, Any]
LastEventNumber = Annotated[
    str, Header(description="Go on after this event of an earlier stream", pattern="^[0-9]{0,15}$")
]


async def job_events(
    request: Request, gateway: GatewayParts, jobs: Jobs, job: str, last_event_id: str
) -> Response:
    """The events of a job after the one with `last_event_id`, as a stream. Raises NotFound."""
    await jobs.job(job)
    return gateway.event_streams.response(request, _batches(gateway, jobs, job, last_event_id))


async def _batches(gateway: GatewayParts, jobs: Jobs, job: str, after: str) -> AsyncGenerator[EventBatch]:
    """New events, until the job has ended and all are sent. They come later while Redis is down."""
    async with gateway.notifications.woken(jobs.notification(job)) as changed:
        while True:
            changed.clear()
            events: list[ServerEvent] = []
            ended = False
            try:
                ended = (await jobs.job(job)).state in ENDED_STATES
                events = [
                    ServerEvent(each.name, each.id, each.data) for each in await jobs.events(job, after)
                ]
            except RedisError as error:
                log.warning("events_delayed", job=job, error=str(error))
            if events:
                after = events[-1].id
            yield EventBatch(events, ended and not events, changed)
