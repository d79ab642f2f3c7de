"""`torchrelay cache local`: the artifacts and programs that this machine keeps for this user."""

from __future__ import annotations

from typing import Annotated

import typer

from ....compiler.api.html.page import bytes_of
from ....compiler.errors import SettingsError, Unavailable
from ...artifacts.disk_cache import DiskCache
from ...settings import load_settings
from .. import output
from ..output import Json

app = typer.Typer(no_args_is_help=True, help="List and remove what this machine keeps; needs no service.")


@app.command("ls")
def list_files(json: Json = False) -> None:
    """List artifacts and programs, the last used first, and how much of the limit they take."""
    settings = load_settings()
    files = DiskCache(settings.cache_dir, settings.disk_cache_bytes).files()
    if json:
        output.print_json(
            [
                {
                    "name": file.path.name,
                    "kind": "program" if file.is_program else "artifact",
                    "bytes": file.bytes,
                    "used": file.used,
                }
                for file in files
            ]
        )
        return
    output.print_table(
        ("artifact", "size", "last used (UTC)"),
        [
            (file.path.name[:16], bytes_of(file.bytes), output.moment(file.used))
            for file in files
            if not file.is_program
        ],
    )
    programs = [file for file in files if file.is_program]
    print(
        f"{len(files) - len(programs)} artifacts and {len(programs)} files of programs: "
        f"{bytes_of(sum(file.bytes for file in files))} of {bytes_of(settings.disk_cache_bytes)} in "
        f"{settings.cache_dir}"
    )


@app.command("rm")
def remove(
    key: Annotated[str, typer.Argument(metavar="[KEY]", help="An artifact's key, or its first digits.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="All artifacts and programs.")] = False,
) -> None:
    """Remove an artifact, or everything; the next run fetches what it needs, and traces once more."""
    if bool(key) == everything:
        raise SettingsError("say what to remove", hint="`torchrelay cache local rm KEY`, or --all")
    settings = load_settings()
    cache = DiskCache(settings.cache_dir, settings.disk_cache_bytes)
    before = cache.files()
    if key:
        found = [f.path.name for f in before if not f.is_program and f.path.name.startswith(key)]
        if len(found) != 1:
            raise SettingsError(
                f"{len(found)} artifacts here have keys that begin with {output.shown(key)[:80]}",
                hint="`torchrelay cache local ls` lists them",
            )
        cache.remove(found[0])
    else:
        try:
            cache.clear()
        except OSError as error:
            raise Unavailable(f"the cache cannot be removed: {error}") from None
    freed = sum(file.bytes for file in before) - sum(file.bytes for file in cache.files())
    if before and not freed:
        raise Unavailable(f"nothing could be removed from {settings.cache_dir}")
    print(f"removed {bytes_of(freed)}")
