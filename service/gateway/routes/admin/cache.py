"""/v1/cache: what the cache holds; an administrator pins, removes, trims and sweeps."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from .....compiler.api.admin import ArtifactReply, CacheReply, CollectReply, ImportReply
from .....compiler.artifact import manifest as artifact_manifest
from ....access.tokens import Grant
from ...http.authentication import requires
from ...http.errors import documented
from ...http.json_reply import json_answer, json_reply
from ...wiring.gateway import GatewayParts, gateway_of
from ..parameters import CacheKey

router = APIRouter(tags=["cache"])

Reader = Annotated[Grant, Depends(requires("read"))]
Admin = Annotated[Grant, Depends(requires("admin"))]


@router.get(
    "/v1/cache",
    summary="What the cache holds, a page at a time, in no order",
    responses={**documented(), **json_reply("CacheReply")},
    response_class=Response,
)
async def entries(
    gateway: Annotated[GatewayParts, Depends(gateway_of)],
    reader: Reader,
    cursor: Annotated[
        str, Query(pattern="^([0-9]{1,19})?$", description="`next` of the page before; '' begins")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=1000, description="About so many entries")] = 100,
) -> Response:
    tenant = await gateway.tenants.of(reader.namespace)
    found, following = await tenant.contents.page(cursor=int(cursor or 0), limit=limit)
    return json_answer(CacheReply(found, str(following) if following else ""))


@router.get(
    "/v1/cache/{key}",
    summary="One artifact: entry, manifest and what its key covers",
    responses={**documented(), **json_reply("ArtifactReply")},
    response_class=Response,
)
async def show(
    key: CacheKey, gateway: Annotated[GatewayParts, Depends(gateway_of)], reader: Reader
) -> Response:
    contents = (await gateway.tenants.of(reader.namespace)).contents
    entry = await contents.entry(key)
    manifest, signer = await contents.manifest(entry)
    components = await contents.components(key)
    return json_answer(ArtifactReply(entry, signer, manifest, components))


@router.put(
    "/v1/cache/{key}/pin",
    summary="Never evict this artifact",
    responses={**documented(), **json_reply("CacheEntry")},
    response_class=Response,
)
async def pin(key: CacheKey, gateway: Annotated[GatewayParts, Depends(gateway_of)], admin: Admin) -> Response:
    tenant = await gateway.tenants.of(admin.namespace)
    return json_answer(await tenant.contents.pin(key, pinned=True, by=admin))


@router.delete(
    "/v1/cache/{key}/pin",
    summary="Let this artifact be evicted again",
    responses={**documented(), **json_reply("CacheEntry")},
    response_class=Response,
)
async def unpin(
    key: CacheKey, gateway: Annotated[GatewayParts, Depends(gateway_of)], admin: Admin
) -> Response:
    tenant = await gateway.tenants.of(admin.namespace)
    return json_answer(await tenant.contents.pin(key, pinned=False, by=admin))


@router.delete(
    "/v1/cache/{key}",
    summary="Remove this artifact; whoever asks next compiles it again",
    responses={**documented(), **json_reply("CacheEntry")},
    response_class=Response,
)
async def remove(
    key: CacheKey, gateway: Annotated[GatewayParts, Depends(gateway_of)], admin: Admin
) -> Response:
    tenant = await gateway.tenants.of(admin.namespace)
    return json_answer(await tenant.contents.remove(key, by=admin))


@router.post(
    "/v1/cache",
    summary="Import an artifact that this site or one that it trusts has signed",
    responses={**documented(413), **json_reply("ImportReply")},
    response_class=Response,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                artifact_manifest.ARTIFACT_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}
            },
        }
    },
)
async def take_in(
    request: Request, gateway: Annotated[GatewayParts, Depends(gateway_of)], admin: Admin
) -> Response:
    tenant = await gateway.tenants.of(admin.namespace)
    data = await gateway.intake.read(request, gateway.settings.import_bytes)
    key, outcome = await tenant.cache.adopt(data, by=admin)
    if outcome == "imported":
        await tenant.cache.trim()
    return json_answer(ImportReply(key, outcome))


@router.post(
    "/v1/cache/gc",
    summary="Evict what is over the limit, and delete blobs that crashes left",
    responses={**documented(), **json_reply("CollectReply")},
    response_class=Response,
)
async def collect(gateway: Annotated[GatewayParts, Depends(gateway_of)], admin: Admin) -> Response:
    evicted = swept = 0
    for tenant in await gateway.tenants.administered(admin):
        evicted += await tenant.cache.trim()
        swept += await tenant.cache.sweep()
    return json_answer(CollectReply(evicted, swept))
