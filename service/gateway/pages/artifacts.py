"""GET /artifacts, /artifacts/{key}, its /code, /graph and /file: pages, and JSON; the form that pins and removes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Query, Request, Response

from ....compiler.api.admin import ACTIONS, Action, Artifact, ArtifactCode, ArtifactList
from ....compiler.api.html.page import Tile, bytes_of, plural, seconds
from ....compiler.api.html.svg import Axis, Picture, shape
from ....compiler.api.lowered import DrawnGraph, Lowering
from ....compiler.artifact.manifest import ARTIFACT_MEDIA_TYPE, Manifest
from ....compiler.errors import MalformedRequest
from ....compiler.request.schema import Level
from ...base.http_bodies import read_body
from ...cache.drawn_graph import draw
from ..http.errors import documented
from ..http.json_routes import JsonRouter, binary_content
from ..http.page_bodies import for_browsers, rendered
from ..routes.graphs.artifacts import artifact
from ..routes.parameters import Admin, AdminTenant, CacheKey, Gateway, Reader, ReaderTenant
from .views import hit_rate, namespace_of, when

router = JsonRouter("cache")

_LISTED = 100
"""Rows before a table is folded."""
_COLORS = {"aot": "kind0", "inductor": "kind2", "search": "kind4", "autotune": "kind1", "verify": "kind3"}
_OTHER_COLOR = "kind5"
_WIDTH, _HEIGHT = 960, 18
"""Pixels of the picture of stages."""
_FORM_BYTES = 1 << 10
_FORM_SECONDS = 10.0


def list_page(request: Request, listing: ArtifactList) -> str:
    return rendered(
        "artifacts/artifacts.html",
        request,
        title="Artifacts",
        about=["the last used first"],
        tiles=(),
        found=listing,
        when=when,
        namespace=namespace_of(request),
    )


def artifact_page(request: Request, whole: Artifact) -> str:
    entry, manifest = whole.entry, whole.manifest
    picture, stages = _stages(manifest)
    return rendered(
        "artifacts/artifact.html",
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


def code_page(request: Request, read: ArtifactCode) -> str:
    return rendered(
        "artifacts/code.html",
        request,
        title=f"Code of {read.key[:12]}",
        about=[plural(len(read.kernels), "C++ kernel")],
        tiles=(),
        found=read,
        namespace=namespace_of(request),
    )


def graph_page(request: Request, drawn: DrawnGraph) -> str:
    return rendered(
        "artifacts/graph.html",
        request,
        title=f"Graph of {drawn.key[:12]}",
        about=[drawn.level, *[drawn.part] * (drawn.part != drawn.level), plural(len(drawn.nodes), "node")],
        tiles=(),
        drawn=drawn,
        listed=_LISTED,
        namespace=namespace_of(request),
    )


@router.json("GET", "/artifacts", "The artifacts, the last used first", page=list_page)
async def latest(
    gateway: Gateway,
    tenant: ReaderTenant,
    first: Annotated[int, Query(ge=0, le=10**9, description="`following` of the page before")] = 0,
) -> ArtifactList:
    await gateway.write_uses()
    entries, following = await tenant.cache_admin.last_used(first)
    return ArtifactList(entries, [] if first else await tenant.cache_admin.pinned(), following)


@router.json("GET", "/artifacts/{key}", "An artifact, and the latest runs that used it", page=artifact_page)
async def show(key: CacheKey, gateway: Gateway, grant: Reader, tenant: ReaderTenant) -> Artifact:
    await gateway.write_uses()
    known = await tenant.cache_admin.show(key)
    async with gateway.budgets.work.turn(tenant.namespace):
        used, read = await tenant.runs.using(key)
    actions: list[Action] = ["unpin" if known.entry.pinned else "pin", "remove"]
    return Artifact(
        *(known.entry, known.signer, known.manifest, known.components, [run for run, _ in used], read),
        actions if grant.allows("admin") else [],
    )


@router.json("GET", "/artifacts/{key}/code", "C++ of an artifact, and its graph at levels", page=code_page)
async def code(key: CacheKey, gateway: Gateway, tenant: ReaderTenant) -> ArtifactCode:
    async with gateway.budgets.work.turn(tenant.namespace):
        return await tenant.cache_admin.code(key)


@router.json("GET", "/artifacts/{key}/graph", "A lowered graph, node by node", page=graph_page, live=True)
async def graph(
    key: CacheKey,
    gateway: Gateway,
    tenant: ReaderTenant,
    level: Annotated[Level | None, Query(description="The first that has a graph without one")] = None,
    part: Annotated[str, Query(max_length=80, description="joint, forward, backward ...")] = "",
) -> DrawnGraph:
    async with gateway.budgets.work.turn(tenant.namespace):
        lowering = await tenant.cache_admin.lowering(key)
        used, _ = await tenant.runs.using(key)
        sources = next((record.sources[key] for _, record in used if key in record.sources), None)
        return await asyncio.to_thread(draw, key, lowering or Lowering([]), level or "", part, sources)


@router.get(
    "/artifacts/{key}/file",
    summary="Download an artifact",
    responses={
        **documented(),
        200: {"description": "The signed artifact", "content": binary_content(ARTIFACT_MEDIA_TYPE)},
    },
)
@for_browsers
async def file(request: Request, key: CacheKey, gateway: Gateway, tenant: ReaderTenant) -> Response:
    answer = await artifact(request, key, gateway, tenant)
    answer.headers["Cache-Control"] = "no-store"
    answer.headers["Content-Disposition"] = f'attachment; filename="{key}.artifact"'
    return answer


@router.post("/artifacts/{key}", include_in_schema=False)
@for_browsers
async def act(request: Request, key: CacheKey, admin: Admin, tenant: AdminTenant) -> Response:
    """Do what the buttons of an artifact's page say."""
    body = await read_body(request, _FORM_BYTES, seconds=_FORM_SECONDS)
    action = parse_qs(body.decode("ascii", "replace")).get("action", [""])[0]
    if action not in ACTIONS:
        raise MalformedRequest(f"action is {action[:40]!r}", hint=f"Allowed: {', '.join(ACTIONS)}")
    if action == "remove":
        await tenant.cache_admin.remove(key, by=admin)
    else:
        await tenant.cache_admin.pin(key, pinned=action == "pin", by=admin)
    query = f"?{request.url.query}" if request.url.query else ""
    place = f"../artifacts{query}" if action == "remove" else f"{key}{query}"
    return Response(status_code=303, headers={"Location": place, "Cache-Control": "no-store"})


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
