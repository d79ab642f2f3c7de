"""`torchrelay open`: a run, a job, an artifact or why its graph missed, or the overview, in a browser that is signed in
by a link."""

from __future__ import annotations

import re
import webbrowser
from typing import Annotated

import typer

from ...compiler.errors import SettingsError
from ..gateway.compile_client import GatewayClient
from ..settings import load_settings

_ID, _KEY = re.compile("[0-9a-f]{16}"), re.compile("[0-9a-f]{64}")


def open_page(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|KEY|JOB",
            help="The id of a run or a training job, or the key of a graph; default: the overview.",
        ),
    ] = None,
    link: Annotated[
        bool, typer.Option("--link", help="Print the link, which works once, and open nothing.")
    ] = False,
) -> None:
    """Open a page of the gateway in the browser, signed in with this machine's token."""
    page, asked, other = _page(what)
    settings = load_settings()
    if not settings.url:
        raise SettingsError(
            "no gateway is configured", hint="Set TORCHRELAY_URL, or run `torchrelay login URL`"
        )
    with GatewayClient(settings) as gateway:
        page = other if asked and gateway.has(asked) else page
        ticket = gateway.page_ticket()
    address = f"{settings.url}{ticket.path}&then={page}"
    if link or not webbrowser.open(address):
        print(address)
    else:
        print(f"{settings.url}/{page}")


def _page(what: str | None) -> tuple[str, str, str]:
    """The page's path; and another that is meant if there is what an address of the API names. Raises BadParameter."""
    text = (
        (what or "").rstrip("/").rpartition("/")[2].partition("?")[0]
    )  # or the address that a script printed
    if what is None:
        return "overview", "", ""
    if _ID.fullmatch(text):
        return f"runs/{text}", f"/v1/trains/{text}", f"jobs/{text}"
    if _KEY.fullmatch(text):
        return f"misses/{text}", f"/v1/cache/{text}", f"artifacts/{text}"
    raise typer.BadParameter("a run or job has 16 hexadecimal digits, a key 64", param_hint="RUN|KEY|JOB")
