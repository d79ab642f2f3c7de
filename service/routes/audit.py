"""GET /v1/audit: the audit log, newest first, a page at a time."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from ...compiler.records import AuditReply
from ..audit import page
from ..auth import Grant, requires
from ..gateway import Gateway, gateway_of
from ..problems import documented
from .answers import json_answer, json_reply

router = APIRouter(tags=["audit"])


@router.get(
    "/v1/audit",
    summary="Who did what, newest first",
    responses={**documented(), **json_reply("AuditReply")},
    response_class=Response,
)
async def audit(
    gateway: Annotated[Gateway, Depends(gateway_of)],
    grant: Annotated[Grant, Depends(requires("admin"))],
    before: Annotated[
        str, Query(pattern=r"^([0-9]{1,15}-[0-9]{1,15})?$", description="Only older entries than this id")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    told = [tenant.audit for tenant in await gateway.tenants.administered(grant)]
    entries = await page(told, before=before.strip(), limit=limit)
    return json_answer(AuditReply(entries, entries[-1].id if len(entries) >= limit else ""))
