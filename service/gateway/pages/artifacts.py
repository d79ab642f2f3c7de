"""GET /artifacts, /artifacts/{key}, its /code and its /file: pages, and JSON; the form that pins and removes."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Query, Request, Response

from ....compiler.api.admin import ACTIONS, Action, Artifact, ArtifactCode, ArtifactList
from ....compiler.errors import MalformedRequest
from ...base.http_bodies import read_body
from ..http.errors import documented
from ..http.json_routes import JsonRouter, binary_content
from ..http.page_bodies import for_browsers
from ..routes.graphs.artifacts import artifact
from ..routes.parameters import Admin, AdminTenant, CacheKey, Gateway, Reader, ReaderTenant
from . import artifact_views as views

router = JsonRouter("cache")

_FORM_BYTES = 1 << 10
_FORM_SECONDS = 10.0


@router.json("GET", "/artifacts", "The artifacts, the last used first", page=views.listed)
async def latest(
    gateway: Gateway,
    tenant: ReaderTenant,
    first: Annotated[int, Query(ge=0, le=10**9, description="`following` of the page before")] = 0,
) -> ArtifactList:
    await gateway.write_uses()
    entries, following = await tenant.cache_admin.last_used(first)
    return ArtifactList(entries, [] if first else await tenant.cache_admin.pinned(), following)


@router.json("GET", "/artifacts/{key}", "An artifact, and the latest runs that used it", page=views.artifact)
async def show(key: CacheKey, gateway: Gateway, grant: Reader, tenant: ReaderTenant) -> Artifact:
    await gateway.write_uses()
    known = await tenant.cache_admin.show(key)
    runs, read = await tenant.runs.using(key)
    actions: list[Action] = ["unpin" if known.entry.pinned else "pin", "remove"]
    return Artifact(
        *(known.entry, known.signer, known.manifest, known.components, runs, read),
        actions if grant.allows("admin") else [],
    )


@router.json("GET", "/artifacts/{key}/code", "C++ of an artifact, and its graph at levels", page=views.code)
async def code(key: CacheKey, tenant: ReaderTenant) -> ArtifactCode:
    return await tenant.cache_admin.code(key)


@router.get(
    "/artifacts/{key}/file",
    summary="Download an artifact",
    responses={
        **documented(),
        200: {"description": "The signed artifact", "content": binary_content(views.FILE_TYPE)},
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
