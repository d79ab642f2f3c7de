"""JWTs of other issuers: whose are accepted, what their holders may do, and what is refused in which words."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from certificates import Authority
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from openid_parts import SigningIssuer, sign_in_file
from service_parts import Running, StartGateway, compiled, graph, post
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.errors import SettingsError, Unauthenticated
from torchrelay.service.access import unknown_tokens
from torchrelay.service.access.oidc import issuer_keys, jwt_tokens
from torchrelay.service.access.oidc.sign_in_file import read_issuers
from waiting import wait_until

RULES = [
    {"claim": "groups", "equals": "vision", "namespace": "vision", "roles": ["compile"]},
    {"claim": "groups", "equals": "tuners", "namespace": "vision", "roles": ["tune"], "allow_source": True},
    {"claim": ["realm_access", "roles"], "equals": "relay-admin", "namespace": "*", "roles": ["admin"]},
    {"claim": "email", "equals": "ada@example.org", "namespace": "default", "roles": ["read"]},
    {"claim": "sub", "equals": "system:serviceaccount:ml:trainer", "namespace": "ml", "roles": ["compile"]},
    {"claim": "groups", "equals": "slow", "namespace": "default", "roles": ["read"], "rate": 0.1},
]
Ask = Callable[..., httpx2.Response]


@pytest.fixture
def issuer() -> Iterator[SigningIssuer]:
    found = SigningIssuer()
    yield found
    found.stop()


@pytest.fixture
def start(start_gateway: StartGateway, tmp_path: Path, issuer: SigningIssuer) -> Callable[..., Running]:
    """A gateway that accepts the issuer's tokens; arguments change its entry in the file."""

    def begin(**changes: Any) -> Running:
        entry = {"issuer": issuer.issuer, "audience": "torchrelay", "rules": RULES} | changes
        return start_gateway(sign_in_file=sign_in_file(tmp_path / "sign-in.toml", entry))

    return begin


@pytest.fixture
def relay(start: Callable[..., Running]) -> Running:
    return start()


@pytest.fixture
def ask(relay: Running) -> Ask:
    def send(token: str, path: str = "/v1/info") -> httpx2.Response:
        with relay.http(token) as http:
            return http.get(path)

    return send


@pytest.fixture
def http_owner(relay: Running) -> Iterator[httpx2.Client]:
    with relay.http() as http:
        yield http


