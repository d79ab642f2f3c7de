"""/v1/autotunes: winners of Triton's and Helion's own autotuners, brought and fetched by their cache back ends."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from .....compiler.api.tuning.database import BODY_LIMIT, AutotunedLibrary, AutotuneEntry
from .....compiler.errors import NotFound
from ...http.json_routes import JsonRouter
from ..parameters import CompilerTenant, ReaderTenant

router = JsonRouter("autotunes")

Library = Annotated[AutotunedLibrary, Path(description="Whose autotuner measured")]
AutotuneKey = Annotated[
    str,
    Path(
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 of the library, its version, its own key and the device environment, 64 hex digits",
    ),
]


@router.json("GET", "/v1/autotunes/{library}/{key}", "The winner that the team has measured")
async def find(library: Library, key: AutotuneKey, tenant: ReaderTenant) -> AutotuneEntry:
    entry = await tenant.autotunes.find(library, key)
    if entry is None:
        raise NotFound(f"nothing is known of {library}'s {key}")
    return entry


@router.json(
    "PUT",
    "/v1/autotunes/{library}/{key}",
    "Bring a measured winner, unless there is one; answers with the winner that stands",
    body_bytes=BODY_LIMIT,
)
async def store(
    library: Library, key: AutotuneKey, body: AutotuneEntry, tenant: CompilerTenant
) -> AutotuneEntry:
    return await tenant.autotunes.store(library, key, body)
