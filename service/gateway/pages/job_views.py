"""The values of the templates of training jobs."""

from __future__ import annotations

from fastapi import Request

from ....compiler.api.html.page import Tile, bytes_of, plural, seconds
from ....compiler.api.html.series import chart
from ....compiler.api.training import events
from ....compiler.api.training.jobs import TrainJob, TrainsReply
from ....compiler.api.training.shown import ShownJob
from ..http.page_bodies import rendered
from .views import namespace_of, when


def listed(request: Request, reply: TrainsReply) -> str:
    return rendered(
        "jobs/jobs.html",
        request,
        title="Training jobs",
        about=["the newest first"],
        tiles=(),
        jobs=reply.jobs,
        when=when,
        namespace=namespace_of(request),
    )


def job(request: Request, shown: ShownJob) -> str:
    return _job("jobs/job.html", request, shown)


def job_part(request: Request, shown: ShownJob) -> str:
    """The part of the page that changes."""
    return _job("jobs/job_part.html", request, shown)


def _job(template: str, request: Request, shown: ShownJob) -> str:
    spec = shown.job.spec
    kept = [each.event for each in shown.history if isinstance(each.event, events.CheckpointEvent)]
    steps = [each.step for each in kept if each.kept]
    return rendered(
        template,
        request,
        title=spec.name,
        about=[
            " ".join([spec.script or spec.function, *spec.arguments])[:200],
            f"{plural(spec.workers, 'rank')} on {spec.device}",
            f"started by {shown.job.by} {when(shown.job.created)}",
        ],
        tiles=(),
        about_now=_tiles(shown.job),
        shown=shown,
        charts=[chart(series, checkpoints=steps) for series in shown.series],
        history=[text for each in reversed(shown.history) if (text := _told(each.event))],
        logs="\n".join(f"{each.rank}: {line}" for each in shown.logs for line in each.lines),
        query=request.url.query,
        rank=request.query_params.get("rank", ""),
        searched=request.query_params.get("search", ""),
        namespace=namespace_of(request),
    )


def _tiles(job: TrainJob) -> list[Tile]:
    counts = job.compiles
    first = f"first step after {seconds(job.first_step_seconds)}" if job.first_step_seconds else ""
    return [
        ("state", job.state, f"{plural(job.ranks, 'rank')} running" if job.ranks else ""),
        ("step", f"{job.step:,}", first),
        ("restarts", str(job.restarts), "of its ranks"),
        ("checkpoint", f"step {job.checkpoint_step:,}" if job.checkpoint else "none", job.checkpoint),
        ("graphs", str(counts.hits + counts.misses), f"{counts.misses} missed, {counts.fallbacks} locally"),
    ]


def _told(event: events.TrainEvent) -> str:
    """An event in words; '' for one that says little."""
    match event:
        case events.CheckpointEvent(kept=True):
            size = f", {bytes_of(event.bytes)}" if event.bytes else ""
            return f"checkpoint {event.name} saved in {seconds(event.seconds)}{size}"
        case events.CheckpointEvent():
            return f"checkpoint at step {event.step} failed, training goes on: {event.detail}"
        case events.JobNote():
            where = f"rank {event.rank}: " if event.rank >= 0 else ""
            return f"{event.level}: {where}{event.text}"
        case events.RankStarted():
            return f"{when(event.at)}: rank {event.rank} of {event.world_size} started on {event.host}"
        case events.RankEnded():
            return f"{when(event.at)}: {events.describe_rank_exit(event)}"
        case events.StateChanged():
            return f"{when(event.at)}: {event.state}{event.detail and ': ' + event.detail}"
    return ""
