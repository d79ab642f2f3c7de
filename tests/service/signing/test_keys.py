"""Signing keys that come and go: what is signed, served and quarantined meanwhile, and who may say so."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from command_line import torchrelay, user
from service_parts import TOKEN, RedisServer, Running, StartGateway, client_of, compiled, graph, post
from torchrelay.clients.artifacts.verification import TrustStore
from torchrelay.clients.commands.diagnostics import doctor
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler import decoding
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.signing import key_id, key_text
from torchrelay.compiler.artifact.trust_document import SignedDocument
from torchrelay.compiler.errors import MalformedRequest, NotFound, SettingsError, SignatureError
from torchrelay.service.signing.keyring import Keyring
from torchrelay.service.signing.trusted_keys import Ring
from waiting import wait_until


def signer_of(data: bytes) -> str:
    return container.statements(data)[-1].key_id


def actions(http: httpx2.Client) -> list[str]:
    return [entry["action"] for entry in reversed(http.get("/v1/audit").json()["entries"])]


# --- the keyring -----------------------------------------------------------------------------------------


def test_gateways_that_start_at_once_have_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:  # each opens the lock for itself, as processes do
        started = list(pool.map(lambda _: Keyring(tmp_path / "keys", {}), range(8)))
    assert len({keyring.current for keyring in started}) == 1
    assert len(list((tmp_path / "keys").glob("*.pem"))) == 1


def test_a_rotated_key_counts_until_its_overlap_ends(tmp_path: Path) -> None:
    now = [1000.0]
    keyring = Keyring(tmp_path, {}, clock=lambda: now[0])
    first = keyring.current
    second = keyring.rotate(60).keys[-1].id
    assert keyring.current == second != first
    assert [key_id(public) for public in keyring.public] == [second, first]
    now[0] = 1059.9
    assert set(keyring.trust("team").keys) == {first, second}
    now[0] = 1060.0
    assert set(keyring.trust("team").keys) == {second}
    third = keyring.rotate(None).keys[-1].id
    now[0] = 1e9
    assert set(keyring.trust("team").keys) == {second, third}


def test_revoking_the_key_that_signs_makes_another(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path, {})
    first = keyring.current
    ring = keyring.revoke(first)
    assert keyring.current == ring.keys[-1].id != first
    assert (list(keyring.trust("").keys), keyring.trust("").revoked) == ([keyring.current], {first})
    with pytest.raises(MalformedRequest, match="revoked already"):
        keyring.revoke(first)
    with pytest.raises(NotFound):
        keyring.revoke("0" * 16)


def test_a_change_reaches_the_other_gateways_keyrings(tmp_path: Path) -> None:
    mine, theirs = Keyring(tmp_path, {}), Keyring(tmp_path, {})
    mine.rotate(60)
    wait_until(lambda: theirs.current == mine.current, seconds=60)
    theirs.disown()
    mine.rotate(60)
    wait_until(lambda: theirs.ring == mine.ring, seconds=60)
    assert (mine.ring.epoch, mine.ring.serial) == (1, 4)


def test_a_keyring_goes_on_with_what_it_has_when_its_folder_is_sick(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path, {})
    (tmp_path / "ring.json").write_text("{")
    keyring.next_check = 0.0
    assert keyring.current
    with pytest.raises(SettingsError, match=r"ring\.json cannot be read"):
        Keyring(tmp_path, {})
    with pytest.raises(SettingsError):
        keyring.rotate(60)


def test_a_folder_that_hangs_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network's disk whose server is away."""
    keyring, answers, load = Keyring(tmp_path, {}), threading.Event(), Keyring.load_ring

    def hangs(keyring: Keyring) -> Ring:
        assert answers.wait(60)
        return load(keyring)

    monkeypatch.setattr(Keyring, "load_ring", hangs)
    before = threading.active_count()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            keyring.next_check = 0.0
            assert pool.submit(lambda: keyring.current).result(timeout=20)
        assert not keyring.reachable
        assert threading.active_count() <= before + 2
        answers.set()

    def look() -> bool:
        keyring.next_check = 0.0
        return bool(keyring.current) and keyring.reachable

    wait_until(look, seconds=20)


def test_an_older_folder_that_is_put_back_is_not_taken_over(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path, {})
    before = (tmp_path / "ring.json").read_bytes()
    first = keyring.current
    keyring.revoke(first)
    (tmp_path / "ring.json").write_bytes(before)
    keyring.next_check = 0.0
    assert first in keyring.ring.revoked


# --- the service -----------------------------------------------------------------------------------------


