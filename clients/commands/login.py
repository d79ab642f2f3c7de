"""`torchrelay login URL`: a token from standard input, checked with the gateway, into the credentials file."""

from __future__ import annotations

import getpass
import sys
from typing import Annotated

import typer

from ...compiler.errors import SettingsError
from ..gateway.compile_client import GatewayClient
from ..gateway.credentials import write_credentials
from ..settings import credentials_path, load_settings

_LONGEST = 4096


def login(
    url: Annotated[str, typer.Argument(help="The gateway: https://relay.example.org")],
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Send the token over plain http:// to another machine.")
    ] = False,
) -> None:
    """Store URL, token and the gateway's public keys for every script of this user.

    Asks for the token, or reads one line of standard input. It is never an argument: those show in `ps`.
    """
    plain = load_settings(url=url)
    if not plain.url:
        raise SettingsError("the URL is empty", hint="Give https://HOST[:PORT]")
    if plain.url.startswith("http://") and not plain.loopback and not insecure:
        raise SettingsError(
            f"{plain.url} is not encrypted: others on the network could read the token and replace the keys to trust",
            hint="Use https://, or --insecure on a network that you trust",
        )
    settings = load_settings(url=url, token=_token())
    if not settings.token:
        raise SettingsError("there is no token on standard input", hint="Paste the one you were given")
    with GatewayClient(settings) as gateway:
        info = gateway.info()
    checked = load_settings(
        url=url,
        token=settings.token,
        public_keys=info.get("public_keys", []),
        namespace=info.get("namespace", ""),
    )
    path = credentials_path()
    write_credentials(
        path,
        url=checked.url,
        token=checked.token,
        public_keys=checked.public_keys,
        namespace=checked.namespace,
    )
    print(f"logged in to {checked.url}; credentials are in {path}")
    print(f"signing keys now trusted: {', '.join(map(str, info.get('key_ids', [])))}")


def _token() -> str:
    if sys.stdin.isatty():
        return getpass.getpass("Token (not shown): ").strip()
    return sys.stdin.readline(_LONGEST).strip()
