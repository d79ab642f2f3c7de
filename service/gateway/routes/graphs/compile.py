"""Stage 4: POST /v1/compile takes a graph and answers with its artifact, or with where to follow its compile.

POST /v1/lower does the same for a graph that is to be looked at: its artifact lists it at the levels that it names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import structlog
from fastapi import Query, Request, Response
from redis.exceptions import RedisError

from .....compiler.api.compiles import CompileStatus
from .....compiler.artifact import manifest
from .....compiler.errors import MalformedRequest, NotFound, SourceForbidden, Unavailable
from .....compiler.request import codec
from ....access.audit import AuditEvent
from ....access.tokens import Grant
from ....admission.compile_request import CompileRequest
from ....base.http_bodies import reply
from ....base.tracing import span_context
from ...http.errors import documented
from ...http.json_routes import JsonRouter, binary_content
from ...parts import GatewayParts, GatewayTenant
from ..parameters import Compiler, CompilerTenant, Gateway
from .artifacts import artifact_response
from .progress import status_of

log = structlog.get_logger(__name__)

router = JsonRouter("compile")

KEY_HEADER = "X-Torchrelay-Key"
CACHE_HEADER = "X-Torchrelay-Cache"
_LOOKUPS = 3
_DETAIL = 200
_HEADERS = {
    KEY_HEADER: {"description": "The request's cache key, 64 hex digits", "schema": {"type": "string"}},
    CACHE_HEADER: {
        "description": "coalesced: another request had started the compile",
        "schema": {"type": "string", "enum": ["hit", "miss", "coalesced"]},
    },
}

_RESPONSES: dict[int | str, dict[str, Any]] = {
    **documented(413, 415),
    200: {
        "description": "A hit: the signed artifact",
        "content": binary_content(manifest.ARTIFACT_MEDIA_TYPE),
        "headers": _HEADERS,
    },
    202: {
        "description": "A miss: a compile runs; follow its events",
        "content": router.json_content(CompileStatus),
        "headers": _HEADERS,
    },
}
_BODY = {"requestBody": {"required": True, "content": binary_content(codec.GRAPH_MEDIA_TYPE)}}
Wait = Annotated[Literal["", "cache"], Query(description="`cache`: no compile; 404 for a miss")]


@router.post(
    "/v1/compile",
    summary="Compile a graph, or fetch what it compiled to before",
    responses=_RESPONSES,
    openapi_extra=_BODY,
)
async def compile_graph(
    request: Request,
    gateway: Gateway,
    grant: Compiler,
    tenant: CompilerTenant,
    wait: Wait = "",
) -> Response:
    return await _answer(request, gateway, grant, tenant, wait)


@router.post(
    "/v1/lower",
    summary="Lower a graph to levels to look at, or fetch what was listed before",
    description="The body is that of `/v1/compile`, with `levels`. The artifact has one member, `lowered.msgpack`.",
    responses=_RESPONSES,
    openapi_extra=_BODY,
)
async def lower_graph(
    request: Request, gateway: Gateway, grant: Compiler, tenant: CompilerTenant, wait: Wait = ""
) -> Response:
    return await _answer(request, gateway, grant, tenant, wait, lowers=True)


async def _answer(
    request: Request,
    gateway: GatewayParts,
    grant: Grant,
    tenant: GatewayTenant,
    wait: Literal["", "cache"],
    *,
    lowers: bool = False,
) -> Response:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != codec.GRAPH_MEDIA_TYPE:
        wrong = MalformedRequest(f"content type is {media_type or 'missing'}, not {codec.GRAPH_MEDIA_TYPE}")
        return reply(wrong, retry_after_seconds=gateway.settings.retry_after_seconds, status=415)
    tracer = gateway.tracer
    with tracer.span("admission") as span:
        body = await gateway.admission.read(request)
        key, parsed = await gateway.admission.key_of(body, namespace=tenant.namespace)
        span.set_attributes({"torchrelay.key": key, "torchrelay.bytes": len(body)})
        if lowers:
            parsed = parsed or await gateway.admission.request_of(body, namespace=tenant.namespace)
            if "levels" not in parsed.components:
                raise MalformedRequest("the request names no levels", hint="POST /v1/compile compiles it")
    for _ in range(_LOOKUPS):
        with tracer.span("lookup"):
            found = await tenant.cache.lookup(key, "hit")
        if found is not None:
            return artifact_response(found, {KEY_HEADER: key, CACHE_HEADER: "hit"})
        parsed = parsed or await gateway.admission.request_of(body, namespace=tenant.namespace)
        await tenant.misses.record(parsed)
        if wait == "cache":
            gateway.uses.count(tenant.namespace, {"requests": 1, "misses": 1})
            raise NotFound("this graph is not in the cache", hint="Send it without wait=cache")
        if parsed.kernels and not grant.source:
            log.warning("source_refused", key=key, name=grant.name, token=grant.id)
            raise SourceForbidden(
                f"this graph is not in the cache, and the token of {grant.name!r} may not send source: "
                f"the user-written Triton kernel {parsed.kernels[0]!r}"
            )
        with tracer.span("queue") as span:
            answer = await tenant.queue.ask(parsed, body)
            if answer == "wait" and tracer.exports and (cause := await tenant.events.cause(key)):
                span.add_link(span_context(cause))
        if answer == "queued":
            await _log_compile(tenant, grant, parsed)
            await tenant.saved_requests.note(key, body)
        if answer != "hit":
            try:
                status = await status_of(tenant, key)
            except NotFound:  # Redis has failed over since, and lost it
                log.warning("lost_as_it_was_queued", key=key)
                continue
            return Response(
                codec.to_json(status),
                202,
                {
                    KEY_HEADER: key,
                    CACHE_HEADER: "miss" if answer == "queued" else "coalesced",
                    "Cache-Control": "no-store",
                },
                "application/json",
            )
    raise Unavailable(
        "the cache offers this artifact but does not hold it, or forgets its compile",
        hint="Send the request again",
    )


async def _log_compile(tenant: GatewayTenant, grant: Grant, parsed: CompileRequest) -> None:
    """The compile already runs. If Redis does not store the entry, it is written to the gateway's log."""
    detail = f"source: {', '.join(parsed.kernels)}"[:_DETAIL] if parsed.kernels else ""
    event = AuditEvent(action="compile", name=grant.name, token=grant.id, key=parsed.key, detail=detail)
    try:
        await tenant.audit.append(event)
    except RedisError as error:
        log.error("audit_entry_lost", error=str(error), **msgspec.structs.asdict(event))
