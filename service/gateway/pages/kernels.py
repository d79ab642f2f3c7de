"""GET /kernels: winners of kernel searches by PyTorch version, and the tuning jobs."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Query, Request

from ....compiler.api.html.page import plural
from ....compiler.api.tuning.database import Kernels
from ....compiler.tuning import history
from ....compiler.tuning.records import Timing, TuningEntry
from ..http.json_routes import JsonRouter
from ..http.page_bodies import rendered
from ..routes.parameters import Gateway, ReaderTenant
from .views import namespace_of, when

router = JsonRouter("tuning")

_READ = 2000
"""Winners of one page, about 2 MiB."""
_SHOWN = 200
"""Problems of one page."""


def page(request: Request, kernels: Kernels) -> str:
    searched = request.query_params.get("search", "")
    return rendered(
        "kernels.html",
        request,
        title="Kernels",
        about=[plural(kernels.known, "winner") + f" known, the {kernels.read} used last were looked at"],
        tiles=(),
        kernels=kernels,
        shown=kernels.problems[:_SHOWN],
        searched=searched,
        ratio=_ratio,
        change=_change,
        interval=_interval,
        when=when,
        namespace=namespace_of(request),
    )


@router.json("GET", "/kernels", "Winners of kernel searches, and tuning jobs", page=page)
async def kernels(
    gateway: Gateway,
    tenant: ReaderTenant,
    search: Annotated[
        str, Query(max_length=200, description="Only problems, devices or winners that have this text")
    ] = "",
) -> Kernels:
    async with gateway.budgets.work.turn(tenant.namespace):
        entries, known = await tenant.tunings.last_used(_READ)
        problems = await asyncio.to_thread(_problems, entries, search.lower())
    return Kernels(await tenant.tuning_jobs.readable_jobs(), problems, len(entries), known)


def _problems(entries: list[TuningEntry], search: str) -> list[history.TunedProblem]:
    return history.by_version([each for each in entries if not search or search in _text(each)])


def _text(entry: TuningEntry) -> str:
    return f"{entry.problem.text()} {entry.place.device} {entry.winner.candidate}".lower()


def _ratio(other: Timing | None, entry: TuningEntry) -> str:
    """How many times as long the other takes."""
    return f"{other.milliseconds / entry.winner.milliseconds:.2f}" if other else ""


def _interval(timing: Timing) -> str:
    """Half of its 95% interval, as a share of the median."""
    return f"±{(timing.high - timing.low) / 2 / timing.milliseconds:.1%}"


def _change(share: float | None, what: str) -> str:
    """A change that the intervals show, in words."""
    if share is None:
        return ""
    return f"{what} {abs(share):.0%} {'slower' if share > 0 else 'faster'}"