def _error(answer: httpx2.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _signed(issuer: SigningIssuer, header: dict[str, Any], sign: Callable[[bytes], bytes]) -> str:
    """A token that no library would make."""
    parts = [header, issuer.claims(groups=["vision"])]
    head = ".".join(_encoded(json.dumps(part).encode()) for part in parts)
    return f"{head}.{_encoded(sign(head.encode()))}"


def test_a_group_gives_namespace_and_roles_and_the_compile_is_signed_for_it(
    relay: Running, issuer: SigningIssuer, ask: Ask, http_owner: httpx2.Client
) -> None:
    token = issuer.token(groups=["staff", "vision"], preferred_username="ada lovelace")
    assert ask(token).json()["namespace"] == "vision"
    with relay.http(token) as http:
        assert compiled(http, graph())
        assert http.get("/v1/tokens").status_code == 403
        assert http.get("/v1/stats?namespace=default").status_code == 403
    assert relay.pool.namespaces == ["vision"]
    entries = http_owner.get("/v1/audit?namespace=vision").json()["entries"]
    (entry,) = [each for each in entries if each["action"] == "compile"]
    assert entry["name"] == "ada-lovelace"


def test_rules_of_one_namespace_add_up_and_the_first_rule_chooses_it(
    relay: Running, issuer: SigningIssuer, ask: Ask
) -> None:
    with relay.http(issuer.token(groups=["vision"])) as http:
        assert http.get("/v1/tunings").status_code == 200
        assert http.post("/v1/tunings", json={}).status_code == 403
    with relay.http(issuer.token(groups=["tuners", "vision"])) as http:
        assert http.post("/v1/tunings", json={}).status_code == 422  # it may, and then looks at what was sent
        assert post(http, graph()).status_code in (200, 202)
    both = issuer.token(groups=["vision"], email="ada@example.org", email_verified=True)
    assert ask(both).json()["namespace"] == "vision"


def test_a_claim_in_claims_can_make_an_administrator_of_all(issuer: SigningIssuer, ask: Ask) -> None:
    token = issuer.token(realm_access={"roles": ["relay-admin"]})
    assert ask(token, "/v1/tokens").status_code == 200
    assert ask(token, "/v1/stats").json()["namespaces"].keys() == {"default"}


@pytest.mark.parametrize("path", ["/v1/info", "/v1/stats"])
def test_whom_no_rule_names_is_forbidden(issuer: SigningIssuer, ask: Ask, path: str) -> None:
    for claims in (
        {},
        {"groups": ["visions"]},
        {"groups": "visio"},
        {"groups": {"vision": True}},
        {"realm_access": "relay-admin"},
        {"realm_access.roles": ["relay-admin"]},
        {"email": "ada@example.org"},
        {"email": "ada@example.org", "email_verified": "true"},
    ):
        assert _error(ask(issuer.token(**claims), path))[:2] == (403, "forbidden"), claims


def test_every_accepted_algorithm_works_and_a_new_key_counts_from_its_first_token(
    issuer: SigningIssuer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_keys, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(jwt_tokens, "REMEMBERED_SECONDS", 0.0)
    for algorithm in ("RS256", "PS256", "ES256", "EdDSA"):
        old = issuer.token(groups=["vision"])
        issuer.rotate(algorithm)
        assert ask(issuer.token(groups=["vision"])).status_code == 200
        assert _error(ask(old)) == (401, "unauthenticated", "the token is not known")


def test_a_key_that_the_issuer_withdraws_signs_nothing_soon_after(
    issuer: SigningIssuer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PAUSE_SECONDS", "REFRESH_SECONDS"):
        monkeypatch.setattr(issuer_keys, name, 0.0)
    monkeypatch.setattr(jwt_tokens, "REMEMBERED_SECONDS", 1.0)
    old = issuer.token(groups=["vision"])
    assert ask(old).status_code == 200
    issuer.rotate("ES256")
    assert ask(old).status_code == 200  # remembered
    wait_until(lambda: ask(old).status_code == 401, seconds=10)


def test_who_has_no_valid_signature_learns_nothing(issuer: SigningIssuer, ask: Ask) -> None:
    public = issuer.key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    good = issuer.token(groups=["vision"])
    head, _, signature = good.rpartition(".")
    stranger = SigningIssuer()
    stranger.stop()
    header = {"typ": "JWT", "kid": issuer.kid}

    def with_secret(text: bytes) -> bytes:
        return hmac.digest(public, text, hashlib.sha256)

    wrong = {
        "no algorithm": _signed(issuer, header | {"alg": "none"}, lambda _: b""),
        "no algorithm, in other letters": _signed(issuer, header | {"alg": "nOnE"}, lambda _: b""),
        "an algorithm that is no text": _signed(issuer, header | {"alg": ["RS256"]}, lambda _: b"x"),
        "an HMAC with the public key": _signed(issuer, header | {"alg": "HS256"}, with_secret),
        "another algorithm than the key's": _signed(issuer, header | {"alg": "RS512"}, lambda _: b"x" * 256),
        "no signature": f"{head}.",
        "a changed signature": f"{head}.{'A' * len(signature)}",
        "another key under that name": stranger.token(
            iss=issuer.issuer, groups=["vision"], headers={"kid": issuer.kid}
        ),
        "an unknown key": issuer.token(groups=["vision"], headers={"kid": "unknown"}),
        "no key's name": issuer.token(groups=["vision"], headers={"kid": None}),
        "an unknown issuer": stranger.token(groups=["vision"]),
        "almost the issuer": issuer.token(iss=f"{issuer.issuer}/", groups=["vision"]),
        "a logout token": issuer.token(groups=["vision"], headers={"typ": "logout+jwt"}),
        "an unknown critical header": issuer.token(groups=["vision"], headers={"crit": ["x"], "x": 1}),
        "a header that is nested too deep": f"{_encoded(b'[' * 9000)}.{_encoded(b'{}')}.x",
        "claims that are nested too deep": f"{good.partition('.')[0]}.{_encoded(b'[' * 9000)}.x",
        "no JSON": "a.b.c",
        "too long": issuer.token(groups=["vision"], padding="x" * 16384),
    }
    told = {name: _error(ask(token)) for name, token in wrong.items()}
    assert {name: answer for name, answer in told.items() if answer[:2] != (401, "unauthenticated")} == {}
    assert {answer[2] for answer in told.values()} == {"the token is not known"}
    assert ask(good).status_code == 200


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exp": -31}, "has expired"),
        ({"nbf": 60}, "not yet valid"),
        ({"iat": 60}, "not yet valid"),
        ({"aud": "other"}, "another audience"),
        ({"aud": ["other", "torchrelays"]}, "another audience"),
        ({"aud": None}, "aud"),
        ({"exp": None}, "exp"),
        ({"sub": None}, "sub"),
        ({"sub": 7}, "[Ss]ubject"),
    ],
    ids=str,
)
def test_a_holder_is_told_which_claim_does_not_hold(
    issuer: SigningIssuer, ask: Ask, changes: dict[str, Any], words: str
) -> None:
    now = time.time()
    timed = {
        name: int(now + value) if name in ("exp", "nbf", "iat") and value is not None else value
        for name, value in changes.items()
    }
    status, code, message = _error(ask(issuer.token(groups=["vision"], **timed)))
    assert (status, code) == (401, "unauthenticated")
    assert re.search(words, message), message


def test_clocks_may_differ_a_little(issuer: SigningIssuer, ask: Ask) -> None:
    now = int(time.time())
    assert ask(issuer.token(groups=["vision"], exp=now - 10)).status_code == 200
    assert ask(issuer.token(groups=["vision"], nbf=now + 10, iat=now + 10)).status_code == 200


def test_strangers_make_the_gateway_ask_the_issuer_once_in_a_while(issuer: SigningIssuer, ask: Ask) -> None:
    for number in range(20):
        assert ask(issuer.token(groups=["vision"], headers={"kid": f"unknown-{number}"})).status_code == 401
    assert issuer.asked == ["/.well-known/openid-configuration", "/keys"]
    assert ask(issuer.token(groups=["vision"])).status_code == 200
    assert len(issuer.asked) == 2


def test_an_address_that_tries_jwts_waits_and_a_good_one_does_not(
    issuer: SigningIssuer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown_tokens, "AT_ONCE", 5)
    monkeypatch.setattr(unknown_tokens, "PER_SECOND", 0.01)
    good, unused = issuer.token(groups=["vision"]), issuer.token(groups=["vision"], jti="2")
    assert ask(good).status_code == 200
    wrong = [issuer.token(headers={"kid": f"unknown-{number}"}) for number in range(6)]
    assert [ask(each).status_code for each in wrong] == [401] * 5 + [429]
    assert [ask(good).status_code, ask(unused).status_code] == [200, 200]


def test_one_holder_has_one_rate_whatever_tokens(issuer: SigningIssuer, ask: Ask) -> None:
    tokens = [issuer.token(groups=["slow"], jti=str(number)) for number in range(3)]
    answers = [ask(token) for token in tokens]
    assert [answer.status_code for answer in answers] == [200, 429, 429]
    assert ask(issuer.token(groups=["slow"], sub="another")).status_code == 200


def test_while_the_issuer_is_away_known_keys_count_but_not_for_ever(
    issuer: SigningIssuer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_keys, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(issuer_keys, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(jwt_tokens, "REMEMBERED_SECONDS", 0.0)
    known = issuer.token(groups=["vision"])
    assert ask(known).status_code == 200
    issuer.stop()
    for _ in range(3):
        assert ask(known).status_code == 200
    monkeypatch.setattr(issuer_keys, "USABLE_SECONDS", 0.0)
    assert _error(ask(known))[:2] == (503, "unavailable")
    monkeypatch.setattr(issuer_keys, "USABLE_SECONDS", 60.0)
    issuer.start()
    assert ask(known).status_code == 200


def test_an_issuer_that_was_never_there_is_no_reason_to_refuse_other_tokens(
    start: Callable[..., Running], issuer: SigningIssuer
) -> None:
    issuer.stop()
    relay = start()
    with relay.http(issuer.token(groups=["vision"])) as http, relay.http() as owner:
        begun = time.monotonic()
        for _ in range(5):
            assert http.get("/v1/info").status_code == 503
        assert time.monotonic() - begun < 5
        assert owner.get("/v1/info").status_code == 200
        made = owner.post("/v1/tokens", json={"name": "x", "roles": ["read"]}).json()["token"]
    with relay.http(made) as http:
        assert http.get("/v1/info").status_code == 200
    issuer.start()


@pytest.mark.parametrize("harm", ["too large", "another's"])
def test_a_document_that_cannot_be_the_issuers_brings_no_keys(
    issuer: SigningIssuer, ask: Ask, harm: str
) -> None:
    token = issuer.token(groups=["vision"])
    if harm == "too large":
        issuer.padding = "x" * (256 << 10)
    else:
        issuer.issuer += "/other"
    assert ask(token).status_code == 503
    assert issuer.asked == ["/.well-known/openid-configuration"]


def test_an_issuers_certificate_is_checked_against_the_authorities_that_the_file_names(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "certificates")
    encrypted = SigningIssuer(certificate=authority.issue("127.0.0.1"))
    token = encrypted.token(groups=["vision"])
    try:
        for named, status in (({}, 503), ({"ca_file": str(authority.file)}, 200)):
            with start(issuer=encrypted.issuer, **named).http(token) as http:
                assert http.get("/v1/info").status_code == status
    finally:
        encrypted.stop()


def test_keys_may_be_where_the_file_says(start: Callable[..., Running], issuer: SigningIssuer) -> None:
    with start(jwks_uri=f"{issuer.issuer}/keys").http(issuer.token(groups=["vision"])) as http:
        assert http.get("/v1/info").status_code == 200
    assert issuer.asked == ["/keys"]


def test_a_pod_of_kubernetes_compiles_with_the_token_that_its_node_rotates(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    """Its API server shows keys only to who has a token; the node replaces tokens by turning a link."""
    cluster = SigningIssuer(wanted="the gateway's own")
    own = tmp_path / "own-token"
    own.write_text("the gateway's own\n")
    pod = {
        "kubernetes.io": {"namespace": "ml", "serviceaccount": {"name": "trainer", "uid": "7"}},
        "sub": "system:serviceaccount:ml:trainer",
    }
    folder = tmp_path / "token"
    folder.mkdir()

    def rotate(number: int, **changes: Any) -> None:
        version = tmp_path / f"..{number}"
        version.mkdir()
        (version / "token").write_text(cluster.token(headers={"typ": None}, **pod | changes))
        link = tmp_path / f"link-{number}"
        link.symlink_to(version / "token")
        link.replace(folder / "token")

    try:
        relay = start(issuer=cluster.issuer, token_file=str(own))
        with relay.http() as owner:
            keys = tuple(owner.get("/v1/info").json()["public_keys"])
        rotate(1, exp=int(time.time()) - 24)  # 30 s late is accepted: for 5 to 6 s more
        settings = ClientSettings(
            url=relay.url, token_file=folder / "token", public_keys=keys, cache_dir=tmp_path / "cache"
        )
        with GatewayClient(settings) as client:
            assert client.info()["namespace"] == "ml"
            with pytest.raises(Unauthenticated, match="has expired"):
                wait_until(lambda: client.info()["namespace"] != "ml", 30, pause=0.1)
            rotate(2)
            assert client.info()["namespace"] == "ml"
            (folder / "token").unlink()
            with pytest.raises(Unauthenticated, match="cannot be read"):
                client.info()
    finally:
        cluster.stop()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("issuers = 1", "array"),
        ("[[issuers]", "cannot be used"),
        ('[[issuers]]\nissuer = "https://a.example"\naudience = "x"\nrules = []', "length"),
        ("ISSUER\nusername = 1", "username"),
        ('ISSUER\njwks_uri = "http://192.0.2.1/keys"', "no https"),
        ("ISSUER\nISSUER", "twice"),
        ('ISSUER\nca_file = "/absent.pem"', ""),
        ('[[issuers]]\nissuer = "http://a.example"\naudience = "x"\nRULES', "no https"),
        ('[[issuers]]\nissuer = "https://a.example"\nRULES', "audience"),
        ('[[issuers]]\nissuer = "https://a.example"\naudience = "x"\nrules = [{ROLE "owner"]}]', "owner"),
        ('[[issuers]]\nissuer = "https://a.example"\naudience = "x"\nrules = [{ROLE "read"], a = 1}]', "`a`"),
    ],
)
def test_a_file_that_says_something_else_stops_the_start(
    start_gateway: StartGateway, tmp_path: Path, text: str, words: str
) -> None:
    role = 'claim = "a", equals = "b", namespace = "c", roles = ['
    rules = f'rules = [{{ {role} "read"] }}]'
    issuer = f'[[issuers]]\nissuer = "https://a.example"\naudience = "x"\n{rules}'
    path = tmp_path / "sign-in.toml"
    path.write_text(text.replace("ISSUER", issuer).replace("RULES", rules).replace("ROLE", role))
    with pytest.raises(SettingsError, match=words or "absent.pem"):
        start_gateway(sign_in_file=str(path))


def test_plain_http_from_another_machine_needs_a_word_of_its_own(tmp_path: Path) -> None:
    entry = {"issuer": "http://192.0.2.1/realm", "audience": "x", "rules": RULES[:1]}
    path = Path(sign_in_file(tmp_path / "a.toml", entry | {"allow_http": True}))
    assert read_issuers(path)[0].allows("http://192.0.2.1/keys")


def test_keys_for_other_purposes_sign_nothing(issuer: SigningIssuer, ask: Ask) -> None:
    issuer.use = "enc"
    assert ask(issuer.token(groups=["vision"])).status_code == 503


def test_short_rsa_keys_are_refused(issuer: SigningIssuer, ask: Ask) -> None:
    issuer.key = rsa.generate_private_key(65537, 1024)
    issuer._keys = {issuer.kid: ("RS256", issuer.key)}
    assert _error(ask(issuer.token(groups=["vision"]))) == (401, "unauthenticated", "the token is not known")
