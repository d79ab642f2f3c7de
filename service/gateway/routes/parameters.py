"""Parameters that several routes share: the gateway's parts, the caller's grant and namespace, keys."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Header, Path

from ....compiler.api.admin import Role
from ....compiler.errors import Forbidden
from ...access.tokens import Grant
from ..http.authentication import requires
from ..parts import GatewayParts, GatewayTenant, gateway_of

Gateway = Annotated[GatewayParts, Depends(gateway_of)]


def _role(role: Role) -> tuple[Any, Any]:
    """Dependencies of a route that needs `role`: the caller's grant, and the parts of its namespace."""
    grant = Depends(requires(role))

    async def tenant(gateway: Gateway, caller: Grant = grant) -> GatewayTenant:
        return await gateway.tenants.of(caller.namespace)

    return grant, Depends(tenant)


_reader, _reader_tenant = _role("read")
_compiler, _compiler_tenant = _role("compile")
_tuner, _tuner_tenant = _role("tune")
_trainer, _trainer_tenant = _role("train")


def check_training(gateway: Gateway) -> None:
    """Raises Forbidden where the settings allow no training jobs."""
    if not gateway.settings.training:
        raise Forbidden(
            "this service runs no training jobs", hint="Its owner can set TORCHRELAY_SERVICE_TRAINING=1"
        )


_admin, _admin_tenant = _role("admin")

Reader = Annotated[Grant, _reader]
ReaderTenant = Annotated[GatewayTenant, _reader_tenant]
Compiler = Annotated[Grant, _compiler]
CompilerTenant = Annotated[GatewayTenant, _compiler_tenant]
Tuner = Annotated[Grant, _tuner]
TunerTenant = Annotated[GatewayTenant, _tuner_tenant]
Trainer = Annotated[Grant, _trainer]
TrainerTenant = Annotated[GatewayTenant, _trainer_tenant]
TrainingOn = Depends(check_training)
"""A route that starts a training job: refused where the settings do not allow them."""
Admin = Annotated[Grant, _admin]
AdminTenant = Annotated[GatewayTenant, _admin_tenant]
Owner = Annotated[Grant, Depends(requires("admin", everywhere=True))]
"""An administrator of all namespaces."""

CacheKey = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A request's cache key, 64 hex digits")]
LastEventId = Annotated[
    str,
    Header(description="Go on after this event of an earlier stream", pattern="^([0-9]{1,19}-[0-9]{1,19})?$"),
]
