"""What the routes of tuning and training jobs share: the stream of a job's events."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Any

from fastapi import Header, Request, Response

from ....jobs.records import ENDED_STATES, DurableJobs
from ....storage.redis.retry import redis_errors_logged
from ...http.event_stream import ServerEvent
from ...parts import GatewayParts

Jobs = DurableJobs[Any, Any]
LastEventNumber = Annotated[
    str, Header(description="Go on after this event of an earlier stream", pattern="^[0-9]{0,15}$")
]


async def job_events(
    request: Request, gateway: GatewayParts, jobs: Jobs, job: str, last_event_id: str
) -> Response:
    """The events of a job after the one with `last_event_id`, until it has ended, as a stream. They come later while
    Redis is down. Raises NotFound."""
    await jobs.job(job)

    async def read(after: str) -> tuple[list[ServerEvent], bool]:
        with redis_errors_logged("events_delayed", job=job):
            ended = (await jobs.job(job)).state in ENDED_STATES
            events = [ServerEvent(each.name, each.id, each.data) for each in await jobs.events(job, after)]
            return events, ended and not events
        return [], False

    return gateway.event_streams.response(request, nullcontext(read), jobs.notification(job), last_event_id)
