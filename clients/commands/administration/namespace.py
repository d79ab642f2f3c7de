"""`torchrelay namespace`: teams, what each may use and does; the owner sets quotas, and deletes them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Annotated

import typer

from ....compiler.api.admin import NamespaceReply
from ....compiler.api.html.page import bytes_of
from ....compiler.errors import SettingsError, Unavailable
from ...gateway.admin_client import AdminClient
from .. import output
from ..output import Json, Yes

app = typer.Typer(no_args_is_help=True, help="List, show and delete namespaces, set their quotas.")

Name = Annotated[str, typer.Argument(metavar="NAME")]

_HEADINGS = ("namespace", "compiles", "compile seconds", "period ends", "size", "artifacts")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_WAIT_SECONDS = 2.0
_OPEN_JOBS_HINT = "Cancel them: `torchrelay train ls` and `torchrelay tune ls` list them"
_ALLOWED = "Allowed: a number, 0 for no limit, or default; bytes also with K, M, G or T"


@app.command("ls")
def list_namespaces(json: Json = False) -> None:
    """List the namespaces that the token may see, with their use and quotas."""
    with output.connect(AdminClient) as administration:
        found = administration.namespaces()
    output.print_rows(found, _HEADINGS, [_row(namespace) for namespace in found], json=json)


@app.command()
def show(name: Name, json: Json = False) -> None:
    """Show one namespace."""
    with output.connect(AdminClient) as administration:
        found = administration.namespace(_checked(name))
    output.print_rows(found, _HEADINGS, [_row(found)], json=json)


@app.command("set")
def set_quota(
    name: Name,
    compiles: Annotated[str, typer.Option(help="Graphs that may compile or wait at the same time.")] = "",
    compile_seconds: Annotated[str, typer.Option(help="Seconds of workers' time in a period.")] = "",
    bytes: Annotated[
        str,
        typer.Option(
            help="Bytes of its artifacts, like 20G; beyond that the least recently used are evicted."
        ),
    ] = "",
) -> None:
    """Set a quota; 0 is no limit, `default` what the service's settings say. Creates the namespace if needed."""
    given = {
        "compiles": (compiles, r"([0-9]{1,15})()"),
        "compile_seconds": (compile_seconds, r"([0-9]{1,15}(?:\.[0-9]+)?)()"),
        "bytes": (bytes, r"([0-9]{1,12})([KMGT]?)"),
    }
    quota = {name: _number(name, text, pattern) for name, (text, pattern) in given.items() if text}
    with output.connect(AdminClient) as administration:
        found = administration.set_quota(_checked(name), quota)
    output.print_table(_HEADINGS, [_row(found)])


@app.command("rm")
def remove(name: Name, yes: Yes = False) -> None:
    """Delete a namespace: its tokens, artifacts, jobs' data, winners, counters and audit log."""
    name = _checked(name)
    if not yes:
        typer.confirm(
            f"All of {name} will be deleted, and its tokens will no longer be valid. Continue?", abort=True
        )
    deleted = 0
    with output.connect(AdminClient) as administration:
        while (part := administration.remove_namespace(name)).state != "done":
            if part.state == "jobs":
                raise Unavailable(f"{name} has {part.count} open jobs", hint=_OPEN_JOBS_HINT)
            if part.state == "compiles":
                print(f"waits for {part.count} graphs of {name} to be compiled", flush=True)
                time.sleep(_WAIT_SECONDS)
            elif part.state == "requests":
                print(f"waits {part.count} s for requests to {name} that began before", flush=True)
                time.sleep(part.count)
            else:
                deleted += part.count
                print(f"deleted {deleted} objects of the blob store", flush=True)
    print(f"deleted the namespace {name}")


def _checked(name: str) -> str:
    if not name:
        raise SettingsError("the name is empty", hint="`torchrelay namespace ls` lists namespaces")
    return output.checked_namespace(name)


def _number(name: str, text: str, pattern: str) -> float | None:
    if text == "default":
        return None
    found = re.fullmatch(pattern, text)
    if found is None:
        raise SettingsError(f"--{name.replace('_', '-')} is {text!r}"[:80], hint=_ALLOWED)
    return float(found[1]) if "." in found[1] else int(found[1]) * _UNITS[found[2]]


def _row(reply: NamespaceReply) -> tuple[str, ...]:
    quota = reply.quota
    left = reply.period_ends_seconds
    return (
        reply.name,
        _of(str(reply.compiles), quota.compiles, str),
        _of(f"{reply.compile_seconds:.1f}", quota.compile_seconds, lambda most: f"{most:g}"),
        f"in {left / 3600:.1f} h" if left else "",
        _of(bytes_of(reply.bytes), quota.bytes, bytes_of),
        str(reply.artifacts),
    )


def _of(used: str, most: float | None, shown: Callable[[float], str]) -> str:
    return f"{used} of {shown(most)}" if most else used
