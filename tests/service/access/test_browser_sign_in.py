"""A browser signs in at a real OpenID provider, and what is refused on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from openid_parts import OpenIdProvider, SigningIssuer, sign_in_file
from page_parts import BROWSER
from service_parts import Running
from torchrelay.compiler.errors import SettingsError
from torchrelay.service.access.oidc.sign_in_file import read_issuers

GROUPS = {"ada": ["vision"], "eve": ["visitors"]}


@pytest.fixture
def provider() -> Iterator[OpenIdProvider]:
    found = OpenIdProvider(GROUPS)
    yield found
    found.stop()


def issuer(url: str, **changes: Any) -> dict[str, Any]:
    rule = {"claim": "groups", "equals": "vision", "namespace": "vision", "roles": ["compile"]}
    entry = {"issuer": url, "audience": "torchrelay", "client_id": "torchrelay-cli", "rules": [rule]}
    return entry | {"scopes": ["openid", "offline_access", "groups"], "browsers": "true"} | changes


def written(path: Path, *entries: dict[str, Any]) -> str:
    text = Path(sign_in_file(path, *entries)).read_text()
    path.write_text(text.replace('"true"', "true"))
    return str(path)


@pytest.fixture
def gateway(provider: OpenIdProvider, start_gateway: Callable[..., Running], tmp_path: Path) -> Running:
    return start_gateway(sign_in_file=written(tmp_path / "sign-in.toml", issuer(provider.issuer)))


@pytest.fixture
def browser() -> Iterator[httpx2.Client]:
    with httpx2.Client(headers=BROWSER, trust_env=False, timeout=30) as client:
        yield client


def test_a_person_signs_in_and_sees_the_page_that_was_asked_for(
    provider: OpenIdProvider, gateway: Running, browser: httpx2.Client
) -> None:
    page = browser.get(f"{gateway.url}/runs")
    assert page.status_code == 401
    link = "sign-in/provider/0?then=runs"
    assert f'href="{link}"' in page.text and urlsplit(provider.issuer).netloc in page.text
    back = provider.sign_in(browser, f"{gateway.url}/{link}", "ada")
    ended = browser.get(back)
    assert (ended.status_code, ended.headers["location"]) == (303, "../runs")
    assert "httponly" in ended.headers["set-cookie"].lower()
    assert browser.get(f"{gateway.url}/runs").status_code == 200
    assert browser.get(f"{gateway.url}/administration").status_code == 403
    with gateway.http() as owner:
        assert "vision" in [each["name"] for each in owner.get("/v1/namespaces").json()]
    again = browser.get(back)
    assert again.status_code == 401 and "not begun here" in again.text  # the secret was of one sign-in


def test_who_has_no_group_is_told_so(
    provider: OpenIdProvider, gateway: Running, browser: httpx2.Client
) -> None:
    back = provider.sign_in(browser, f"{gateway.url}/sign-in/provider/0", "eve")
    ended = browser.get(back)
    assert ended.status_code == 403 and "may do nothing here" in ended.text
    assert browser.get(f"{gateway.url}/runs").status_code == 401


def test_an_answer_that_is_not_of_this_browsers_sign_in_is_refused(
    provider: OpenIdProvider, gateway: Running, browser: httpx2.Client
) -> None:
    """As one who signs a victim's browser in with an account of their own would make it."""
    address = provider.sign_in(browser, f"{gateway.url}/sign-in/provider/0", "ada")
    with httpx2.Client(headers=BROWSER, trust_env=False) as victim:
        assert victim.get(address).status_code == 401
        victim.get(f"{gateway.url}/sign-in/provider/0")
        refused = victim.get(address)
        assert refused.status_code == 401 and "not that of this sign-in" in refused.text
        assert victim.get(f"{gateway.url}/runs").status_code == 401


@pytest.mark.parametrize(
    "query",
    ["", "?state=&code=x", "?code=x&state=%00", "?error=access_denied&state=x", "?state=%F0%9F%92%A9"],
)
@pytest.mark.parametrize("cookie", ["", "0.short.runs", "x.y.z", "99.aaaaaaaaaaaaaaaaaaaaaaaaaaaa.runs"])
def test_nonsense_is_refused(gateway: Running, browser: httpx2.Client, query: str, cookie: str) -> None:
    answer = browser.get(
        f"{gateway.url}/sign-in/callback{query}", headers={"Cookie": f"torchrelay_sign_in={cookie}"}
    )
    assert answer.status_code == 401, answer.text
    assert "torchrelay_token" not in answer.headers.get("set-cookie", "")


def test_a_refused_code_and_a_persons_refusal_are_said(gateway: Running, browser: httpx2.Client) -> None:
    for answer, said in (("code=wrong", "refuses the code"), ("error=access_denied", "access_denied")):
        began = browser.get(f"{gateway.url}/sign-in/provider/0", params={"then": "https://evil.example"})
        state = parse_qs(urlsplit(began.headers["location"]).query)["state"][0]
        ended = browser.get(f"{gateway.url}/sign-in/callback?{answer}&state={state}")
        assert ended.status_code == 401 and said in ended.text
        assert "evil" not in ended.text


def test_a_provider_that_is_away_or_leads_elsewhere(
    provider: OpenIdProvider, start_gateway: Callable[..., Running], browser: httpx2.Client, tmp_path: Path
) -> None:
    other = SigningIssuer()
    listed = [issuer(provider.issuer), issuer(other.issuer)]
    gateway = start_gateway(sign_in_file=written(tmp_path / "sign-in.toml", *listed))
    provider.stop()
    assert browser.get(f"{gateway.url}/sign-in/provider/0").status_code == 503
    document = other.document
    for endpoints in ({}, {"authorization_endpoint": "http://evil.example/", "token_endpoint": "https://x/"}):
        other.document = lambda path, more=endpoints: document(path) | more  # type: ignore[method-assign,misc]
        answer = browser.get(f"{gateway.url}/sign-in/provider/1")
        assert answer.status_code == 503 and "does not answer as it should" in answer.text
    assert browser.get(f"{gateway.url}/sign-in/provider/2").status_code == 401
    other.stop()


def test_who_has_no_client_id_cannot_offer_it(tmp_path: Path) -> None:
    path = written(tmp_path / "sign-in.toml", issuer("https://one.example", client_id=""))
    with pytest.raises(SettingsError, match="without a `client_id`"):
        read_issuers(Path(path))
