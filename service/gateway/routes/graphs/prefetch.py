"""POST /v1/prefetch, GET /v1/prefetch/{script}: what a script used; at its next start, what to fetch ahead."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request

from .....compiler.api.compiles import ScriptArtifacts, ScriptUse
from ...http.json_body import read_json
from ...http.json_routes import JsonRouter
from ..parameters import Compiler, Gateway, Reader

router = JsonRouter("prefetch")

_BODY_BYTES = 64 << 10

Script = Annotated[
    str, Path(pattern="^[0-9a-f]{64}$", description="A digest of the script's name, code and options")
]


@router.json("POST", "/v1/prefetch", "Tell which artifacts a script used", body=ScriptUse)
async def remember(request: Request, gateway: Gateway, grant: Compiler) -> None:
    used = await read_json(request, ScriptUse, limit=_BODY_BYTES)
    tenant = await gateway.tenants.of(grant.namespace)
    for script in used.scripts:
        await tenant.script_history.record(script, used.keys)
    if used.prefetched:
        await tenant.script_history.count(used.prefetched)


@router.json("GET", "/v1/prefetch/{script}", "What a script used and the cache still offers")
async def recall(script: Script, gateway: Gateway, grant: Reader) -> ScriptArtifacts:
    tenant = await gateway.tenants.of(grant.namespace)
    return await tenant.script_history.used_by(script)
