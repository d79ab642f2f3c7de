"""Answer of `GET /v1/sign-in`, which needs no token: where `torchrelay login` gets one. Nothing in it is secret."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

BearerKind = Literal["access_token", "id_token"]
"""Which of a provider's tokens is sent to the gateway."""


class SignInProvider(Struct, frozen=True, kw_only=True):
    """An OpenID Connect provider whose tokens the gateway accepts. client_id: of a public client, without a secret,
    that may use the device flow (RFC 8628)."""

    issuer: str
    client_id: str
    scopes: list[str]
    bearer: BearerKind


class SignInReply(Struct, frozen=True):
    """providers: in the order of the service's file; empty if nobody signs in here."""

    providers: list[SignInProvider]
