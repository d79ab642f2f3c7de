"""POST, GET and DELETE /v1/tokens: an administrator issues, lists and revokes tokens."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from .....compiler.api.admin import TokenRecord, TokenReply, TokenRequest
from .....compiler.errors import Forbidden, MalformedRequest, NotFound
from ...http.json_routes import JsonRouter
from ..parameters import Admin, Gateway

router = JsonRouter("tokens")

TokenId = Annotated[str, Path(pattern="^[0-9a-f]{12}$", description="A token's public id, 12 hex digits")]


@router.json("POST", "/v1/tokens", "Issue a token", status=201, status_code=201)
async def issue(body: TokenRequest, gateway: Gateway, admin: Admin) -> TokenReply:
    if not body.name.isprintable():  # a pattern's $ lets one newline pass
        raise MalformedRequest("a token's name is one line", hint="See /docs")
    namespace = body.namespace.strip() or admin.namespace
    if not admin.everywhere and namespace != admin.namespace:
        raise Forbidden(
            f"the token of {admin.name!r} administers {admin.namespace} alone",
            hint="Ask the service's owner, or an administrator of that namespace",
        )
    most = gateway.settings.token_requests_per_second
    if not admin.everywhere and body.rate is not None and most > 0 and not 0 < body.rate <= most:
        raise Forbidden(
            f"the token of {admin.name!r} may give rates up to {most:g}", hint="Ask the service's owner"
        )
    for asked, may, does, gives in (
        ("train" in body.roles, admin.allows("train"), "start training jobs", "role"),
        (body.allow_source, admin.source, "send source", "permission"),
        (body.allow_programs, admin.programs, "give programs to others", "permission"),
    ):
        if asked and not (admin.everywhere or may):
            raise Forbidden(
                f"the token of {admin.name!r} may not {does}, so it cannot give that {gives}",
                hint="Ask the service's owner",
            )
    issued = await gateway.tokens.issue(
        body.name,
        body.roles,
        by=admin,
        namespace=namespace,
        rate=body.rate,
        lifetime_seconds=body.expires_seconds,
        allow_source=body.allow_source,
        allow_programs=body.allow_programs,
    )
    return TokenReply(issued.secret, issued.record)


@router.json("GET", "/v1/tokens", "The tokens that were issued, without their secrets")
async def tokens(gateway: Gateway, admin: Admin) -> list[TokenRecord]:
    return await gateway.tokens.records(by=admin)


@router.json("DELETE", "/v1/tokens/{token_id}", "Revoke a token, at once")
async def revoke(token_id: TokenId, gateway: Gateway, admin: Admin) -> TokenRecord:
    record = await gateway.tokens.revoke(token_id, by=admin)
    if record is None:
        raise NotFound(f"there is no token {token_id}", hint="`torchrelay token ls` lists them")
    return record
