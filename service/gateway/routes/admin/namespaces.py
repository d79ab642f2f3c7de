"""/v1/namespaces: what each may use and does; an administrator of all sets quotas."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from .....compiler.api.admin import QuotaChange
from ....access.namespaces import PATTERN
from ....access.tokens import Grant
from ...http.authentication import requires
from ...http.errors import documented
from ...http.json_body import read_json
from ...http.json_reply import json_answer, json_reply, json_request
from ...wiring.gateway import GatewayParts, gateway_of

router = APIRouter(tags=["namespaces"])

Name = Annotated[str, Path(pattern=PATTERN, description="A namespace")]


@router.get(
    "/v1/namespaces",
    summary="The namespaces of which the token may hear",
    responses={**documented(), **json_reply("NamespaceReply", many=True)},
    response_class=Response,
)
async def namespaces(
    gateway: Annotated[GatewayParts, Depends(gateway_of)], grant: Annotated[Grant, Depends(requires("read"))]
) -> Response:
    tenants = await gateway.tenants.administered(grant)
    return json_answer([await gateway.quotas.read(tenant.namespace) for tenant in tenants])


@router.get(
    "/v1/namespaces/{name}",
    summary="One namespace: its quota, and what it uses now",
    responses={**documented(), **json_reply("NamespaceReply")},
    response_class=Response,
)
async def namespace(
    name: Name,
    gateway: Annotated[GatewayParts, Depends(gateway_of)],
    grant: Annotated[Grant, Depends(requires("read"))],
) -> Response:
    tenant = await gateway.tenants.of(grant.within(name).namespace)
    return json_answer(await gateway.quotas.read(tenant.namespace))


@router.patch(
    "/v1/namespaces/{name}",
    summary="Set a quota; a namespace that does not exist yet does then",
    responses={**documented(413), **json_reply("NamespaceReply")},
    response_class=Response,
    openapi_extra=json_request("QuotaChange"),
)
async def change(
    name: Name,
    request: Request,
    gateway: Annotated[GatewayParts, Depends(gateway_of)],
    admin: Annotated[Grant, Depends(requires("admin", everywhere=True))],
) -> Response:
    await gateway.quotas.change(name, await read_json(request, QuotaChange), by=admin)
    return json_answer(await gateway.quotas.read(name))
