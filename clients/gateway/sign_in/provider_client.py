"""Requests to an OpenID Connect provider: its discovery document, its tokens, the device flow. As a public client,
without a secret.

Redirects are never followed. Its certificate is checked against the system's authorities and TORCHRELAY_CA_FILE.
"""

from __future__ import annotations

import base64
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Self, TypeVar

import httpx2
import msgspec
from msgspec import Struct

from ....compiler import VERSION, decoding
from ....compiler.api.sign_in import BearerKind, SignInProvider
from ....compiler.errors import DeadlineExceeded, GatewayUnreachable, SettingsError, Unauthenticated
from ...atomic_file import file_errors
from ...settings import ClientSettings, is_loopback
from ..credentials import SignIn

_ANSWER_BYTES = 256 << 10
_ANSWER_SECONDS = 10.0
_LIFETIME_SECONDS = 300.0
"""The lifetime of a token whose answer names none."""
_RENEW_AFTER = 0.75
"""A token is renewed after this share of its lifetime."""
_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_SLOWER_SECONDS = 5.0
_LONGEST_SECONDS = 3600.0
T = TypeVar("T")


class Discovery(Struct, frozen=True):
    """What the client needs of a provider's discovery document."""

    issuer: str
    token_endpoint: str
    device_authorization_endpoint: str = ""
    revocation_endpoint: str = ""


class TokenAnswer(Struct, frozen=True):
    """What a token endpoint gives."""

    access_token: str = ""
    id_token: str = ""
    refresh_token: str = ""
    expires_in: float = _LIFETIME_SECONDS


class _Refusal(Struct, frozen=True):
    error: str
    error_description: str = ""


class _Claims(Struct):
    iat: float
    exp: float


class RefusedByProvider(Unauthenticated):
    """error: the provider's word for it, as RFC 6749 and 8628 list them."""

    def __init__(self, error: str, description: str = "") -> None:
        self.error = error
        said = "".join(filter(str.isprintable, description or error))[:300]
        super().__init__(f"the sign-in provider refuses: {said}", hint="Run `torchrelay login` again")


class ProviderClient:
    """One provider, one client id. Raises GatewayUnreachable where the provider cannot be reached or is none."""

    def __init__(self, settings: ClientSettings, issuer: str, client_id: str) -> None:
        self._issuer = _encrypted(issuer)
        self._client_id = client_id
        self._http = httpx2.Client(
            headers={"User-Agent": f"torchrelay/{VERSION}", "Accept": "application/json"},
            follow_redirects=False,
            trust_env=not is_loopback(issuer),
            verify=_certificates(settings),
            timeout=httpx2.Timeout(_ANSWER_SECONDS, connect=settings.connect_timeout),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def discover(self) -> Discovery:
        url = f"{self._issuer.rstrip('/')}/.well-known/openid-configuration"
        found = self._read(self._send("GET", url), Discovery)
        if found.issuer != self._issuer:
            raise GatewayUnreachable(f"{url} is the document of {found.issuer[:200]!r}", hint="")
        return found

    def post(self, endpoint: str, fields: Mapping[str, str], type: type[T]) -> T:
        """Raises RefusedByProvider."""
        return self._read(self._post(endpoint, fields), type)

    def refresh(self, refresh_token: str) -> TokenAnswer:
        """Raises RefusedByProvider."""
        fields = {"grant_type": "refresh_token", "refresh_token": refresh_token}
        return self.post(self.discover().token_endpoint, fields, TokenAnswer)

    def revoke(self, refresh_token: str) -> bool:
        """Whether the provider offers to revoke it (RFC 7009), and has."""
        endpoint = self.discover().revocation_endpoint
        if not endpoint:
            return False
        fields = {"token": refresh_token, "token_type_hint": "refresh_token"}
        return self._post(endpoint, fields).status_code == 200

    def _post(self, endpoint: str, fields: Mapping[str, str]) -> httpx2.Response:
        return self._send("POST", _encrypted(endpoint), {"client_id": self._client_id, **fields})

    def _send(self, method: str, url: str, fields: Mapping[str, str] | None = None) -> httpx2.Response:
        """The answer, with its body."""
        try:
            with self._http.stream(method, url, data=fields) as response:
                body = bytearray()
                for part in response.iter_bytes():
                    body += part
                    if len(body) > _ANSWER_BYTES:
                        raise GatewayUnreachable(f"{url} answers more than {_ANSWER_BYTES} bytes", hint="")
                return httpx2.Response(response.status_code, content=bytes(body))
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise GatewayUnreachable(
                f"the sign-in provider at {url} cannot be reached: {error or type(error).__name__}",
                hint="Check the network and TORCHRELAY_CA_FILE",
            ) from None

    def _read(self, answer: httpx2.Response, type: type[T]) -> T:
        try:
            if answer.status_code == 200:
                return decoding.from_json(answer.content, type=type, strict=False)  # some send "3600"
            refusal = decoding.from_json(answer.content, type=_Refusal)
        except msgspec.MsgspecError as error:
            raise GatewayUnreachable(
                f"the sign-in provider {self._issuer} answers HTTP {answer.status_code} in another form: {error}",
                hint="Ask an administrator of the service whether that is its address",
            ) from None
        raise RefusedByProvider(refusal.error, refusal.error_description)


def signed_in(
    answer: TokenAnswer, *, issuer: str, client_id: str, bearer: BearerKind, refresh_token: str = ""
) -> tuple[str, SignIn]:
    """The token for the gateway, and how it is renewed. refresh_token: the one until now, which stays if the answer
    has no other. Raises Unauthenticated."""
    token = answer.id_token if bearer == "id_token" else answer.access_token
    if not token:
        raise Unauthenticated(
            f"the sign-in provider gave no {bearer}", hint="An administrator must set `scopes` or `bearer`"
        )
    now = time.time()
    seconds = _id_token_seconds(token, answer.expires_in) if bearer == "id_token" else answer.expires_in
    return token, SignIn(
        issuer=issuer,
        client_id=client_id,
        bearer=bearer,
        refresh_token=answer.refresh_token or refresh_token,
        renew=now + _RENEW_AFTER * seconds,
        expires=now + seconds,
    )


def _id_token_seconds(token: str, otherwise: float) -> float:
    """How long a new ID token holds: `expires_in` of an answer is the access token's."""
    try:
        claims = base64.urlsafe_b64decode(f"{token.split('.')[1]}==")
        found = decoding.from_json(claims, type=_Claims)
    except (IndexError, ValueError, msgspec.MsgspecError):
        return otherwise
    return found.exp - found.iat


def _encrypted(url: str) -> str:
    """Raises SettingsError for an address to which nobody should send secrets."""
    if url.startswith("https://") or (url.startswith("http://") and is_loopback(url)):
        return url
    raise SettingsError(
        f"the sign-in provider's address {url[:200]!r} is not encrypted", hint="It must be https://"
    )


def _certificates(settings: ClientSettings) -> ssl.SSLContext:
    context = httpx2.create_ssl_context()
    if settings.ca_file is not None:
        hint = "Correct TORCHRELAY_CA_FILE: certificates in PEM"
        with file_errors(f"the certificates in {settings.ca_file}", "read", hint=hint):
            context.load_verify_locations(cafile=str(settings.ca_file))
    return context


# --- the device flow (RFC 8628): a person approves on any device; this machine asks until it is done -----------


class DeviceCode(Struct, frozen=True):
    """The provider's answer. expires_in, interval: seconds."""

    device_code: str
    user_code: str
    verification_uri: str
    verification_uri_complete: str = ""
    expires_in: float = 600.0
    interval: float = 5.0


def sign_in_by_device(
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
