"""GET /administration: tokens, namespaces, signing keys and the audit log; the form that revokes a token."""

from __future__ import annotations

import re
import time
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Query, Request, Response

from ....compiler.api.admin import Administration, AuditEntry
from ....compiler.api.html.page import Tile, plural
from ....compiler.errors import MalformedRequest
from ...access.audit import page as audit_page
from ...access.tokens import Grant
from ...base.http_bodies import read_body
from ..http.json_routes import JsonRouter
from ..http.page_bodies import for_browsers, rendered
from ..parts import GatewayParts
from ..routes.admin import keys, tokens
from ..routes.parameters import Admin, Gateway
from .views import namespace_of, when

router = JsonRouter("administration")

_ENTRIES = 100
"""Entries of the audit log on a page."""
_READ = 5000
"""Entries that a search reads for one page."""
_FORM_BYTES = 1 << 10
_FORM_SECONDS = 10.0
_LISTED = 50


def administration_page(request: Request, state: Administration) -> str:
    return rendered(
        "administration.html",
        request,
        title="Administration",
        about=[],
        tiles=_tiles(state),
        state=state,
        over={each.id: end for each in state.tokens if (end := each.over(time.time())) is not None},
        searched=request.query_params.get("search", ""),
        listed=_LISTED,
        when=when,
        namespace=namespace_of(request),
    )


@router.json(
    "GET",
    "/administration",
    "Tokens, namespaces, keys (for the owner) and the audit log, newest first",
    page=administration_page,
)
async def administration(
    gateway: Gateway,
    admin: Admin,
    search: Annotated[
        str, Query(max_length=200, description="Only entries of the audit log that have this text")
    ] = "",
    before: Annotated[
        str, Query(pattern=r"^([0-9]{1,15}-[0-9]{1,15})?$", description="`next` of the page before")
    ] = "",
) -> Administration:
    tenants = await gateway.administered(admin)
    entries, following = await _entries(gateway, admin, search, before.strip())
    return Administration(
        tokens=await gateway.tokens.records(by=admin),
        namespaces=[await gateway.quotas.read(tenant.namespace) for tenant in tenants],
        keys=await keys.keys(gateway, admin) if admin.everywhere else None,
        entries=entries,
        next=following,
    )


@router.post("/administration", include_in_schema=False)
@for_browsers
async def act(request: Request, gateway: Gateway, admin: Admin) -> Response:
    """Revoke the token that the form names."""
    body = await read_body(request, _FORM_BYTES, seconds=_FORM_SECONDS)
    token = parse_qs(body.decode("ascii", "replace")).get("revoke", [""])[0]
    if not re.fullmatch("[0-9a-f]{12}", token):
        raise MalformedRequest("the form names no token", hint="revoke: a token's public id, 12 hex digits")
    await tokens.revoke(token, gateway, admin)
    query = f"?{request.url.query}" if request.url.query else ""
    return Response(
        status_code=303, headers={"Location": f"administration{query}", "Cache-Control": "no-store"}
    )


async def _entries(
    gateway: GatewayParts, admin: Grant, search: str, before: str
) -> tuple[list[AuditEntry], str]:
    """About _ENTRIES that have the text, and where the next begin, '' after the last."""
    logs = [tenant.audit for tenant in await gateway.administered(admin)]
    chosen: list[AuditEntry] = []
    read = 0
    while read < _READ:
        entries = await audit_page(logs, before=before, limit=_ENTRIES)
        chosen += [each for each in entries if search.lower() in _text(each)]
        if len(entries) < _ENTRIES:
            return chosen, ""
        before, read = entries[-1].id, read + len(entries)
        if len(chosen) >= _ENTRIES:
            break
    return chosen, before


def _text(entry: AuditEntry) -> str:
    parts = (entry.action, entry.name, entry.token, entry.namespace, entry.key, entry.worker, entry.detail)
    return " ".join(parts).lower()


def _tiles(state: Administration) -> list[Tile]:
    valid = sum(each.over(time.time()) is None for each in state.tokens)
    tiles = [
        ("tokens", str(valid), f"valid, of {len(state.tokens)}"),
        ("namespaces", str(len(state.namespaces)), ""),
    ]
    if state.keys is not None:
        tiles.append(("keys", str(len(state.keys.keys)), plural(len(state.keys.revoked), "revoked key")))
    return tiles
