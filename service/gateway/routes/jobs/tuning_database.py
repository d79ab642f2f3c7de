"""/v1/tunings: the team's tuning winners, listed, and imported from a lock file."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from fastapi import Query, Request

from .....compiler.api.tuning.database import TuningsImported, TuningsReply, TuningsRequest
from ....access.audit import AuditEvent
from ...http.json_body import decode_json
from ...http.json_routes import JsonRouter
from ..parameters import Gateway, Reader, Tuner

router = JsonRouter("tuning")

_BODY_BYTES = 4 << 20


@router.json(
    "GET", "/v1/tunings", "Tuning winners, a page at a time, in no order, some of them perhaps twice"
)
async def page(
    gateway: Gateway,
    reader: Reader,
    cursor: Annotated[
        str, Query(pattern="^([0-9]{1,19})?$", description="`next` of the page before; '' begins")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=500, description="About so many entries")] = 100,
) -> TuningsReply:
    tenant = await gateway.tenants.of(reader.namespace)
    found, following = await tenant.tunings.page(int(cursor or 0), limit)
    return TuningsReply(found, str(following) if following else "")


@router.json(
    "POST",
    "/v1/tunings",
    "Take in tuning winners; what stands already stays, unless it is to be replaced",
    body=TuningsRequest,
)
async def take_in(
    request: Request,
    gateway: Gateway,
    tuner: Tuner,
) -> TuningsImported:
    tenant = await gateway.tenants.of(tuner.namespace)
    asked = decode_json(await gateway.admission.read(request, _BODY_BYTES), TuningsRequest)
    # Logged before: no winner changes without an entry, whatever fails after it.
    detail = f"{len(asked.entries)} entries{', replacing others' if asked.replace else ''}"
    await tenant.audit.append(
        AuditEvent(action="tunings_imported", name=tuner.name, token=tuner.id, detail=detail)
    )
    kept = await tenant.tunings.store(asked.entries, replace=asked.replace)
    return TuningsImported(**Counter(each.outcome for each in kept))
