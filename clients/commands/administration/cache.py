"""`torchrelay cache`: lists and shows artifacts of the cache; administrators pin, remove and collect them."""

from __future__ import annotations

import io
import re
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from ....compiler.api.admin import REINDEX_PARTS, CacheEntry
from ....compiler.api.html.page import bytes_of
from ....compiler.errors import ArtifactError, RequestError, SettingsError
from ...gateway.admin_client import AdminClient
from .. import output
from ..output import Json, Namespace
from . import local_cache

app = typer.Typer(no_args_is_help=True, help="List, show, pin and remove artifacts of the service's cache.")

app.add_typer(local_cache.app, name="local")

Key = Annotated[str, typer.Argument(metavar="KEY", help="A cache key, or its first digits.")]

_SUFFIX = ".artifact"
_LARGEST_ARTIFACT = 1 << 30
"""Bytes; a service accepts no larger artifact."""
_HEADINGS = ("key", "size", "place", "compile", "last used (UTC)", "pinned")


@app.command("ls")
def list_entries(namespace: Namespace = "", json: Json = False) -> None:
    """List all artifacts, the last used first."""
    with output.connect(AdminClient, namespace) as administration:
        found = administration.cache_entries()
    if json:
        output.print_json(found)
        return
    output.print_table(_HEADINGS, [_row(entry) for entry in found])
    print(f"{len(found)} artifacts, {bytes_of(sum(entry.bytes for entry in found))}")


@app.command()
def show(key: Key, namespace: Namespace = "", json: Json = False) -> None:
    """Show one artifact: what is inside, who built and signed it, what its key covers."""
    with output.connect(AdminClient, namespace) as administration:
        found = administration.cached(_full_key(administration, key))
    if json:
        output.print_json(found)
        return
    manifest = found.manifest
    stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in manifest.stages)
    target = manifest.target.name or manifest.target.kind
    rows = [
        ("key", found.entry.key),
        ("digest", found.entry.digest),
        ("size", f"{bytes_of(found.entry.bytes)} in {found.entry.place}"),
        ("built", f"{manifest.created} by {manifest.worker}"),
        ("signed by", found.signer),
        ("for", f"{manifest.toolchain.python} torch {manifest.toolchain.torch} on {target}"),
        ("stages", stages),
        ("kernels", f"{manifest.kernels}, {manifest.kernels_reused} of them reused"),
        ("verified", manifest.verification.reason or manifest.verification.status),
        ("last used", f"{output.moment(found.entry.used)} UTC"),
        ("pinned", "yes" if found.entry.pinned else "no"),
        *((f"member {part.name}", bytes_of(part.size)) for part in manifest.members),
        *(
            (f"key: {name}", text if len(text) <= 80 else f"{text[:77]}...")
            for name, text in sorted(found.components.items())
        ),
    ]
    output.print_table(("", ""), rows)


@app.command()
def pin(key: Key, namespace: Namespace = "") -> None:
    """Never evict this artifact."""
    with output.connect(AdminClient, namespace) as administration:
        entry = administration.pin(_full_key(administration, key), pinned=True)
    print(f"pinned {entry.key}")


@app.command()
def unpin(key: Key, namespace: Namespace = "") -> None:
    """Let this artifact be evicted again."""
    with output.connect(AdminClient, namespace) as administration:
        entry = administration.pin(_full_key(administration, key), pinned=False)
    print(f"unpinned {entry.key}")


@app.command("rm")
def remove(key: Key, namespace: Namespace = "") -> None:
    """Remove this artifact, pinned or not; the next request compiles it again."""
    with output.connect(AdminClient, namespace) as administration:
        entry = administration.remove(_full_key(administration, key))
    print(f"removed {entry.key}")


@app.command("gc")
def collect(namespace: Namespace = "") -> None:
    """Evict artifacts beyond the limit, and delete remains of crashes."""
    with output.connect(AdminClient, namespace) as administration:
        done = administration.collect()
    print(f"{done.evicted} artifacts evicted, {done.swept} stray blobs deleted")


