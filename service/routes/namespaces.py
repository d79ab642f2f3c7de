"""/v1/namespaces: what each may use and does; an administrator of all sets quotas."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from ...compiler.records import QuotaChange
from ..auth import Grant, requires
from ..gateway import Gateway, gateway_of
from ..json_body import read_json
from ..namespaces import PATTERN
from ..problems import documented
from .answers import json_answer, json_reply, json_request

router = APIRouter(tags=["namespaces"])

Name = Annotated[str, Path(pattern=PATTERN, description="A namespace")]


@router.get(
    "/v1/namespaces",
    summary="The namespaces of which the token may hear",
    responses={**documented(), **json_reply("NamespaceReply", many=True)},
    response_class=Response,
)
async def namespaces(
    gateway: Annotated[Gateway, Depends(gateway_of)], grant: Annotated[Grant, Depends(requires("read"))]
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
    gateway: Annotated[Gateway, Depends(gateway_of)],
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
    gateway: Annotated[Gateway, Depends(gateway_of)],
    admin: Annotated[Grant, Depends(requires("admin", everywhere=True))],
) -> Response:
    await gateway.quotas.change(name, await read_json(request, QuotaChange), by=admin)
    return json_answer(await gateway.quotas.read(name))
