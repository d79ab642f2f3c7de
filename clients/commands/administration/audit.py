"""`torchrelay audit`: who did what on the service, newest first (for administrators)."""

from __future__ import annotations

from typing import Annotated

import typer

from ....compiler.api.admin import AuditEntry
from ...gateway.admin_client import AdminClient
from .. import output
from ..output import Json


def audit(
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many entries.")] = 50,
    namespace: output.Namespace = "",
    json: Json = False,
) -> None:
    """Show who compiled, published, pinned and deleted what, and which tokens were issued and revoked."""
    with output.connect(AdminClient, namespace) as administration:
        found = administration.audit(limit)
    output.print_rows(
        found, ("when (UTC)", "namespace", "who", "did", "what"), [_row(entry) for entry in found], json=json
    )


def _row(entry: AuditEntry) -> tuple[str, ...]:
    who = f"{entry.name} ({entry.token})" if entry.token else entry.name
    parts = (
        entry.key[:12],
        f"worker {entry.worker}" if entry.worker else "",
        f"signed by {entry.signer}" if entry.signer else "",
        entry.detail,
    )
    return (
        output.moment(entry.at),
        entry.namespace,
        who,
        entry.action,
        ", ".join(part for part in parts if part),
    )
