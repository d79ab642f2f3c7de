"""GET /v1/stats, /v1/workers, /v1/info, /v1/whoami, /v1/sign-in and POST /v1/report: counters, workers, version, keys,
the caller's token, and where tokens come from."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ....compiler import VERSION
from ....compiler.api.admin import CallerReply, permissions
from ....compiler.api.compiles import WorkerInfo
from ....compiler.api.sign_in import SignInReply
from ....compiler.artifact.signing import key_id, key_text
from ....compiler.errors import BY_CODE, MalformedRequest
from ....compiler.request import schema as request_schema
from ...base.counters import StatsReply, sum_counters
from ..http.json_routes import JsonRouter
from .parameters import Gateway, Reader, ReaderTenant

router = JsonRouter("service")


class InfoReply(Struct, frozen=True):
    """Answer of `GET /v1/info`. `public_keys`: base64 of the raw Ed25519 keys that signed what is served here, the
    one that signs now first; `key_ids` name them in the same order."""

    version: str
    schema: int
    pipeline: int
    """The revision of the pipeline that is part of the keys (compiler/request/schema.py)."""
    namespace: str
    """The token's namespace; artifacts for it are signed for this one."""
    key_ids: list[str]
    public_keys: list[str]


class FallbackReport(Struct, frozen=True):
    """Body of `POST /v1/report`: a client compiled locally `count` times because of error code `reason`."""

    reason: Annotated[str, Meta(extra_json_schema={"enum": sorted(BY_CODE)})]
    count: Annotated[int, Meta(ge=1, le=100)] = 1


@router.json(
    "GET",
    "/v1/stats",
    "Counters of all gateways, for the token's namespace; for a token of all, together and of each",
)
async def stats(gateway: Gateway, grant: Reader) -> StatsReply:
    names = [tenant.namespace for tenant in await gateway.administered(grant)]
    found = await gateway.counters(names)
    every = msgspec.structs.asdict(sum_counters(found.values()))
    return StatsReply(**every, namespaces=found)


@router.json(
    "GET",
    "/v1/workers",
    "The workers, and what they compile for; the names of their hosts for a token of all namespaces",
)
async def workers(gateway: Gateway, grant: Reader) -> list[WorkerInfo]:
    found = await gateway.registry.workers()
    return found if grant.everywhere else [msgspec.structs.replace(each, host="") for each in found]


@router.json("GET", "/v1/info", "Version, schema and signing keys")
async def info(gateway: Gateway, grant: Reader) -> InfoReply:
    return InfoReply(
        version=VERSION,
        schema=request_schema.SCHEMA,
        pipeline=request_schema.PIPELINE,
        namespace=grant.namespace,
        key_ids=[key_id(key) for key in gateway.keyring.public],
        public_keys=[key_text(key) for key in gateway.keyring.public],
    )


@router.json("GET", "/v1/whoami", "What the request's token allows, and until when")
async def whoami(grant: Reader) -> CallerReply:
    return CallerReply(
        id=grant.id,
        name=grant.name,
        namespace=grant.namespace,
        everywhere=grant.everywhere,
        permissions=permissions(grant.roles, source=grant.source, programs=grant.programs),
        expires=grant.expires,
    )


@router.json("GET", "/v1/sign-in", "Where `torchrelay login` gets a token; needs none")
async def sign_in(gateway: Gateway) -> SignInReply:
    return gateway.tokens.sign_in()


@router.json("POST", "/v1/report", "Report local compiles")
async def report(body: FallbackReport, gateway: Gateway, tenant: ReaderTenant) -> None:
    if body.reason not in BY_CODE:
        raise MalformedRequest(f"{body.reason!r} is no error code", hint="See compiler/errors.py")
    gateway.uses.count(tenant.namespace, {f"fallback:{body.reason}": body.count})
