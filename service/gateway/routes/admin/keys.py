"""/v1/trust and /v1/keys: the signing keys, for clients; the owner rotates, revokes and disowns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import Path
from msgspec import Meta, Struct

from .....compiler.api.admin import KeysReply
from .....compiler.artifact.trust_document import SignedDocument
from .....compiler.errors import Unavailable
from ....access.audit import AuditEvent
from ....access.tokens import Grant
from ....signing.trusted_keys import Ring, TrustedKeys
from ...http.json_routes import JsonRouter
from ..parameters import Gateway, Owner, Reader

router = JsonRouter("keys")

_YEARS_10 = 10 * 366 * 86400
_QUARTER = 90 * 86400

KeyId = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="A key's id, 16 hex digits")]


class RotateRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `POST /v1/keys`. `overlap_seconds`: how long the last key's signatures stay valid; null: for ever."""

    overlap_seconds: Annotated[int, Meta(ge=0, le=_YEARS_10)] | None = _QUARTER


@router.json("GET", "/v1/trust", "Keys, revocations and epoch, signed by every key of this installation")
async def trust(gateway: Gateway, _: Reader) -> SignedDocument:
    return gateway.keyring.document()


@router.json("GET", "/v1/keys", "The signing keys, for the service's owner")
async def keys(gateway: Gateway, _: Owner) -> KeysReply:
    return _reply(gateway.keyring.ring)


@router.json("POST", "/v1/keys", "Sign with a new key from now on")
async def rotate(body: RotateRequest, gateway: Gateway, by: Owner) -> KeysReply:
    ring = await _changed(gateway.keyring, gateway.keyring.rotate, body.overlap_seconds)
    await _log(gateway, by, "key_rotated", ring.keys[-1].id, f"after {ring.keys[-2].id}")
    return _reply(ring)


@router.json("DELETE", "/v1/keys/{key_id}", "Revoke a key: its signatures are not valid any more")
async def revoke(key_id: KeyId, gateway: Gateway, by: Owner) -> KeysReply:
    ring = await _changed(gateway.keyring, gateway.keyring.revoke, key_id.strip())
    await _log(gateway, by, "key_revoked", key_id.strip(), f"{ring.keys[-1].id} signs")
    return _reply(ring)


@router.json("POST", "/v1/keys/epoch", "Disown everything that was signed until now")
async def disown(gateway: Gateway, by: Owner) -> KeysReply:
    ring = await _changed(gateway.keyring, gateway.keyring.disown)
    await _log(gateway, by, "all_disowned", ring.keys[-1].id, f"epoch {ring.epoch}")
    return _reply(ring)


async def _changed(keyring: TrustedKeys, change: Callable[..., Ring], *arguments: Any) -> Ring:
    """The ring after a change of its files. Raises Unavailable."""
    try:
        return await keyring.in_thread(change, *arguments)
    except OSError as error:
        raise Unavailable(
            f"the folder of keys cannot be written: {error.strerror}",
            hint="Change the keys where the folder is writable; gateways read it again by themselves",
        ) from None


async def _log(
    gateway: Gateway,
    by: Grant,
    action: Literal["key_rotated", "key_revoked", "all_disowned"],
    signer: str,
    detail: str,
) -> None:
    """Call it after the change: a revocation must not wait for a Redis that is down. Raises RedisError."""
    event = AuditEvent(action=action, name=by.name, token=by.id, signer=signer, detail=detail)
    await gateway.tenants.default.audit.append(event)


def _reply(ring: Ring) -> KeysReply:
    return KeysReply(ring.keys[-1].id, ring.serial, ring.epoch, ring.keys, ring.revoked)
