"""GET /v1/explain/{key}: the entry nearest to a request that missed, and what differs, in words."""

from __future__ import annotations

from .....compiler.api.compiles import MissExplanation
from ...http.json_routes import JsonRouter
from ..parameters import CacheKey, ReaderTenant

router = JsonRouter("compile")


@router.json(
    "GET",
    "/v1/explain/{key}",
    "Why a request missed",
    description="The nearest of the entries that the cache offered when the request missed, and the "
    "differences: request against entry. `nearest` is null when there was none.",
    reply="The nearest entry",
)
async def explain(key: CacheKey, tenant: ReaderTenant) -> MissExplanation:
    return await tenant.misses.explain(key)
