"""/v1/tunings: the team's tuning winners, out as they stand and in from a lock file."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from .....compiler.api.tuning.database import TuningsImported, TuningsReply, TuningsRequest
from ....access.audit import AuditEvent
from ....access.tokens import Grant
from ...http.authentication import requires
from ...http.errors import documented
from ...http.json_body import decode_json
from ...http.json_reply import json_answer, json_reply, json_request
from ...wiring.gateway import GatewayParts, gateway_of

router = APIRouter(tags=["tuning"])

_BODY_BYTES = 4 << 20


@router.get(
    "/v1/tunings",
    summary="Tuning winners, a page at a time, in no order, some of them perhaps twice",
    responses={**documented(), **json_reply("TuningsReply")},
    response_class=Response,
)
async def page(
    gateway: Annotated[GatewayParts, Depends(gateway_of)],
    reader: Annotated[Grant, Depends(requires("read"))],
    cursor: Annotated[
        str, Query(pattern="^([0-9]{1,19})?$", description="`next` of the page before; '' begins")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=500, description="About so many entries")] = 100,
) -> Response:
    tenant = await gateway.tenants.of(reader.namespace)
    found, following = await tenant.tunings.page(int(cursor or 0), limit)
    return json_answer(TuningsReply(found, str(following) if following else ""))


@router.post(
    "/v1/tunings",
    summary="Take in tuning winners; what stands already stays, unless it is to be replaced",
    responses={**documented(413), **json_reply("TuningsImported")},
    response_class=Response,
    openapi_extra=json_request("TuningsRequest"),
)
async def take_in(
    request: Request,
    gateway: Annotated[GatewayParts, Depends(gateway_of)],
    tuner: Annotated[Grant, Depends(requires("tune"))],
) -> Response:
    tenant = await gateway.tenants.of(tuner.namespace)
    asked = decode_json(await gateway.intake.read(request, _BODY_BYTES), TuningsRequest)
    # Logged before: no winner changes without an entry, whatever fails after it.
    detail = f"{len(asked.entries)} entries{', replacing others' if asked.replace else ''}"
    await tenant.audit.append(
        AuditEvent(action="tunings_imported", name=tuner.name, token=tuner.id, detail=detail)
    )
    kept = await tenant.tunings.keep(asked.entries, replace=asked.replace)
    return json_answer(TuningsImported(**Counter(each.outcome for each in kept)))
