"""POST, GET and DELETE /v1/tokens: an administrator issues, lists and revokes tokens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from .....compiler.api.admin import TokenReply, TokenRequest
from .....compiler.errors import Forbidden, MalformedRequest, NotFound
from ....access.tokens import Grant
from ...http.authentication import requires
from ...http.errors import documented
from ...http.json_body import read_json
from ...http.json_reply import json_answer, json_reply, json_request
from ...wiring.gateway import GatewayParts, gateway_of

router = APIRouter(tags=["tokens"])

Admin = Annotated[Grant, Depends(requires("admin"))]
TokenId = Annotated[str, Path(pattern="^[0-9a-f]{12}$", description="A token's public id, 12 hex digits")]


@router.post(
    "/v1/tokens",
    summary="Issue a token",
    status_code=201,
    responses={**documented(413), **json_reply("TokenReply", status=201)},
    response_class=Response,
    openapi_extra=json_request("TokenRequest"),
)
async def issue(
    request: Request, gateway: Annotated[GatewayParts, Depends(gateway_of)], admin: Admin
) -> Response:
    asked = await read_json(request, TokenRequest)
    if not asked.name.isprintable():  # a pattern's $ lets one newline pass
        raise MalformedRequest("a token's name is one line", hint="See /docs")
    namespace = asked.namespace.strip() or admin.namespace
    if not admin.everywhere and namespace != admin.namespace:
        raise Forbidden(
            f"the token of {admin.name!r} administers {admin.namespace} alone",
            hint="Ask the service's owner, or an administrator of that namespace",
        )
    most = gateway.settings.token_requests_per_second
    if not admin.everywhere and asked.rate is not None and most > 0 and not 0 < asked.rate <= most:
        raise Forbidden(
            f"the token of {admin.name!r} may give rates up to {most:g}", hint="Ask the service's owner"
        )
    if asked.allow_source and not (admin.everywhere or admin.source):
        raise Forbidden(
            f"the token of {admin.name!r} may not send source, so it gives nobody the permission",
            hint="Ask the service's owner",
        )
    issued = await gateway.tokens.issue(
        asked.name,
        asked.roles,
        by=admin,
        namespace=namespace,
        rate=asked.rate,
        lifetime_seconds=asked.expires_seconds,
        allow_source=asked.allow_source,
    )
    return json_answer(TokenReply(issued.secret, issued.record), 201)


@router.get(
    "/v1/tokens",
    summary="The tokens that were issued, without their secrets",
    responses={**documented(), **json_reply("TokenRecord", many=True)},
    response_class=Response,
)
async def tokens(gateway: Annotated[GatewayParts, Depends(gateway_of)], admin: Admin) -> Response:
    return json_answer(await gateway.tokens.records(by=admin))


@router.delete(
    "/v1/tokens/{token_id}",
    summary="Revoke a token, at once",
    responses={**documented(), **json_reply("TokenRecord")},
    response_class=Response,
)
async def revoke(
    token_id: TokenId, gateway: Annotated[GatewayParts, Depends(gateway_of)], admin: Admin
) -> Response:
    record = await gateway.tokens.revoke(token_id, by=admin)
    if record is None:
        raise NotFound(f"there is no token {token_id}", hint="`torchrelay token ls` lists them")
    return json_answer(record)
