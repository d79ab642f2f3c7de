"""The values of the templates of artifacts."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request

from ....compiler.api.admin import Artifact, ArtifactCode, ArtifactList
from ....compiler.api.html.page import Tile, bytes_of, plural, seconds
from ....compiler.api.html.svg import Axis, Picture, shape
from ....compiler.artifact.manifest import ARTIFACT_MEDIA_TYPE, Manifest
from ..http.page_bodies import rendered
from .views import hit_rate, namespace_of, when

FILE_TYPE = ARTIFACT_MEDIA_TYPE
_LISTED = 100
"""Rows before a table is folded."""
_COLORS = {"aot": "kind0", "inductor": "kind2", "search": "kind4", "autotune": "kind1", "verify": "kind3"}
_OTHER_COLOR = "kind5"
_WIDTH, _HEIGHT = 960, 18
"""Pixels of the picture of stages."""


def listed(request: Request, listing: ArtifactList) -> str:
    return rendered(
        "artifacts.html",
        request,
        title="Artifacts",
        about=["the last used first"],
        tiles=(),
        found=listing,
        when=when,
        namespace=namespace_of(request),
    )


def artifact(request: Request, whole: Artifact) -> str:
    entry, manifest = whole.entry, whole.manifest
    picture, stages = _stages(manifest)
    return rendered(
        "artifact.html",
        request,
        title=f"Artifact {entry.key[:12]}",
        about=[
            *(f"compiled {when(entry.created)}", f"PyTorch {manifest.toolchain.torch}"),
            *(manifest.target.name or manifest.target.kind, *["pinned: never evicted"] * entry.pinned),
        ],
        tiles=_tiles(whole),
        found=whole,
        rows=_rows(whole),
        picture=picture,
        stages=stages,
        listed=_LISTED,
        when=when,
        hit_rate=hit_rate,
        namespace=namespace_of(request),
    )


def code(request: Request, read: ArtifactCode) -> str:
    return rendered(
        "code.html",
        request,
        title=f"Code of {read.key[:12]}",
        about=[plural(len(read.kernels), "C++ kernel")],
        tiles=(),
        found=read,
        namespace=namespace_of(request),
    )


def _tiles(whole: Artifact) -> list[Tile]:
    entry, manifest = whole.entry, whole.manifest
    checked = manifest.verification
    tuned = f"{len(manifest.tuning)} tuned" if manifest.tuning else "none tuned"
    return [
        ("compile time", seconds(entry.seconds), f"by worker {manifest.worker}"),
        ("size", bytes_of(entry.bytes), f"{plural(len(manifest.members), 'member')}, in {entry.place}"),
        ("kernels", str(manifest.kernels), f"{manifest.kernels_reused} of an earlier compile, {tuned}"),
        ("compared with eager", checked.status, f"{seconds(checked.seconds)} of the compile"),
        ("runs", str(len(whole.runs)), f"of the latest {whole.runs_read} used it"),
    ]


def _rows(whole: Artifact) -> Mapping[str, str]:
    entry, manifest = whole.entry, whole.manifest
    checked = manifest.verification
    rows = {
        "key": entry.key,
        "digest": entry.digest,
        "signed by": whole.signer,
        "worker": manifest.worker,
        "compiled": manifest.created,
        "last used": when(entry.used),
        "compared": checked.reason or f"largest difference {checked.max_abs_error:.3g}",
        "needs": ", ".join(f"{family} {version}" for family, version in manifest.needs.items()),
        "assumes": "; ".join(manifest.guards[:_LISTED]),
        "searched": f"{manifest.searched} problems measured, {manifest.recalled} known before",
    }
    return {name: text for name, text in rows.items() if text}


def _stages(manifest: Manifest) -> tuple[Picture, list[tuple[str, str]]]:
    """One bar of the stages that took time, and the key to its colours."""
    spent = [(stage, took) for stage, took in manifest.stages if took > 0]
    x = Axis(0, sum(took for _, took in spent) or 1.0, 0, _WIDTH)
    shapes, names, began = [], [], 0.0
    for stage, took in spent:
        color, text = _COLORS.get(stage, _OTHER_COLOR), f"{stage} {seconds(took)}"
        width = x(began + took) - x(began)
        shapes.append(
            shape("rect", f"span {color}", title=text, x=x(began), width=width, y=0, height=_HEIGHT)
        )
        names.append((color, text))
        began += took
    return Picture("timeline", "what the compile took", _WIDTH, _HEIGHT, shapes), names
