"""/v1/tunings: the team's tuning winners, listed, and imported from a lock file."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from fastapi import Query

from .....compiler.api.tuning.database import TuningsImported, TuningsReply, TuningsRequest
from ....access.audit import AuditEvent
from ...http.json_routes import JsonRouter
from ..parameters import ReaderTenant, Tuner, TunerTenant

router = JsonRouter("tuning")


@router.json(
    "GET", "/v1/tunings", "Tuning winners, a page at a time, in no order, some of them perhaps twice"
)
async def page(
    tenant: ReaderTenant,
    cursor: Annotated[
        str, Query(pattern="^([0-9]{1,19})?$", description="`next` of the page before; '' begins")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=500, description="About so many entries")] = 100,
) -> TuningsReply:
    found, following = await tenant.tunings.page(int(cursor or 0), limit)
    return TuningsReply(found, str(following) if following else "")


@router.json(
    "POST",
    "/v1/tunings",
    "Import tuning winners; those that are there stay, unless they are to be replaced",
    body_bytes=4 << 20,
)
async def import_winners(body: TuningsRequest, tuner: Tuner, tenant: TunerTenant) -> TuningsImported:
    # logged before the change: no winner changes without an entry, whatever fails afterwards
    detail = f"{len(body.entries)} entries{', replacing others' if body.replace else ''}"
    await tenant.audit.append(
        AuditEvent(action="tunings_imported", name=tuner.name, token=tuner.id, detail=detail)
    )
    stored = await tenant.tunings.store(body.entries, replace=body.replace)
    return TuningsImported(**Counter[str](each.outcome for each in stored))
