"""`torchrelay token`: an administrator issues, lists and revokes tokens."""

from __future__ import annotations

import re
import sys
import time
from typing import Annotated, cast

import typer

from ....compiler.api.admin import ROLES, Role, TokenRecord, TokenRequest
from ....compiler.errors import SettingsError
from ...gateway.admin_client import AdminClient
from .. import output
from ..output import Json

app = typer.Typer(no_args_is_help=True, help="Issue, list and revoke tokens (for administrators).")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Who or what it is for; shown in lists and the audit log.")],
    role: Annotated[
        list[str] | None,
        typer.Option(
            "--role", help="read, compile, tune, train or admin; repeat for more. Default: compile."
        ),
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="The team that it is for; default: your own token's. `*`: all of them.")
    ] = "",
    rate: Annotated[
        float | None,
        typer.Option(min=0, help="Requests a second; 0: no limit. Default: the service's setting."),
    ] = None,
    allow_source: Annotated[
        bool,
        typer.Option(
            "--allow-source",
            help="It may send source that runs at compile time: user-written Triton kernels. See docs/security.md.",
        ),
    ] = False,
    allow_programs: Annotated[
        bool,
        typer.Option(
            "--allow-programs",
            help="It may give programs, which are bytecode, to the clients of its namespace that accept them. See "
            "docs/programs.md.",
        ),
    ] = False,
    expires: Annotated[str, typer.Option(help="Its lifetime: 45m, 12h, 30d, or never.")] = "90d",
    json: Json = False,
) -> None:
    """Issue a token. It is printed to standard output, only once."""
    lifetime = output.lifetime("--expires", expires)
    if unknown := set(role or ()) - set(ROLES):
        raise SettingsError(f"--role is {min(unknown)[:40]!r}", hint=f"Allowed: {', '.join(ROLES)}")
    with output.connect(AdminClient) as administration:
        made = administration.create_token(
            TokenRequest(
                name,
                cast("frozenset[Role]", frozenset(role or ["compile"])),
                lifetime,
                namespace=output.checked_namespace(namespace, every=True),
                rate=rate,
                allow_source=allow_source,
                allow_programs=allow_programs,
            )
        )
    if json:
        output.print_json(made)
        return
    record = made.record
    until = "never expires" if record.expires is None else f"expires {output.moment(record.expires)} UTC"
    roles = ", ".join(record.permissions)
    print(
        f"token {record.id} for {record.name} in namespace {record.namespace}: {roles}; {until}",
        file=sys.stderr,
    )
    print("It is shown only now. Its holder runs `torchrelay login URL` and pastes it.", file=sys.stderr)
    print(made.token)


@app.command("ls")
def list_tokens(
    json: Json = False,
) -> None:
    """List tokens by their public ids."""
    with output.connect(AdminClient) as administration:
        found = administration.tokens()
    headings = ("id", "name", "namespace", "roles", "created", "expires", "state")
    output.print_rows(found, headings, [_row(record) for record in found], json=json)


@app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="From `torchrelay token ls`.")],
) -> None:
    """Revoke a token; it is refused from now on."""
    if not re.fullmatch("[0-9a-f]{12}", token_id):
        raise SettingsError("this is not a token's id", hint="`torchrelay token ls` lists ids: 12 hex digits")
    with output.connect(AdminClient) as administration:
        record = administration.revoke_token(token_id)
    print(f"revoked {record.id}, {record.name}")


def _row(record: TokenRecord) -> tuple[str, ...]:
    now = time.time()
    if record.revoked is not None:
        state = "revoked"
    else:
        state = "expired" if record.expires is not None and record.expires <= now else "active"
    until = "never" if record.expires is None else output.moment(record.expires)
    roles = ", ".join(record.permissions)
    return record.id, record.name, record.namespace, roles, output.moment(record.created), until, state
