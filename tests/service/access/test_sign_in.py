"""Signing in with a real OpenID provider: `torchrelay login`, a compile, renewal, `torchrelay logout`."""

from __future__ import annotations

import json
import os
import pty
import re
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND
from openid_parts import OpenIdProvider, sign_in_file
from service_parts import TOKEN, GatewayProcess, client_of, graph
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import load_settings
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.signing import Trust, read_key
from torchrelay.compiler.errors import Unauthenticated
from torchrelay.compiler.request import codec, key

GROUPS = {"ada": ["staff", "vision"], "eve": ["visitors"]}
SHORT = 4
"""Seconds that an access token holds."""


@pytest.fixture
def provider() -> Iterator[OpenIdProvider]:
    found = OpenIdProvider(GROUPS, seconds=SHORT)
    yield found
    found.stop()


@pytest.fixture
def gateway(
    provider: OpenIdProvider,
    settings: dict[str, Any],
    start_process: Callable[[float], GatewayProcess],
    tmp_path: Path,
) -> GatewayProcess:
    settings["sign_in_file"] = sign_in_file(tmp_path / "sign-in.toml", _issuer(provider))
    return start_process(0.1)


def _issuer(provider: OpenIdProvider, **changes: str) -> dict[str, Any]:
    rule = {"claim": "groups", "equals": "vision", "namespace": "vision", "roles": ["compile"]}
    entry = {
        "issuer": provider.issuer,
        "audience": "torchrelay",
        "client_id": provider.client_id,
        "scopes": ["openid", "offline_access", "groups"],
        "rules": [rule],
    }
    return entry | changes


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of a user who has only heard of the gateway; of this process too."""
    for name in [name for name in os.environ if name.startswith(("TORCHRELAY_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return dict(os.environ) | {"COLUMNS": "200"}


def _command(
    environment: dict[str, str], *arguments: str, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env=environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _login(
    environment: dict[str, str],
    url: str,
    provider: OpenIdProvider,
    login: str,
    *,
    decline: bool = False,
) -> tuple[int, str, str]:
    """Exit status and output of `torchrelay login` on a terminal, while a person approves or declines at the provider's
    pages."""
    own, terminal = pty.openpty()
    command = _command(environment, "login", url, stdin=terminal)
    try:
        assert command.stdout is not None
        head = "".join(command.stdout.readline() for _ in range(3))
        page, code = re.search(r"open +(\S+)", head), re.search(r"code +(\S+)", head)
        assert page and code, head + command.communicate(timeout=30)[1]
        assert provider.issuer in head and url in head
        provider.approve(page[1], code[1], login, decline=decline)
        out, err = command.communicate(timeout=60)
    finally:
        command.kill()
        os.close(own)
        os.close(terminal)
    return command.returncode, head + out, err


def _compile(size: int) -> None:
    """A graph, by the credentials file, and verified by the keys in it."""
    body = graph(size)
    name = key.key_of(codec.unpack_request(body))
    settings = load_settings()
    with GatewayClient(settings) as client:
        found = client.submit(body, name, cache_only=False, deadline=60).result()
    trust = Trust.of([read_key(text) for text in settings.public_keys], namespace=settings.namespace)
    assert container.verify(found.data, trust, key=name)


def test_who_signs_in_compiles_in_the_teams_namespace_until_logging_out(
    provider: OpenIdProvider, gateway: GatewayProcess, environment: dict[str, str], tmp_path: Path
) -> None:
    status, out, err = _login(environment, gateway.url, provider, "ada")
    assert status == 0, err
    path = tmp_path / "config" / "torchrelay" / "credentials.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = json.loads(path.read_bytes())
    assert first["namespace"] == "vision"
    assert first["token"] not in out + err and first["sign_in"]["refresh_token"] not in out + err

    _compile(8)
    with client_of(gateway.url, TOKEN) as owner:
        (entry,) = [
            each
            for each in owner.get("/v1/audit?namespace=vision").json()["entries"]
            if each["action"] == "compile"
        ]
        assert (entry["name"], len(entry["token"])) == ("ada", 16)
        assert "vision" in [each["name"] for each in owner.get("/v1/namespaces").json()]

    expired = first["sign_in"] | {"renew": time.time(), "expires": time.time()}
    path.write_text(json.dumps(first | {"sign_in": expired}))
    _compile(16)
    second = json.loads(path.read_bytes())
    assert second["token"] != first["token"]
    assert second["sign_in"]["refresh_token"] != first["sign_in"]["refresh_token"]
    assert second["sign_in"]["expires"] > first["sign_in"]["expires"]

    command = _command(environment, "logout")
    out, err = command.communicate(timeout=60)
    assert (command.returncode, path.exists()) == (0, False), err
    assert "has ended" in out
    assert load_settings().url == ""


def test_an_id_token_serves_too_and_is_renewed_by_its_own_lifetime(
    provider: OpenIdProvider,
    settings: dict[str, Any],
    start_process: Callable[[float], GatewayProcess],
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    """This provider's ID tokens hold longer than its access tokens."""
    changes = {"bearer": "id_token", "audience": provider.client_id}
    settings["sign_in_file"] = sign_in_file(tmp_path / "sign-in.toml", _issuer(provider, **changes))
    gateway = start_process(0.1)
    status, _, err = _login(environment, gateway.url, provider, "ada")
    assert status == 0, err
    path = tmp_path / "config" / "torchrelay" / "credentials.json"
    held = json.loads(path.read_bytes())
    assert abs(held["sign_in"]["expires"] - time.time() - 5 * SHORT) < SHORT
    held["sign_in"]["renew"] = time.time()
    path.write_bytes(json.dumps(held).encode())
    _compile(8)
    renewed = json.loads(
        path.read_bytes()
    )  # its token may be the same: made within one second, of the same claims
    assert renewed["sign_in"]["refresh_token"] != held["sign_in"]["refresh_token"]
    assert renewed["sign_in"]["renew"] > held["sign_in"]["renew"] + 2 * SHORT


