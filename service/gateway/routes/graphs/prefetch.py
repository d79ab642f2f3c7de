"""POST /v1/prefetch, GET /v1/prefetch/{script}: the artifacts that a script used, to fetch at its next start, and the
sizes that vary in it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from .....compiler.api.compiles import ScriptArtifacts, ScriptUse
from ...http.json_routes import JsonRouter
from ..parameters import CompilerTenant, Gateway, ReaderTenant

router = JsonRouter("prefetch")

Script = Annotated[
    str, Path(pattern="^[0-9a-f]{64}$", description="A digest of the script's name, code and options")
]


@router.json(
    "POST", "/v1/prefetch", "Record which artifacts a script used and which sizes vary", body_bytes=64 << 10
)
async def record(body: ScriptUse, gateway: Gateway, tenant: CompilerTenant) -> None:
    for script in body.scripts:
        await tenant.script_history.record(script, body.keys, body.varied, body.constant)
    if prefetched := set(body.prefetched).intersection(body.keys):
        gateway.uses.count(tenant.namespace, await tenant.script_history.hits(prefetched))


@router.json("GET", "/v1/prefetch/{script}", "What a script used and the cache still offers")
async def used(script: Script, tenant: ReaderTenant) -> ScriptArtifacts:
    return await tenant.script_history.used_by(script)
