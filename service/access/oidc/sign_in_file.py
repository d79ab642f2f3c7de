"""The file that says whose JWTs are accepted, and what each holder may do (TOML; docs/sign-in.md shows one)."""

from __future__ import annotations

import ipaddress
import ssl
import tomllib
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import httpx2
import msgspec
from msgspec import Meta, Struct

from ....compiler import decoding
from ....compiler.api.admin import Role
from ....compiler.api.sign_in import BearerKind
from ....compiler.errors import SettingsError

Text = Annotated[str, Meta(min_length=1, max_length=1024)]


class SignInRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who has `equals` in `claim` acts in `namespace` with these roles and permissions."""

    claim: Text | Annotated[list[Text], Meta(min_length=1, max_length=8)]
    """A claim's name; as a list, the path to a claim in claims: ["realm_access", "roles"]."""
    equals: Text
    """The claim is this text, or a list in which it is."""
    namespace: Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9-]{0,62}|\*)$")]
    """`*`: all."""
    roles: Annotated[frozenset[Role], Meta(min_length=1)]
    rate: Annotated[float, Meta(ge=0, le=1_000_000)] | None = None
    """Requests per second of each holder; none: the setting's; 0: no limit."""
    allow_source: bool = False
    """They may send source that runs at compile time."""
    allow_programs: bool = False
    """They may give programs to the clients of the namespace."""


class Issuer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One who signs tokens: an OpenID Connect provider, or the API server of a Kubernetes cluster."""

    issuer: Text
    """What the tokens' `iss` says, to the last slash; its discovery document is below it."""
    audience: Text
    """Tokens must be for it (`aud`)."""
    rules: Annotated[list[SignInRule], Meta(min_length=1, max_length=1000)]
    """Read in this order; the first that fits gives the namespace."""
    name_claim: Text = "preferred_username"
    """What the audit log calls a holder; without that claim it is `sub`."""
    client_id: Annotated[str, Meta(max_length=1024)] = ""
    """The id of `torchrelay login`, a public client with the device flow; '': nobody signs in there."""
    browsers: bool = False
    """Pages offer this sign-in too: the provider takes people back to `/sign-in/callback` of the gateway's address."""
    scopes: Annotated[list[Text], Meta(max_length=32)] = msgspec.field(
        default_factory=lambda: ["openid", "offline_access"]
    )
    """What `torchrelay login` asks for. offline_access: a token that renews the others."""
    bearer: BearerKind = "access_token"
    """Which token `torchrelay login` sends here: some providers' access tokens are no JWTs."""
    jwks_uri: Annotated[str, Meta(max_length=1024)] = ""
    """Where its keys are; '': where its discovery document says."""
    ca_file: Annotated[str, Meta(max_length=4096)] = ""
    """Authorities for its certificate, PEM; '': the system's."""
    token_file: Annotated[str, Meta(max_length=4096)] = ""
    """A file with a token that the provider wants to see before it shows its keys, as Kubernetes does; read each
    time."""
    allow_http: bool = False
    """Accept http:// from another machine: whoever is on the way can then forge tokens."""

    def allows(self, url: str) -> bool:
        """Whether keys may come from `url`: https, or this machine, or what `allow_http` says."""
        try:
            parts = urlsplit(url)
            host = parts.hostname or ""
        except ValueError:
            return False
        if not host or parts.username is not None or parts.fragment:
            return False
        return parts.scheme == "https" or (parts.scheme == "http" and (self.allow_http or is_loopback(host)))

    def certificates(self) -> ssl.SSLContext:
        """What checks its certificate; made once, since that takes 20 ms. Raises SettingsError."""
        if not self.ca_file:
            return httpx2.create_ssl_context()
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise SettingsError(
                f"the certificates in {self.ca_file} cannot be read: {error.strerror or error}",
                hint="Correct `ca_file`: certificates in PEM",
            ) from None


class SignInFile(Struct, frozen=True, forbid_unknown_fields=True):
    issuers: Annotated[list[Issuer], Meta(min_length=1, max_length=16)]


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_issuers(path: Path) -> list[Issuer]:
    """Raises SettingsError, which names the file and the field."""
    try:
        found = decoding.convert(tomllib.loads(path.read_text("utf-8")), type=SignInFile).issuers
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise SettingsError(f"{path} says who may sign in, and cannot be used: {error}") from None
    for each in found:
        if each.ca_file:
            each.certificates()
        for url in filter(None, (each.issuer, each.jwks_uri)):
            if not each.allows(url):
                raise SettingsError(
                    f"{path} has the issuer {url}, which is no https:// address",
                    hint="Use https://, or `allow_http = true` in a network that you trust",
                )
        if each.browsers and not each.client_id:
            raise SettingsError(f"{path} has `browsers` for {each.issuer} without a `client_id`")
    names = [each.issuer for each in found]
    if len(set(names)) < len(names):
        raise SettingsError(f"{path} has an issuer twice", hint="One entry for each, with all its rules")
    return found
