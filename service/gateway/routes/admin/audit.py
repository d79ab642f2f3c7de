"""GET /v1/audit: the audit log, newest first, a page at a time."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from .....compiler.api.admin import AuditReply
from ....access.audit import page
from ...http.json_routes import JsonRouter
from ..parameters import Admin, Gateway

router = JsonRouter("audit")


@router.json("GET", "/v1/audit", "Who did what, newest first")
async def audit(
    gateway: Gateway,
    grant: Admin,
    before: Annotated[
        str, Query(pattern=r"^([0-9]{1,15}-[0-9]{1,15})?$", description="Only older entries than this id")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> AuditReply:
    logs = [tenant.audit for tenant in await gateway.administered(grant)]
    entries = await page(logs, before=before.strip(), limit=limit)
    return AuditReply(entries, entries[-1].id if len(entries) >= limit else "")
