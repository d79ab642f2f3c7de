"""GET /v1/audit: the audit log, newest first, a page at a time."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from .....compiler.api.admin import AuditReply
from ....access.audit import page
from ....access.tokens import Grant
from ...http.authentication import requires
from ...http.errors import documented
from ...http.json_reply import json_answer, json_reply
from ...wiring.gateway import GatewayParts, gateway_of

router = APIRouter(tags=["audit"])


@router.get(
    "/v1/audit",
    summary="Who did what, newest first",
    responses={**documented(), **json_reply("AuditReply")},
    response_class=Response,
)
async def audit(
    gateway: Annotated[GatewayParts, Depends(gateway_of)],
    grant: Annotated[Grant, Depends(requires("admin"))],
    before: Annotated[
        str, Query(pattern=r"^([0-9]{1,15}-[0-9]{1,15})?$", description="Only older entries than this id")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    told = [tenant.audit for tenant in await gateway.tenants.administered(grant)]
    entries = await page(told, before=before.strip(), limit=limit)
    return json_answer(AuditReply(entries, entries[-1].id if len(entries) >= limit else ""))
