"""/v1/namespaces: what each may use and does; an administrator of all sets quotas and deletes them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from .....compiler.api.admin import NamespaceRemoval, NamespaceReply, QuotaChange
from ....access.namespaces import PATTERN
from ...http.json_routes import JsonRouter
from ..parameters import Gateway, Owner, Reader

router = JsonRouter("namespaces")

Name = Annotated[str, Path(pattern=PATTERN, description="A namespace")]


@router.json("GET", "/v1/namespaces", "The namespaces that the token may see")
async def namespaces(gateway: Gateway, grant: Reader) -> list[NamespaceReply]:
    tenants = await gateway.administered(grant)
    return [await gateway.quotas.read(tenant.namespace) for tenant in tenants]


@router.json("GET", "/v1/namespaces/{name}", "One namespace: its quota, and what it uses now")
async def namespace(name: Name, gateway: Gateway, grant: Reader) -> NamespaceReply:
    tenant = await gateway.tenants.of(grant.within(name).namespace)
    return await gateway.quotas.read(tenant.namespace)


@router.json("PATCH", "/v1/namespaces/{name}", "Set a quota; a namespace that does not exist is created")
async def change(name: Name, body: QuotaChange, gateway: Gateway, admin: Owner) -> NamespaceReply:
    await gateway.quotas.change(name, body, by=admin)
    return await gateway.quotas.read(name)


@router.json(
    "DELETE",
    "/v1/namespaces/{name}",
    "Delete a namespace with all that it has",
    description="Revokes its tokens, then deletes a part at each request: repeat it until the state is `done`.",
)
async def remove(name: Name, gateway: Gateway, admin: Owner) -> NamespaceRemoval:
    return await gateway.namespace_remover.remove(name, by=admin)