def test_clients_that_share_the_credentials_renew_one_after_the_other(
    provider: OpenIdProvider, gateway: GatewayProcess, environment: dict[str, str], tmp_path: Path
) -> None:
    """The provider takes each refresh token once, and ends the sign-in if one comes again."""
    status, _, err = _login(environment, gateway.url, provider, "ada")
    assert status == 0, err
    path = tmp_path / "config" / "torchrelay" / "credentials.json"
    clients = [GatewayClient(load_settings()) for _ in range(6)]
    tokens = set()
    with ThreadPoolExecutor(len(clients)) as threads:
        for _ in range(3):
            held = json.loads(path.read_bytes())
            tokens.add(held["token"])
            time.sleep(max(0.0, held["sign_in"]["expires"] - time.time()))
            infos = list(threads.map(lambda client: client.info()["namespace"], clients))
            assert infos == ["vision"] * len(clients)
    assert len(tokens) == 3
    for client in clients:
        client.close()


def test_a_sign_in_that_cannot_be_renewed_ends_and_says_so(
    provider: OpenIdProvider, gateway: GatewayProcess, environment: dict[str, str], tmp_path: Path
) -> None:
    status, _, err = _login(environment, gateway.url, provider, "ada")
    assert status == 0, err
    provider.stop()
    path = tmp_path / "config" / "torchrelay" / "credentials.json"
    held = json.loads(path.read_bytes())
    held["sign_in"] |= {"renew": time.time(), "expires": time.time() + 600}
    path.write_text(json.dumps(held))
    with GatewayClient(load_settings()) as client:
        assert client.info()["namespace"] == "vision"  # the token still holds
    held["sign_in"]["expires"] = time.time()
    path.write_text(json.dumps(held))
    with (
        GatewayClient(load_settings()) as client,
        pytest.raises(Unauthenticated, match=r"cannot be renewed.*torchrelay login"),
    ):
        client.info()
    assert json.loads(path.read_bytes()) == held


def test_whoever_has_no_group_signs_in_and_gets_nothing(
    provider: OpenIdProvider, gateway: GatewayProcess, environment: dict[str, str], tmp_path: Path
) -> None:
    status, _, err = _login(environment, gateway.url, provider, "eve")
    assert status == 1
    assert "eve has signed in and may do nothing here" in err
    assert not (tmp_path / "config" / "torchrelay" / "credentials.json").exists()


def test_a_sign_in_that_is_declined_changes_nothing(
    provider: OpenIdProvider, gateway: GatewayProcess, environment: dict[str, str], tmp_path: Path
) -> None:
    status, _, err = _login(environment, gateway.url, provider, "ada", decline=True)
    assert status == 1
    assert "refuses" in err and len(err.splitlines()) == 1
    assert not (tmp_path / "config" / "torchrelay" / "credentials.json").exists()


def test_a_gateway_without_a_provider_asks_for_a_token(
    start_process: Callable[[float], GatewayProcess], environment: dict[str, str]
) -> None:
    gateway = start_process(0.1)
    with client_of(gateway.url, None) as http:
        assert http.get("/v1/sign-in").json() == {"providers": []}
    command = _command(environment, "login", gateway.url, "--device")
    _, err = command.communicate(timeout=60)
    assert command.returncode == 2
    assert "offers no such sign-in" in err
