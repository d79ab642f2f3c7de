"""The device flow (RFC 8628): a person approves on any device with a browser; this machine asks until it is done."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct

from ....compiler.api.sign_in import SignInProvider
from ....compiler.errors import DeadlineExceeded, GatewayUnreachable, SettingsError
from ...settings import ClientSettings
from ..credentials import SignIn
from .provider_client import ProviderClient, RefusedByProvider, TokenAnswer, signed_in

_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_SLOWER_SECONDS = 5.0
_LONGEST_SECONDS = 3600.0


class DeviceCode(Struct, frozen=True):
    """The provider's answer. expires_in, interval: seconds."""

    device_code: str
    user_code: str
    verification_uri: str
    verification_uri_complete: str = ""
    expires_in: float = 600.0
    interval: float = 5.0


def sign_in(
    settings: ClientSettings, provider: SignInProvider, show: Callable[[DeviceCode], None]
) -> tuple[str, SignIn]:
    """The token for the gateway, and how it is renewed. show: called once, says to the person where to go. Blocks until
    the person has approved. Raises RefusedByProvider, DeadlineExceeded, GatewayUnreachable, SettingsError."""
    with ProviderClient(settings, provider.issuer, provider.client_id) as client:
        found = client.discover()
        if not found.device_authorization_endpoint:
            raise SettingsError(
                f"{provider.issuer} offers no device flow", hint="`torchrelay login --token` takes a token"
            )
        scope = {"scope": " ".join(provider.scopes)}
        code = client.post(found.device_authorization_endpoint, scope, DeviceCode)
        show(code)
        answer = _await_approval(client, found.token_endpoint, code)
    return signed_in(answer, issuer=provider.issuer, client_id=provider.client_id, bearer=provider.bearer)


def _await_approval(client: ProviderClient, endpoint: str, code: DeviceCode) -> TokenAnswer:
    fields = {"grant_type": _GRANT, "device_code": code.device_code}
    until = time.monotonic() + min(code.expires_in, _LONGEST_SECONDS)
    interval = max(code.interval, 1.0)
    while time.monotonic() + interval < until:
        time.sleep(interval)
        try:
            return client.post(endpoint, fields, TokenAnswer)
        except RefusedByProvider as refusal:
            if refusal.error == "slow_down":
                interval += _SLOWER_SECONDS
            elif refusal.error != "authorization_pending":
                raise
        except GatewayUnreachable:  # RFC 8628, 3.5: ask less often, and go on
            interval *= 2
    raise DeadlineExceeded("nobody approved the sign-in in time", hint="Run `torchrelay login` again")
