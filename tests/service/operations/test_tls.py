"""A gateway that speaks https:// itself: who may vouch for it, and whom no client talks to."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from certificates import Authority, Certificate
from service_parts import TOKEN, ArtifactPool, Running, StartGateway, compiled, graph
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.signing import Trust, read_key
from torchrelay.compiler.errors import GatewayUnreachable, SettingsError
from torchrelay.compiler.request import codec, key
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.gateway.server import create_server


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


@pytest.fixture
def encrypted(start_gateway: StartGateway, authority: Authority) -> Running:
    own = authority.issue("127.0.0.1", "localhost")
    running = start_gateway(tls_cert_file=own.cert, tls_key_file=own.key)
    running.url = f"https://127.0.0.1:{running.port}"
    return running


@pytest.fixture
def client(encrypted: Running, tmp_path: Path) -> Callable[..., GatewayClient]:
    def connect(url: str = "", **changes: Any) -> GatewayClient:
        return GatewayClient(
            ClientSettings(url=url or encrypted.url, token=TOKEN, cache_dir=tmp_path / "c", **changes)
        )

    return connect


def test_a_client_that_knows_the_authority_compiles_over_tls(
    encrypted: Running, client: Callable[..., GatewayClient], authority: Authority
) -> None:
    body = graph()
    name = key.key_of(codec.unpack_request(body))
    with client(ca_file=authority.file) as gateway:
        found = gateway.submit(body, name, cache_only=False, deadline=60).result()
        trust = Trust.of([read_key(text) for text in gateway.info()["public_keys"]], namespace="default")
    assert container.verify(found.data, trust, key=name)


def test_the_authority_may_come_from_ssl_cert_file_also_on_this_machine(
    client: Callable[..., GatewayClient], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with client() as gateway:
        assert gateway.info()["namespace"] == "default"


def test_who_is_not_vouched_for_gets_no_request(
    encrypted: Running, client: Callable[..., GatewayClient], tmp_path: Path, authority: Authority
) -> None:
    stranger = Authority(tmp_path / "elsewhere", "stranger")
    plain = encrypted.url.replace("https", "http")
    for gateway in (client(), client(ca_file=stranger.file), client(url=plain)):
        with gateway, pytest.raises(GatewayUnreachable):
            gateway.info()
    measured = encrypted.app.state.gateway.metrics.render(None, None, redis_up=True, signer_up=True)
    assert measured.count(b'route="/v1/info"') == 0


def test_a_certificate_for_another_name_is_refused(
    start_gateway: StartGateway, authority: Authority, client: Callable[..., GatewayClient]
) -> None:
    other = authority.issue("relay.example.org")
    running = start_gateway(tls_cert_file=other.cert, tls_key_file=other.key)
    with (
        client(url=f"https://127.0.0.1:{running.port}", ca_file=authority.file) as gateway,
        pytest.raises(GatewayUnreachable, match="certificate"),
    ):
        gateway.info()


def test_streams_and_large_answers_pass(start_gateway: StartGateway, authority: Authority) -> None:
    own = authority.issue("127.0.0.1", password=b"secret")
    running = start_gateway(
        ArtifactPool(seconds=0.5, member_bytes=3 << 20),
        tls_cert_file=own.cert,
        tls_key_file=own.key,
        tls_key_password="secret",
    )
    context = ssl.create_default_context(cafile=str(authority.file))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx2.Client(
        base_url=f"https://127.0.0.1:{running.port}",
        headers=headers,
        verify=context,
        timeout=30,
        trust_env=False,
    ) as http:
        assert len(compiled(http, graph())) > 3 << 20


@pytest.mark.parametrize(
    "harm", ["no key", "no certificate", "absent", "no PEM", "another's key", "no password"]
)
def test_what_is_no_certificate_stops_the_start(harm: str, authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue("a.example"), authority.issue("b.example")
    locked, text = authority.issue("c.example", password=b"secret"), tmp_path / "text"
    text.write_text("no PEM")
    given: dict[str, Certificate | tuple[Path | None, Path | None]] = {
        "no key": (good.cert, None),
        "no certificate": (None, good.key),
        "absent": (tmp_path / "absent", good.key),
        "no PEM": (text, good.key),
        "another's key": (good.cert, other.key),
        "no password": locked,
    }
    cert, key_file = given[harm]
    settings = ServiceSettings(state_dir=tmp_path / "state", tls_cert_file=cert, tls_key_file=key_file)
    pool: Any = ArtifactPool()
    with pytest.raises(SettingsError):
        create_server(settings, pool)


def test_an_authority_that_cannot_be_read_is_a_bad_setting(
    client: Callable[..., GatewayClient], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("no PEM")
    for file in (text, tmp_path / "absent"):
        with client(ca_file=file) as gateway, pytest.raises(SettingsError, match=file.name):
            gateway.info()
