"""How a browser signs in: by a form that takes a token, a link of `torchrelay open`, or at an OpenID Connect provider.

A browser's token is in a cookie that scripts cannot read and other sites cannot send with a form; it opens pages alone.
"""

from __future__ import annotations

import hmac
import re
import secrets
from typing import TYPE_CHECKING, Annotated
from urllib.parse import parse_qs

from fastapi import Query, Request, Response

from ....compiler.api import runs
from ....compiler.errors import RelayError, Unauthenticated
from ...access.page_tickets import TICKET_SECONDS
from ...base.http_bodies import read_body
from ..http.authentication import authenticated
from ..http.errors import error_response
from ..http.json_routes import JsonRouter
from ..http.page_bodies import COOKIE, check_own_form, sign_in_page
from ..parts import GatewayParts
from ..routes.parameters import Gateway, Reader

if TYPE_CHECKING:
    from ...access.oidc.code_flow import CodeFlow

router = JsonRouter("runs")

_FORM_BYTES = 16 << 10
_FORM_SECONDS = 10.0
_PAGE = re.compile(
    r"(overview|now|runs|misses|artifacts|kernels|jobs|administration)(/[0-9a-f]{1,64}(/code|/graph)?)?(\?[A-Za-z0-9=&._-]{0,200})?"
)
_BEGUN = "torchrelay_sign_in"
"""The cookie of a browser that is at a provider: which one, the secret, and the page that follows."""
_BEGUN_VALUE = re.compile(r"(\d{1,2})\.([A-Za-z0-9_-]{20,100})\.(.{0,400})")
_BEGUN_SECONDS = 600
_COOKIE_BYTES = 4000
"""A browser keeps no larger one."""


@router.json("POST", "/v1/page-tickets", "A link that signs a browser in, once", status=201)
async def page_ticket(request: Request, gateway: Gateway, grant: Reader) -> runs.PageTicket:
    ticket = await gateway.page_tickets.issue(request.headers["authorization"].partition(" ")[2])
    return runs.PageTicket(f"/sign-in?ticket={ticket}", TICKET_SECONDS)


@router.get("/sign-in", include_in_schema=False)
async def sign_in_form(
    request: Request, gateway: Gateway, ticket: str = "", then: str = "overview"
) -> Response:
    """The form; or, with a ticket, what the form would do."""
    if not ticket:
        return sign_in_page(request, _page(then))
    token = await gateway.page_tickets.redeem(ticket)
    if not token:
        error = Unauthenticated(f"the link was used, or is older than {TICKET_SECONDS} s")
        return sign_in_page(request, _page(then), error, 401)
    return await _signed_in(request, gateway, token, then)


@router.post("/sign-in", include_in_schema=False)
async def sign_in(request: Request, gateway: Gateway) -> Response:
    """Checks the form's token, and gives it to the browser in a cookie."""
    check_own_form(request)
    body = await read_body(request, _FORM_BYTES, seconds=_FORM_SECONDS)
    form = {name: values[0] for name, values in parse_qs(body.decode("ascii", "replace")).items()}
    return await _signed_in(request, gateway, form.get("token", "").strip(), form.get("then", ""))


@router.get("/sign-in/provider/{number}", include_in_schema=False)
async def sign_in_at_provider(
    request: Request, gateway: Gateway, number: int, then: str = "overview"
) -> Response:
    """To the pages of a provider, which sends the browser back to /sign-in/callback."""
    secret = secrets.token_urlsafe(48)
    try:
        address = await _flow(gateway, number).address(secret, _callback(request, gateway))
    except RelayError as error:
        return _failed(request, then, error)
    response = _led_to(address)
    _set_cookie(request, response, _BEGUN, f"{number}.{secret}.{_page(then)}", _BEGUN_SECONDS)
    return response


@router.get("/sign-in/callback", include_in_schema=False)
async def signed_in_at_provider(
    request: Request,
    gateway: Gateway,
    state: Annotated[str, Query(max_length=200)] = "",
    code: Annotated[str, Query(max_length=4096)] = "",
    error: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """The provider has sent the browser back, with a code for a token."""
    begun = _BEGUN_VALUE.fullmatch(request.cookies.get(_BEGUN, ""))
    number, secret, then = begun.groups() if begun else ("", "", "")
    try:
        flow = _flow(gateway, int(number or 99))
        if not hmac.compare_digest(state.encode(), flow.state_of(secret).encode()):
            raise Unauthenticated("the answer is not that of this sign-in")
        if error or not code:
            raise Unauthenticated(f"the provider says {error or 'nothing'}")
        token = await flow.token(code, secret, _callback(request, gateway))
        response = await _signed_in(request, gateway, token, then)
    except RelayError as failure:
        response = _failed(request, then, failure)
    response.delete_cookie(_BEGUN, httponly=True, samesite="lax")
    return response


def _failed(request: Request, then: str, error: RelayError) -> Response:
    return sign_in_page(request, _page(then), error, 401 if isinstance(error, Unauthenticated) else 503)


def _flow(gateway: GatewayParts, number: int) -> CodeFlow:
    """Raises Unauthenticated."""
    flows = gateway.tokens.code_flows
    if not 0 <= number < len(flows):
        raise Unauthenticated("this sign-in was not begun here, or too long ago")
    return flows[number]


def _callback(request: Request, gateway: GatewayParts) -> str:
    """The address that the provider knows."""
    return f"{gateway.settings.public_url.rstrip('/') or str(request.base_url).rstrip('/')}/sign-in/callback"


def _page(path: str) -> str:
    return path if _PAGE.fullmatch(path) else "overview"


async def _signed_in(request: Request, gateway: GatewayParts, token: str, then: str) -> Response:
    """To the page `then`, with the token in a cookie; or the form again, which says why not."""
    then = _page(then)
    try:
        if len(token) > _COOKIE_BYTES:
            raise Unauthenticated(f"the token has more than {_COOKIE_BYTES} bytes, which no cookie holds")
        if not token.isascii() or not token.isprintable() or {" ", ";"} & set(token):
            raise Unauthenticated("the token is not known")
        await authenticated(request, token, "read")
    except Unauthenticated as error:
        return sign_in_page(request, then, error, 401)
    except RelayError as error:
        return error_response(request, error, gateway.settings.retry_after_seconds)
    response = _led_to("../" * (request.url.path.count("/") - 1) + then)
    _set_cookie(request, response, COOKIE, token, 30 * 86400)
    return response


def _led_to(address: str) -> Response:
    return Response(status_code=303, headers={"Location": address, "Cache-Control": "no-store"})


def _set_cookie(request: Request, response: Response, name: str, value: str, seconds: int) -> None:
    secure = request.url.scheme == "https"
    response.set_cookie(name, value, seconds, secure=secure, httponly=True, samesite="lax")


@router.post("/sign-out", include_in_schema=False)
async def sign_out(request: Request) -> Response:
    check_own_form(request)
    response = Response(status_code=303, headers={"Location": "sign-in"})
    response.delete_cookie(COOKIE, httponly=True, samesite="lax")
    return response