def test_after_a_rotation_old_artifacts_are_hits_and_new_ones_have_the_new_signature(
    gateway: Running, http: httpx2.Client
) -> None:
    old = compiled(http, graph(1))
    told = http.post("/v1/keys", json={"overlap_seconds": 3600}).json()
    assert post(http, graph(1)).content == old
    new = compiled(http, graph(2))
    assert (signer_of(old), signer_of(new)) == (told["keys"][0]["id"], told["current"])
    info = http.get("/v1/info").json()
    assert info["key_ids"] == [told["current"], signer_of(old)]
    assert len(gateway.pool.calls) == 2
    assert actions(http)[-1] == "published"
    (rotated,) = [e for e in http.get("/v1/audit").json()["entries"] if e["action"] == "key_rotated"]
    assert (rotated["signer"], rotated["name"]) == (told["current"], "owner")


@pytest.mark.parametrize("inline", [0, 1 << 20], ids=["store", "redis"])
@pytest.mark.parametrize(
    "change",
    [
        lambda http, old: http.delete(f"/v1/keys/{signer_of(old)}"),
        lambda http, old: http.post("/v1/keys/epoch"),
        lambda http, old: http.post("/v1/keys", json={"overlap_seconds": 0}),
    ],
    ids=["revoked", "disowned", "overlap over"],
)
def test_what_counts_no_longer_is_quarantined_and_compiled_once_more(
    inline: int,
    change: Callable[[httpx2.Client, bytes], httpx2.Response],
    start_gateway: StartGateway,
    redis_server: RedisServer,
) -> None:
    gateway = start_gateway(blob_inline_bytes=inline)
    with gateway.http() as http:
        old = compiled(http, graph())
        assert post(http, graph()).content == old  # it was verified, and is remembered as such
        assert change(http, old).status_code == 200
        (key,) = gateway.pool.calls
        assert http.get(f"/v1/artifacts/{key}").status_code == 404
        new = compiled(http, graph())
        assert new != old
        assert container.verify(new, gateway.app.state.gateway.keyring.trust("default"), key=key)
        assert post(http, graph()).content == new
        assert gateway.pool.calls == [key, key]
        entries = http.get("/v1/audit").json()["entries"]
        (kept_out,) = [entry for entry in entries if entry["action"] == "quarantined"]
        assert kept_out["key"] == key
        assert any(word in kept_out["detail"] for word in ("revoked", "epoch", "unknown key"))
        if inline:
            ttl = redis_server.client().ttl(f"torchrelay:blob:{kept_out['digest']}")
            assert 0 < ttl <= 3600
        stats = http.get("/v1/stats").json()
        assert (stats["entries"], stats["damaged"], stats["bytes_stored"]) == (1, 1, len(new))


def test_another_gateway_learns_of_a_revocation_and_serves_nothing_of_that_key(
    start_gateway: StartGateway,
) -> None:
    here, there = start_gateway(), start_gateway()
    with here.http() as http, there.http() as other:
        old = compiled(other, graph())
        assert http.delete(f"/v1/keys/{signer_of(old)}").status_code == 200
        fresh: list[bytes] = []

        def served_afresh() -> bool:
            fresh[:] = [compiled(other, graph())]
            return signer_of(fresh[0]) != signer_of(old)

        wait_until(served_afresh, seconds=60)
        assert post(http, graph()).content == post(other, graph()).content


def test_an_import_falls_with_the_key_that_vouched_for_it(
    gateway: Running, http: httpx2.Client, start_gateway: StartGateway, tmp_path: Path
) -> None:
    data = compiled(http, graph())
    there = start_gateway(
        redis_prefix="other:",
        state_dir=str(tmp_path / "other"),
        trusted_public_keys=http.get("/v1/info").json()["public_keys"][0],
    )
    with there.http() as other:
        assert other.post("/v1/cache", content=data).json()["outcome"] == "imported"
        assert post(other, graph()).status_code == 200
        assert other.delete(f"/v1/keys/{signer_of(data)}").status_code == 200
        assert container.statements(compiled(other, graph()))[-1].origin == ""
        assert len(there.pool.calls) == 1
        assert other.post("/v1/cache", content=data).status_code == 422


def test_only_the_owner_changes_keys_and_everyone_may_read_what_to_trust(
    gateway: Running, http: httpx2.Client
) -> None:
    own = http.get("/v1/keys").json()["current"]
    for roles, namespace in ((["read"], ""), (["compile"], ""), (["admin"], "team")):
        made = http.post("/v1/tokens", json={"name": "x", "roles": roles, "namespace": namespace}).json()
        with client_of(gateway.url, made["token"]) as other:
            assert other.get("/v1/trust").status_code == 200
            for answer in (
                other.get("/v1/keys"),
                other.post("/v1/keys", json={}),
                other.delete(f"/v1/keys/{own}"),
                other.post("/v1/keys/epoch"),
            ):
                assert answer.status_code == 403
    with client_of(gateway.url, None) as nobody:
        assert nobody.get("/v1/trust").status_code == 401
    assert http.get("/v1/keys").json() | {"keys": []} == {
        "current": own,
        "serial": 1,
        "epoch": 0,
        "keys": [],
        "revoked": [],
    }
    for wrong in ({"overlap_seconds": -1}, {"overlap_seconds": "1"}, {"more": 1}):
        assert http.post("/v1/keys", json=wrong).status_code == 422
    assert http.delete("/v1/keys/0000000000000000").status_code == 404
    assert http.delete("/v1/keys/x").status_code == 422


