"""Stage 4: authentication checks a request's bearer token and says what its caller may do.

The token's rate limit is counted in the same round trip (access/tokens.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Query, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from ....compiler.api.admin import Role
from ....compiler.api.protocols import CLIENTS, PROTOCOL_HEADER, number_in
from ....compiler.errors import Forbidden, MalformedRequest, Unauthenticated
from ...access.namespaces import NAMED
from ...access.tokens import Grant, Tokens
from ...base.budgets import HELD, Held
from .page_bodies import page_token

_OWNER = "Ask the service's owner, and name no namespace"
_bearer = HTTPBearer(
    auto_error=False, description="A token of `torchrelay up`, one that an admin issued, or one of a sign-in"
)


def address_of(request: Request) -> str:
    """The client's; behind a proxy that the settings name, what that put into X-Forwarded-For. '' on a Unix socket."""
    return request.client.host if request.client else ""


async def authenticated(request: Request, token: str, role: Role) -> Grant:
    """What a bearer token ('': there is none) allows; it allows `role`. Raises Unauthenticated, RateLimited,
    Forbidden; MalformedRequest, ProtocolMismatch."""
    _check_protocol(request)
    if not token:
        raise Unauthenticated("the request carries no bearer token")
    tokens: Tokens = request.app.state.gateway.tokens
    grant = await tokens.check(token, address_of(request))
    held: Held = request.scope[HELD]
    held.owned_by(grant.namespace, grant.id)
    if not grant.allows(role):
        raise Forbidden(f"the token of {grant.name!r} lacks the role {role!r}")
    return grant


def requires(role: Role, *, everywhere: bool = False) -> Callable[..., Awaitable[Grant]]:
    """A FastAPI dependency: the caller's Grant, which allows `role`. everywhere: only a token for all namespaces is
    accepted, and the request names none. Raises ProtocolMismatch, Unauthenticated, RateLimited or Forbidden."""

    async def check(
        request: Request,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)],
        namespace: Annotated[
            str, Query(pattern=NAMED, description="Default: the token's own namespace")
        ] = "",
    ) -> Grant:
        token = credentials.credentials if credentials else page_token(request)
        grant = await authenticated(request, token, role)
        if namespace:
            grant = grant.within(namespace.strip())
        if everywhere and not grant.everywhere:
            raise Forbidden(
                f"the token of {grant.name!r} is for namespace {grant.namespace} alone", hint=_OWNER
            )
        return grant

    return check


def _check_protocol(request: Request) -> None:
    """Whether the client is of a release that this gateway works with. Raises ProtocolMismatch, MalformedRequest."""
    try:
        number = number_in(request.headers.get(PROTOCOL_HEADER))
    except ValueError as error:
        raise MalformedRequest(str(error)) from None
    CLIENTS.check(number, own="this gateway", other="the client")
