"""/v1/programs: what Dynamo made of a function on one client, for those clients of the namespace that accept it."""

from __future__ import annotations

import asyncio
from typing import Annotated

import structlog
from fastapi import Path, Query, Request, Response

from .....compiler.artifact import manifest
from .....compiler.artifact.programs import shared
from .....compiler.artifact.programs.shared import ProgramReply
from .....compiler.errors import Forbidden, NotFound
from ...http.errors import documented
from ...http.json_routes import JsonRouter, binary_content
from ..parameters import Compiler, CompilerTenant, Gateway, ReaderTenant
from .artifacts import artifact_response

router = JsonRouter("programs")
log = structlog.get_logger(__name__)

Function = Annotated[
    str,
    Path(
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 of a function's name and code, and of all that decides how it is traced, 64 hex digits",
    ),
]
Slot = Annotated[int, Path(ge=0, lt=shared.SLOTS, description="Which of the function's variants")]


@router.get(
    "/v1/programs/{function}/{slot}",
    summary="Fetch a program",
    responses={
        **documented(),
        200: {
            "description": "The program, as a signed artifact",
            "content": binary_content(manifest.ARTIFACT_MEDIA_TYPE),
        },
    },
)
async def program(function: Function, slot: Slot, tenant: ReaderTenant) -> Response:
    found = await tenant.cache.lookup(shared.slot_key(function, slot), "fetch")
    if found is None:
        raise NotFound(f"there is no program {slot} of {function}")
    return artifact_response(found, {})


@router.json(
    "PUT",
    "/v1/programs/{function}/{slot}",
    "Give a program to the namespace's clients; the token needs the permission for it",
    body_type=shared.PROGRAM_MEDIA_TYPE,
)
async def store(
    request: Request,
    function: Function,
    slot: Slot,
    gateway: Gateway,
    grant: Compiler,
    tenant: CompilerTenant,
    replace: Annotated[bool, Query(description="Also where another program is")] = False,
) -> ProgramReply:
    if not grant.programs:
        log.warning("program_refused", function=function, name=grant.name, token=grant.id)
        raise Forbidden(
            f"the token of {grant.name!r} may not give programs to others",
            hint="Ask an administrator for a token with --allow-programs, or set TORCHRELAY_PROGRAMS=1",
        )
    body = await gateway.admission.read(request, shared.BODY_LIMIT)
    upload = await asyncio.to_thread(shared.decode_upload, body)
    key = shared.slot_key(function, slot)
    outcome = await tenant.cache.add_program(key, upload, by=grant)
    if outcome == "taken" and replace:
        await tenant.cache_admin.remove(key, by=grant)
        outcome = await tenant.cache.add_program(key, upload, by=grant)
    if outcome == "stored":
        await tenant.cache.trim()
    return ProgramReply(outcome)