def test_a_folder_that_cannot_be_written_is_a_typed_answer(
    gateway: Running, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    before = gateway.app.state.gateway.keyring.current
    monkeypatch.setattr("torchrelay.service.signing.keyring.write_private", full)
    for answer in (
        http.post("/v1/keys", json={}),
        http.post("/v1/keys/epoch"),
        http.delete(f"/v1/keys/{before}"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "No space left" in answer.json()["error"]["message"]
    assert gateway.app.state.gateway.keyring.current == before
    assert compiled(http, graph())


def test_clients_hear_of_a_change_in_any_answer_and_cannot_be_made_to_forget_it(
    gateway: Running, http: httpx2.Client, tmp_path: Path
) -> None:
    def document() -> SignedDocument:
        return decoding.from_json(http.get("/v1/trust").content, type=SignedDocument)

    def heard() -> int:
        return int(http.get("/livez").headers["x-torchrelay-trust"])

    first = http.get("/v1/info").json()
    settings = ClientSettings(
        cache_dir=tmp_path,
        state_dir=tmp_path / "client",
        public_keys=tuple(first["public_keys"]),
        namespace=first["namespace"],
    )
    store = TrustStore(settings)
    store.refresh_if_newer(heard(), document)
    old, before = compiled(http, graph(1)), document()
    key = gateway.pool.calls[0]
    http.post("/v1/keys", json={})
    store.refresh_if_newer(heard(), document)
    new = compiled(http, graph(2))
    for data, name in ((old, key), (new, gateway.pool.calls[1])):
        assert container.verify(data, store.trust(), key=name)
    http.delete(f"/v1/keys/{first['key_ids'][0]}")
    store.refresh_if_newer(heard(), document)
    with pytest.raises(SignatureError, match="revoked"):
        container.verify(old, store.trust(), key=key)
    for believer in (store, TrustStore(settings)):
        with pytest.raises(SignatureError):
            believer.learn(before)  # whose only signer is revoked
        believer.refresh_if_newer(99, lambda: before)
        with pytest.raises(SignatureError, match="revoked"):
            container.verify(old, believer.trust(), key=key)
        assert container.verify(new, believer.trust(), key=gateway.pool.calls[1])
    http.post("/v1/keys/epoch")
    store.refresh_if_newer(heard(), document)
    with pytest.raises(SignatureError, match="disowned"):
        container.verify(new, store.trust(), key=gateway.pool.calls[1])
    assert key_text(gateway.app.state.gateway.keyring.public[0]) in str(http.get("/v1/keys").json())


def test_the_doctor_trusts_what_a_rotation_brought(
    gateway: Running, http: httpx2.Client, tmp_path: Path
) -> None:
    settings = ClientSettings(
        url=gateway.url,
        token=TOKEN,
        cache_dir=tmp_path,
        state_dir=tmp_path / "client",
        public_keys=tuple(http.get("/v1/info").json()["public_keys"]),
    )
    (check,) = [check for check in doctor.CHECKS if check.look is doctor.check_signature]
    with GatewayClient(settings) as connected:
        assert "is trusted" in check.look(connected, settings)
        new = http.post("/v1/keys", json={}).json()["current"]
        assert new in check.look(connected, settings)
        old = http.get("/v1/keys").json()["keys"][0]["id"]
        assert http.delete(f"/v1/keys/{old}").status_code == 200
        assert f"key {new} is trusted" in check.look(connected, settings)


def test_keys_by_command(gateway: Running, tmp_path: Path) -> None:
    environment = user(tmp_path, gateway.url, TOKEN)

    def run(*arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        return torchrelay("keys", *arguments, environment=environment, answer=answer)

    first = gateway.app.state.gateway.keyring.current
    assert run("rotate", "--overlap", "12h").stdout.startswith("key ")
    second = gateway.app.state.gateway.keyring.current
    assert second != first
    assert f"revoked {first}" in run("revoke", first).stdout
    table = run("ls").stdout
    assert [line.split()[-1] for line in table.splitlines() if line[:16] in (first, second)] == [
        "revoked",
        "signs",
    ]
    assert run("disown", answer="n\n").returncode == 1
    assert "epoch 1" in run("disown", "--yes").stdout
    done = run("rotate", "--overlap", "soon")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
