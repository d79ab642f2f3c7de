"""GET /v1/stats, /v1/workers, /v1/info and POST /v1/report: what the service did, has and is."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta, Struct

from ...compiler import artifact, wire
from ...compiler.errors import BY_CODE, LimitExceeded, MalformedRequest
from ..auth import Grant, requires
from ..gateway import Gateway, gateway_of
from ..problems import documented
from ..signing import public_key_text
from ..stats import StatsReply

router = APIRouter(tags=["service"])

_REPORT_BYTES = 4096


class InfoReply(Struct, frozen=True):
    """Answer of `GET /v1/info`. `public_keys`: base64 of the raw Ed25519 keys that sign artifacts."""

    version: str
    schema: int
    key_ids: list[str]
    public_keys: list[str]


class FallbackReport(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/report`: a client compiled locally `count` times because of error code `reason`."""

    reason: Annotated[str, Meta(extra_json_schema={"enum": sorted(BY_CODE)})]
    count: Annotated[int, Meta(ge=1, le=1_000_000)] = 1


def _json(name: str, *, many: bool = False) -> dict[int | str, dict[str, Any]]:
    schema: dict[str, Any] = {"$ref": f"#/components/schemas/{name}"}
    if many:
        schema = {"type": "array", "items": schema}
    return {200: {"description": name, "content": {"application/json": {"schema": schema}}}}


def _answer(body: object) -> Response:
    return Response(wire.to_json(body), media_type="application/json", headers={"Cache-Control": "no-store"})


@router.get(
    "/v1/stats",
    summary="Counters of all gateways",
    responses={**documented(), **_json("StatsReply")},
    response_class=Response,
)
async def stats(
    gateway: Annotated[Gateway, Depends(gateway_of)], _: Annotated[Grant, Depends(requires("read"))]
) -> Response:
    snapshot = await gateway.stats.snapshot()
    return _answer(msgspec.convert({**snapshot.counters, "fallbacks": snapshot.fallbacks}, StatsReply))


@router.get(
    "/v1/workers",
    summary="The workers, and what they compile for",
    responses={**documented(), **_json("WorkerInfo", many=True)},
    response_class=Response,
)
async def workers(
    gateway: Annotated[Gateway, Depends(gateway_of)], _: Annotated[Grant, Depends(requires("read"))]
) -> Response:
    return _answer(gateway.pool.workers() if gateway.state.pool_started else [])


@router.get(
    "/v1/info",
    summary="Version, schema and signing keys",
    responses={**documented(), **_json("InfoReply")},
    response_class=Response,
)
async def info(
    gateway: Annotated[Gateway, Depends(gateway_of)], _: Annotated[Grant, Depends(requires("read"))]
) -> Response:
    return _answer(
        InfoReply(
            version=version("torchrelay"),
            schema=wire.SCHEMA,
            key_ids=[artifact.key_id(gateway.signer.public_key())],
            public_keys=[public_key_text(gateway.signer)],
        )
    )


@router.post(
    "/v1/report",
    summary="Tell of local compiles",
    responses={**documented(413, 422)},
    response_class=Response,
    status_code=204,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/FallbackReport"}}},
        }
    },
)
async def report(
    request: Request,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Grant, Depends(requires("read"))],
) -> Response:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _REPORT_BYTES:
            raise LimitExceeded(f"a report has at most {_REPORT_BYTES} bytes")
    try:
        told = msgspec.json.decode(body, type=FallbackReport)
    except msgspec.MsgspecError as error:
        raise MalformedRequest(f"not a report: {error}", hint="See /docs") from None
    if told.reason not in BY_CODE:
        raise MalformedRequest(f"{told.reason!r} is no error code", hint="See compiler/errors.py")
    await gateway.stats.count_fallbacks(told.reason, told.count)
    return Response(status_code=204)
