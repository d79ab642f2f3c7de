"""HTML bodies: who wants one, and what a browser may load and run of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import Request, Response

from ....compiler.api.html.page import FOLDER, render
from ....compiler.errors import Forbidden, RelayError, Unauthenticated

COOKIE = "torchrelay_token"
Route = TypeVar("Route", bound=Callable[..., Any])
TEMPLATES = Path(__file__).parents[1] / "pages" / "templates"
_POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self' data:; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


def for_browsers(route: Route) -> Route:
    """Decorate a route that the token of a browser's cookie opens: it only reads, or takes a form of its own page."""
    route.for_browsers = True  # type: ignore[attr-defined]
    return route


def is_page(request: Request) -> bool:
    return hasattr(getattr(request.scope.get("route"), "endpoint", None), "for_browsers")


def page_token(request: Request) -> str:
    """The token that a browser was given at its sign-in. It opens pages, and nothing else."""
    if not is_page(request):
        return ""
    if request.method not in ("GET", "HEAD"):
        check_own_form(request)
    return request.cookies.get(COOKIE, "")


def check_own_form(request: Request) -> None:
    """Raises Forbidden for a form of another site, or of another port of this host."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is None and origin is not None:  # over plain http browsers say no more
        hosts = [request.headers.get(name) for name in ("host", "x-forwarded-host")]
        site = "same-origin" if (urlsplit(origin).netloc or origin) in hosts else origin
    if site not in (None, "none", "same-origin"):
        raise Forbidden(
            "the form came from another site",
            hint="Open the page again. A proxy in front of the gateway has to keep Host, or set X-Forwarded-Host",
        )


def wants_page(request: Request) -> bool:
    """Whether the client prefers HTML, as browsers do, to JSON."""
    accepted = [kind.partition(";")[0].strip() for kind in request.headers.get("accept", "").split(",")]
    return "text/html" in accepted and "application/json" not in accepted[: accepted.index("text/html")]


def page_response(
    text: str, status: int = 200, headers: Mapping[str, str] = {}, *, live: bool = False
) -> Response:
    """The page, which loads nothing but the gateway's own stylesheet; live: its scripts too, and what they fetch."""
    policy = {"Content-Security-Policy": f"{_POLICY}; script-src 'self'; connect-src 'self'"} if live else {}
    return Response(text, status, {**_PAGE_HEADERS, **policy, **headers}, "text/html; charset=utf-8")


def rendered(template: str, request: Request, **values: object) -> str:
    """A page of TEMPLATES. Its links are relative, so that a proxy may put the gateway below a path."""
    up = "../" * (request.url.path.count("/") - 1)
    files = zip(("stylesheet", "script", "graph_script"), STATIC, strict=True)
    return render(TEMPLATES, template, up=up, **{name: f"{up}{file}" for name, file in files}, **values)


def error_page(request: Request, error: RelayError, status: int) -> Response:
    """What a browser shows of a failure: for want of a token, the form that takes one."""
    if isinstance(error, Unauthenticated):
        query = f"?{request.url.query}" if request.url.query else ""
        return sign_in_page(request, f"{request.url.path.lstrip('/')}{query}", error, status)
    text = rendered("error.html", request, title=error.message, tiles=(), error=error)
    return page_response(text, status, {"Cache-Control": "no-store"})


def sign_in_page(request: Request, then: str, error: RelayError | None = None, status: int = 200) -> Response:
    """then: which page follows. error: why the token that came is not taken."""
    told = error if request.cookies.get(COOKIE) or not is_page(request) else None
    providers = [each.name for each in request.app.state.gateway.tokens.code_flows]
    text = rendered(
        "sign_in.html", request, title="Sign in", tiles=(), then=then, error=told, providers=providers
    )
    return page_response(text, status, {"Cache-Control": "no-store"})


def _address(suffix: str, *files: Path) -> tuple[str, bytes]:
    """A path that changes with what is there, and the files as one."""
    data = b"\n".join(file.read_bytes() for file in files)
    return f"static/{hashlib.sha256(data).hexdigest()[:16]}{suffix}", data


_VENDOR = TEMPLATES.with_name("vendor")
_FILES = [
    _address(".css", FOLDER / "report.css"),
    # One file: htmx, once it has run, may begin before another that brings its extension.
    _address(".js", _VENDOR / "htmx.min.js", _VENDOR / "hx-sse.min.js"),
    _address(".js", _VENDOR / "dagre.min.js", TEMPLATES / "artifacts" / "graph.js"),
]
STATIC = dict(_FILES)
