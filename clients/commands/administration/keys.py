"""`torchrelay keys`: the service's owner lists, rotates and revokes signing keys, and disowns what they signed."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer

from ....compiler.api.admin import KeysReply
from ....compiler.artifact.trust_document import ListedKey
from ....compiler.errors import SettingsError
from ...gateway.admin_client import AdminClient
from .. import output
from ..output import Json, Yes

app = typer.Typer(
    no_args_is_help=True, help="List, rotate and revoke signing keys (for the service's owner)."
)


@app.command("ls")
def list_keys(json: Json = False) -> None:
    """List the signing keys, the oldest first."""
    with output.connect(AdminClient) as administration:
        found = administration.keys()
    if json:
        output.print_json(found)
        return
    rows = [_row(key, found) for key in found.keys]
    others = set(found.revoked) - {key.id for key in found.keys}
    rows += [(name, "", "", "revoked") for name in sorted(others)]
    output.print_table(("id", "created (UTC)", "counts until (UTC)", "state"), rows)
    print(f"epoch {found.epoch}")


@app.command()
def rotate(
    overlap: Annotated[
        str,
        typer.Option(help="How long the previous key's signatures still count: 12h, 90d, or never (no end)."),
    ] = "90d",
) -> None:
    """Sign with a new key from now on."""
    seconds = output.lifetime("--overlap", overlap)
    with output.connect(AdminClient) as administration:
        found = administration.rotate_key(seconds)
    print(f"key {found.current} signs now")


@app.command()
def revoke(key_id: Annotated[str, typer.Argument(metavar="ID", help="From `torchrelay keys ls`.")]) -> None:
    """Revoke a key: its signatures do not count from now on; its artifacts are compiled again on request."""
    if not re.fullmatch("[0-9a-f]{16}", key_id):
        raise SettingsError("this is not a key's id", hint="`torchrelay keys ls` lists ids: 16 hex digits")
    with output.connect(AdminClient) as administration:
        found = administration.revoke_key(key_id)
    print(f"revoked {key_id}; key {found.current} signs now")


@app.command()
def disown(yes: Yes = False) -> None:
    """Disown everything that was signed until now; it is compiled again on request."""
    if not yes:
        typer.confirm("Every artifact of every namespace will be compiled again. Continue?", abort=True)
    with output.connect(AdminClient) as administration:
        found = administration.disown()
    print(f"epoch {found.epoch} begins; earlier signatures do not count any more")


def _row(key: ListedKey, reply: KeysReply) -> tuple[str, ...]:
    if key.id in reply.revoked:
        state = "revoked"
    elif key.id == reply.current:
        state = "signs"
    else:
        state = "over" if key.until is not None and key.until <= time.time() else "counts"
    until = "" if key.until is None else output.moment(key.until)
    return key.id, output.moment(key.created), until, state
