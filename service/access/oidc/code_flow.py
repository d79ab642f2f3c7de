"""How a browser gets a token of an OpenID Connect provider: the authorization code flow with PKCE (RFC 6749, 7636).

The client is public: what proves that a code is answered by whom it was asked for is a secret that the browser keeps in
a cookie. The provider is shown its hash, and the secret itself with the code.
"""

from __future__ import annotations

import base64
import hashlib
from urllib.parse import urlencode, urlsplit

import httpx2
from msgspec import Struct

from ....compiler.errors import Unauthenticated, Unavailable
from .provider import ProviderHttp
from .sign_in_file import Issuer


class _Discovery(Struct):
    issuer: str
    authorization_endpoint: str
    token_endpoint: str


class _Tokens(Struct):
    access_token: str = ""
    id_token: str = ""


class CodeFlow:
    """Raises SettingsError. Its methods raise Unavailable where the provider cannot be reached."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self._http = ProviderHttp(issuer)

    @property
    def name(self) -> str:
        """What people know it by."""
        return urlsplit(self._issuer.issuer).netloc

    @staticmethod
    def state_of(secret: str) -> str:
        """What the provider sends back with the code."""
        return _hashed(f"state {secret}")

    async def address(self, secret: str, callback: str) -> str:
        """Where the browser goes. secret: the code verifier. callback: where it comes back to."""
        parameters = {
            "response_type": "code",
            "client_id": self._issuer.client_id,
            "redirect_uri": callback,
            "scope": " ".join(each for each in self._issuer.scopes if each != "offline_access"),
            "state": self.state_of(secret),
            "code_challenge": _hashed(secret),
            "code_challenge_method": "S256",
        }
        endpoint = (await self._discovered()).authorization_endpoint
        return f"{endpoint}{'&' if urlsplit(endpoint).query else '?'}{urlencode(parameters)}"

    async def token(self, code: str, secret: str, callback: str) -> str:
        """The token for a code; nothing of it is checked. Raises Unauthenticated too."""
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": callback,
            "client_id": self._issuer.client_id,
            "code_verifier": secret,
        }
        endpoint = (await self._discovered()).token_endpoint
        try:
            found = await self._http.document(endpoint, _Tokens, form)
        except ProviderHttp.ERRORS as error:
            if isinstance(error, httpx2.HTTPStatusError) and error.response.status_code < 500:
                said = f"the provider refuses the code: HTTP {error.response.status_code}"
                raise Unauthenticated(said, hint="Sign in again") from None
            raise _unreachable(self.name, error) from None
        return str(getattr(found, self._issuer.bearer))

    async def _discovered(self) -> _Discovery:
        try:
            return await self._http.discovered(_Discovery)
        except ProviderHttp.ERRORS as error:
            raise _unreachable(self.name, error) from None


def _hashed(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def _unreachable(name: str, error: Exception) -> Unavailable:
    return Unavailable(
        f"the sign-in provider {name} does not answer as it should: {str(error)[:200] or type(error).__name__}",
        hint="Try again, or sign in with a token",
    )
