"""/v1/cache: what the cache holds; an administrator pins, removes, trims and sweeps."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request

from .....compiler.api.admin import (
    REINDEX_PARTS,
    ArtifactReply,
    CacheEntry,
    CacheReply,
    CollectReply,
    ImportReply,
    ReindexReply,
)
from .....compiler.artifact import manifest as artifact_manifest
from ...http.json_routes import JsonRouter
from ..parameters import Admin, AdminTenant, CacheKey, Gateway, Owner, ReaderTenant

router = JsonRouter("cache")


@router.json("GET", "/v1/cache", "What the cache holds, a page at a time, in no order")
async def entries(
    gateway: Gateway,
    tenant: ReaderTenant,
    cursor: Annotated[
        str, Query(pattern="^([0-9]{1,19})?$", description="`next` of the page before; '' begins")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=1000, description="About so many entries")] = 100,
) -> CacheReply:
    await gateway.write_uses()
    found, following = await tenant.cache_admin.page(cursor=int(cursor or 0), limit=limit)
    return CacheReply(found, str(following) if following else "")


@router.json("GET", "/v1/cache/{key}", "One artifact: entry, manifest and what its key covers")
async def show(key: CacheKey, tenant: ReaderTenant) -> ArtifactReply:
    return await tenant.cache_admin.show(key)


@router.json("PUT", "/v1/cache/{key}/pin", "Never evict this artifact")
async def pin(key: CacheKey, admin: Admin, tenant: AdminTenant) -> CacheEntry:
    return await tenant.cache_admin.pin(key, pinned=True, by=admin)


@router.json("DELETE", "/v1/cache/{key}/pin", "Let this artifact be evicted again")
async def unpin(key: CacheKey, admin: Admin, tenant: AdminTenant) -> CacheEntry:
    return await tenant.cache_admin.pin(key, pinned=False, by=admin)


@router.json("DELETE", "/v1/cache/{key}", "Remove this artifact; the next request for it compiles it again")
async def remove(key: CacheKey, admin: Admin, tenant: AdminTenant) -> CacheEntry:
    return await tenant.cache_admin.remove(key, by=admin)


@router.json(
    "POST",
    "/v1/cache",
    "Import an artifact that this site or one that it trusts has signed",
    body_type=artifact_manifest.ARTIFACT_MEDIA_TYPE,
)
async def import_artifact(
    request: Request, gateway: Gateway, admin: Admin, tenant: AdminTenant
) -> ImportReply:
    async with gateway.admission.read_file(request, gateway.settings.import_bytes) as upload:
        key, outcome = await tenant.cache.import_artifact(upload, by=admin)
    if outcome == "imported":
        await tenant.cache.trim()
    return ImportReply(key, outcome)


@router.json("POST", "/v1/cache/gc", "Evict what is over the limit, and delete blobs that crashes left")
async def collect(gateway: Gateway, admin: Admin) -> CollectReply:
    if admin.everywhere:
        await gateway.recount.run(await gateway.namespaces.names())
        await gateway.tokens.forget_old()
    evicted = swept = 0
    for tenant in await gateway.administered(admin):
        evicted += await tenant.cache.trim()
        swept += await tenant.cache.sweep()
    return CollectReply(evicted, swept)


@router.json(
    "POST", "/v1/cache/reindex", "Offer again what the blob store holds and Redis has lost, in parts"
)
async def reindex(
    gateway: Gateway,
    owner: Owner,
    part: Annotated[
        int, Query(ge=0, lt=REINDEX_PARTS, description="First byte of the keys; the last one ends it")
    ],
) -> ReindexReply:
    return ReindexReply(await gateway.reindex(part, by=owner))
