"""`torchrelay login URL`: a token, by signing in or from standard input, checked with the gateway, into the credentials
file; `torchrelay logout` removes it, and `torchrelay whoami` shows what it allows."""

from __future__ import annotations

import getpass
import sys
from typing import Annotated

import typer

from ...compiler.api.sign_in import SignInProvider
from ...compiler.errors import RelayError, SettingsError
from ..gateway.compile_client import GatewayClient
from ..gateway.credentials import SignedIn, SignIn, keep_other, read_token_file, write_credentials
from ..gateway.sign_in.provider_client import DeviceCode, ProviderClient, sign_in_by_device
from ..settings import ClientSettings, credentials_path, load_settings, settings_and_origins
from . import output
from .output import Json

_LONGEST = 64 << 10
_Profile = Annotated[
    str,
    typer.Option(
        "--profile", envvar="TORCHRELAY_PROFILE", help="The credentials' name; default: the ones in use."
    ),
]


def login(
    url: Annotated[str, typer.Argument(help="The gateway: https://relay.example.org")],
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Send the token over plain http:// to another machine.")
    ] = False,
    device: Annotated[
        bool | None,
        typer.Option(
            "--device/--token",
            help="Sign in with a browser, on any device; or give a token. Default: sign in, if the gateway offers it "
            "and this is a terminal.",
        ),
    ] = None,
    issuer: Annotated[
        str, typer.Option("--issuer", help="Where to sign in, if the gateway accepts several providers.")
    ] = "",
    profile: _Profile = "",
) -> None:
    """Store URL, token and the gateway's public keys for every script of this user.

    Signs in with a browser, or asks for a token, or reads one line of standard input. A token is never an argument:
    those show in `ps`. Credentials for another gateway are kept, as a profile.
    """
    path = credentials_path(profile)
    plain = load_settings(url=url, profile="")
    if not plain.url:
        raise SettingsError("the URL is empty", hint="Give https://HOST[:PORT]")
    if plain.url.startswith("http://") and not plain.loopback and not insecure:
        raise SettingsError(
            f"{plain.url} is not encrypted: others on the network could read the token and replace the keys to trust",
            hint="Use https://, or --insecure on a network that you trust",
        )
    sign_in: SignIn | None = None
    asked = bool(device or issuer)
    provider = _provider(plain, issuer) if asked or (device is None and sys.stdin.isatty()) else None
    if provider is not None:
        token, sign_in = sign_in_by_device(plain, provider, lambda code: _show(plain, provider, code))
    elif asked:
        raise SettingsError(f"{plain.url} offers no such sign-in", hint="Ask an administrator for a token")
    else:
        token = _token()
    settings = load_settings(url=url, token=token, profile="")
    if not settings.token:
        raise SettingsError("there is no token on standard input", hint="Paste the one you were given")
    with GatewayClient(settings) as gateway:
        info = gateway.info()
    checked = load_settings(
        url=url,
        token=settings.token,
        public_keys=info.get("public_keys", []),
        namespace=info.get("namespace", ""),
        profile="",
    )
    kept = keep_other(path, checked.url)
    write_credentials(
        path,
        url=checked.url,
        token=checked.token,
        public_keys=checked.public_keys,
        namespace=checked.namespace,
        sign_in=sign_in,
    )
    print(f"logged in to {checked.url}; credentials are in {path}")
    if profile:
        print(f"scripts use them with TORCHRELAY_PROFILE={profile}, or with this URL")
    if kept is not None:
        print(f"those that were there are in {kept}: scripts use them with TORCHRELAY_PROFILE={kept.stem}")
    if sign_in is not None and not sign_in.refresh_token:
        print("the provider gives nothing to renew the token with: sign in again when it has expired")
    print(f"signing keys now trusted: {', '.join(map(str, info.get('key_ids', [])))}")


def whoami(json: Json = False) -> None:
    """Show the gateway, and what the token in use allows there, in which namespace, until when."""
    settings, origins = settings_and_origins()
    with GatewayClient(settings) as gateway:
        found = gateway.whoami()
    if json:
        output.print_json(found)
        return
    rows = [
        ("gateway", f"{settings.url} ({origins['url']})"),
        ("token", f"{found.name}, {found.id} ({origins['token' if settings.token else 'token_file']})"),
        ("may", ", ".join(found.permissions)),
        ("namespace", "all" if found.everywhere else found.namespace),
        ("expires", "never" if found.expires is None else f"{output.moment(found.expires)} UTC"),
    ]
    output.print_table(("", ""), rows)


def logout(profile: _Profile = "") -> None:
    """Remove the stored credentials. A sign-in also ends at its provider, if that offers it."""
    path = credentials_path(profile)
    if not path.exists():
        print("nobody is logged in here")
        return
    try:
        held = read_token_file(path)
    except (OSError, SettingsError):  # it has a token that an administrator gave, or nothing
        held = ""
    path.unlink(missing_ok=True)
    print(f"removed {path}")
    if isinstance(held, SignedIn) and held.sign_in.refresh_token:
        print(_end(held.sign_in))


def _end(sign_in: SignIn) -> str:
    """Has the provider end it; says whether it has."""
    try:
        with ProviderClient(load_settings(), sign_in.issuer, sign_in.client_id) as provider:
            if provider.revoke(sign_in.refresh_token):
                return f"the sign-in has ended at {sign_in.issuer} too"
    except RelayError as error:
        return f"the sign-in did not end at its provider: {error.message}"
    return (
        f"{sign_in.issuer} does not end sign-ins on request: a copy of the file would go on until it expires"
    )


def _provider(settings: ClientSettings, issuer: str) -> SignInProvider | None:
    """The first that the gateway accepts, or the one of this issuer."""
    with GatewayClient(
        ClientSettings(url=settings.url, ca_file=settings.ca_file, cache_dir=settings.cache_dir)
    ) as gateway:
        found = gateway.sign_in().providers
    return next((each for each in found if issuer in ("", each.issuer)), None)


def _show(settings: ClientSettings, provider: SignInProvider, code: DeviceCode) -> None:
    for line in (
        f"to sign in to {settings.url} with {provider.issuer},",
        f"open   {code.verification_uri_complete or code.verification_uri}",
        f"code   {code.user_code}",
    ):
        print("".join(filter(str.isprintable, line)), flush=True)  # nothing that would steer the terminal


def _token() -> str:
    if sys.stdin.isatty():
        return getpass.getpass("Token (not shown): ").strip()
    return sys.stdin.readline(_LONGEST).strip()