@app.command()
def reindex() -> None:
    """Offer the artifacts of the blob store again, after Redis was lost or restored, or the store replaced."""
    with output.connect(AdminClient) as administration:
        indexed = sum(administration.reindex(part).indexed for part in range(REINDEX_PARTS))
    print(f"{indexed} artifacts of the blob store are offered again")


@app.command("export")
def export_entries(
    file: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")],
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", help="Which artifacts; all if none is named.")
    ] = None,
    namespace: Namespace = "",
) -> None:
    """Write signed artifacts into one file that another site can import."""
    with output.connect(AdminClient, namespace) as administration:
        chosen = [_full_key(administration, key) for key in keys or []]
        chosen = chosen or [entry.key for entry in administration.cache_entries()]
        count = write_archive(file, ((key, administration.export(key)) for key in chosen))
    print(f"exported {count} artifacts to {file}")


@app.command("import")
def import_entries(
    file: Annotated[Path, typer.Argument(help="What `cache export` wrote.")], namespace: Namespace = ""
) -> None:
    """Send every artifact of a file to the service, which takes those that a key it trusts has signed."""
    outcomes: Counter[str] = Counter()
    with output.connect(AdminClient, namespace) as administration:
        for name, data in read_archive(file):
            try:
                outcomes[administration.import_artifact(data).outcome] += 1
            except RequestError as error:
                outcomes["refused"] += 1
                print(f"{name}: {error}", file=sys.stderr)
    there, refused = outcomes["exists"], outcomes["refused"]
    print(f"imported {outcomes['imported']} artifacts; {there} were there already, {refused} refused")
    if refused:
        raise typer.Exit(1)


def _full_key(administration: AdminClient, text: str) -> str:
    """The key that begins with `text`. Raises SettingsError when none or several do."""
    if not re.fullmatch("[0-9a-f]{4,64}", text):
        raise SettingsError(
            "this is not a cache key", hint="A key has 64 hex digits; the first few are enough"
        )
    if len(text) == 64:
        return text
    found = [entry.key for entry in administration.cache_entries() if entry.key.startswith(text)]
    if len(found) != 1:
        raise SettingsError(
            f"{len(found)} artifacts have keys that begin with {text}",
            hint="`torchrelay cache ls` lists them",
        )
    return found[0]


def _row(entry: CacheEntry) -> tuple[str, ...]:
    pinned = "pinned" if entry.pinned else ""
    used = output.moment(entry.used)
    return entry.key[:16], bytes_of(entry.bytes), entry.place, f"{entry.seconds:.1f} s", used, pinned


# --- archives: tar files with members `KEY.artifact` --------------------------------------------------------
# Nothing in them is trusted: the service verifies each artifact's signature on import.


def write_archive(path: Path, artifacts: Iterable[tuple[str, bytes]]) -> int:
    """Write all of `artifacts`, or no file at all; returns how many. Raises SettingsError."""
    count = 0
    try:
        with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".torchrelay-export-") as folder:
            draft = Path(folder) / "draft"
            with tarfile.open(draft, "w") as archive:
                for key, data in artifacts:
                    member = tarfile.TarInfo(f"{key}{_SUFFIX}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
                    count += 1
            path.hardlink_to(draft)  # unlike a rename, never replaces a file
    except FileExistsError:
        raise SettingsError(f"{path} exists", hint="Remove it, or name another file") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}", hint="Check its folder") from None
    return count


def read_archive(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each artifact's name and bytes. Nothing is unpacked to disk. Raises SettingsError, ArtifactError."""
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if not member.isreg() or not member.name.endswith(_SUFFIX):
                    raise ArtifactError(f"{path} holds {member.name[:80]!r}, which is not an artifact")
                if member.size > _LARGEST_ARTIFACT:
                    raise ArtifactError(f"{path} holds an artifact of {member.size} bytes")
                data = archive.extractfile(member)
                assert data is not None  # a regular file
                yield member.name, data.read()
    except tarfile.TarError as error:
        raise ArtifactError(f"{path} is not an export: {error}") from None
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error.strerror or error}", hint="Check its permissions"
        ) from None
