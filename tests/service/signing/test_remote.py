"""Keys at a signer, for who asks it: what changes, what an outage does, and which answers are not believed."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import SecretStr
from service_parts import ArtifactPool, StartGateway, busy_pool, compiled, follow, free_port, graph, post
from signed import KEY
from signer_parts import ADMIN_TOKEN, SIGN_TOKEN, SignerProcess, artifact
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.signing import key_text
from torchrelay.compiler.artifact.trust_document import sign_document
from torchrelay.compiler.errors import SettingsError, SignatureError, Unavailable
from torchrelay.compiler.request import codec
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.signing import remote as remote_module
from torchrelay.service.signing.key_files import read_private
from torchrelay.service.signing.keyring import Keyring
from torchrelay.service.signing.messages import RingReply
from torchrelay.service.signing.open import open_keyring
from torchrelay.service.signing.remote import RemoteKeyring
from torchrelay.service.signing.trusted_keys import document_of
from waiting import wait_until

StartKeyring = Callable[..., RemoteKeyring]


@pytest.fixture
def signer(tmp_path: Path) -> Iterator[SignerProcess]:
    (tmp_path / "signer").mkdir()
    signer = SignerProcess(tmp_path / "signer")
    yield signer.start()
    signer.kill()


@pytest.fixture
def keyring_of() -> Iterator[StartKeyring]:
    started: list[RemoteKeyring] = []

    def start(url: str, token: str = ADMIN_TOKEN) -> RemoteKeyring:
        started.append(RemoteKeyring(url, token))
        return started[-1]

    yield start
    for keyring in started:
        keyring.close()


# --- changes -----------------------------------------------------------------------------------------------


def test_a_change_through_one_is_seen_by_the_others(signer: SignerProcess, keyring_of: StartKeyring) -> None:
    gateway, dispatcher = keyring_of(signer.url), keyring_of(signer.url, SIGN_TOKEN)
    old = dispatcher.sign(artifact(), key=KEY, namespace="team")
    first = gateway.current
    second = gateway.rotate(3600).keys[-1].id
    assert gateway.current == second != first
    # at once, before the dispatcher has asked again
    new = dispatcher.sign(artifact(), key=KEY, namespace="team")
    assert container.statements(new)[-1].key_id == second == dispatcher.current
    for data in (old, new):
        assert container.verify(data, dispatcher.trust("team"), key=KEY)
    began = time.monotonic()
    gateway.revoke(first)
    wait_until(lambda: first in dispatcher.trust("team").revoked, seconds=30)
    assert time.monotonic() - began < 5
    with pytest.raises(SignatureError, match="revoked"):
        container.verify(old, dispatcher.trust("team"), key=KEY)
    gateway.disown()
    wait_until(lambda: dispatcher.ring == gateway.ring, seconds=30)
    assert (dispatcher.ring.epoch, dispatcher.document()) == (1, gateway.document())
    third = dispatcher.sign(artifact(), key=KEY, namespace="team")
    assert container.verify(third, gateway.trust("team"), key=KEY).statement.epoch == 1


def test_a_change_in_the_signers_folder_reaches_who_asks_it(
    signer: SignerProcess, keyring_of: StartKeyring
) -> None:
    remote, folder = keyring_of(signer.url), Keyring(signer.keys, {})
    folder.revoke(folder.current)  # the only key there was
    wait_until(lambda: remote.ring == folder.ring, seconds=30)
    assert container.verify(remote.sign(artifact(), key=KEY, namespace="team"), folder.trust("team"), key=KEY)


def test_many_threads_sign_at_once(signer: SignerProcess, keyring_of: StartKeyring) -> None:
    remotes = [keyring_of(signer.url), keyring_of(signer.url, SIGN_TOKEN)]
    keys = [f"{number:064x}" for number in range(40)]

    def sign(number: int) -> bytes:
        return remotes[number % 2].sign(artifact(keys[number]), key=keys[number], namespace="team")

    with ThreadPoolExecutor(16) as pool:
        signed = list(pool.map(sign, range(40)))
    for key, data in zip(keys, signed, strict=True):
        assert container.verify(data, remotes[0].trust("team"), key=key)


# --- outages -----------------------------------------------------------------------------------------------


def test_an_artifact_waits_for_a_signer_that_is_restarted(
    signer: SignerProcess, keyring_of: StartKeyring
) -> None:
    remote = keyring_of(signer.url, SIGN_TOKEN)
    before = remote.ring
    signer.kill()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(remote.sign, artifact(), key=KEY, namespace="team")
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        signer.start()
        signed = waiting.result(60)
    assert container.verify(signed, remote.trust("team"), key=KEY)
    assert remote.ring == before


def test_without_a_signer_trust_stays_and_signing_ends_with_advice(
    signer: SignerProcess, keyring_of: StartKeyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "PATIENCE_SECONDS", 1.5)
    monkeypatch.setattr(remote_module, "REFRESH_SECONDS", 0.1)
    remote = keyring_of(signer.url, SIGN_TOKEN)
    signed = remote.sign(artifact(), key=KEY, namespace="team")
    with structlog.testing.capture_logs() as logged:
        signer.kill()
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"cannot be reached.*torchrelay signer"):
            remote.sign(artifact(), key=KEY, namespace="team")
        assert 1 < time.monotonic() - began < 30
        assert container.verify(signed, remote.trust("team"), key=KEY)
        assert remote.vouches_for(remote.current)
        signer.start()
        Keyring(signer.keys, {}).disown()
        wait_until(lambda: remote.ring.epoch == 1, seconds=30)
    assert [entry["event"] for entry in logged if entry["log_level"] == "error"] == ["signer_keys_not_read"]
    with pytest.raises(Unavailable):
        keyring_of(f"http://127.0.0.1:{free_port()}")


def test_what_is_asked_on_the_event_loop_never_waits_for_the_signer(
    signer: SignerProcess, keyring_of: StartKeyring
) -> None:
    remote = keyring_of(signer.url)
    assert signer.process is not None
    signer.process.send_signal(signal.SIGSTOP)
    until = time.monotonic() + 2.5
    longest = 0.0
    while time.monotonic() < until:
        began = time.monotonic()
        assert remote.trust("team").keys and remote.import_trust() and remote.document()
        assert remote.public and remote.ring.serial == 1
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.01)
    signer.process.send_signal(signal.SIGCONT)
    assert longest < 1


def test_a_change_is_asked_for_once(
    signer: SignerProcess, keyring_of: StartKeyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = keyring_of(signer.url)
    signer.kill()
    with pytest.raises(Unavailable):
        remote.rotate(60)
    signer.start()
    assert remote.rotate(60).serial == 2


# --- what is not believed ----------------------------------------------------------------------------------


class Liar:
    """A server between a signer and who asks it, which may replace the signer's answers: `answers` by path."""

    def __init__(self, signer: SignerProcess) -> None:
        self.answers: dict[str, bytes | Callable[[bytes], bytes]] = {}
        liar = self

        class Lies(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with signer.http() as http:
                    true = http.request(self.command, self.path, content=body).content
                lie = liar.answers.get(self.path.partition("?")[0], true)
                told = lie(true) if callable(lie) else lie
                self.send_response(200)
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

            do_GET = do_POST = _answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Lies)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def liar(signer: SignerProcess) -> Iterator[Liar]:
    liar = Liar(signer)
    yield liar
    liar.close()


def test_a_signature_that_is_not_this_artifacts_is_not_used(
    signer: SignerProcess, liar: Liar, keyring_of: StartKeyring
) -> None:
    remote, honest = keyring_of(liar.url), keyring_of(signer.url)
    data = artifact()
    assert container.verify(remote.sign(data, key=KEY, namespace="team"), honest.trust("team"), key=KEY)
    folder = Keyring(signer.keys, {})
    mine = folder.signature(data, key=KEY, namespace="team")
    stranger = Ed25519PrivateKey.generate()
    lies = {
        "another artifact's": folder.signature(artifact(), key=KEY, namespace="team"),
        "another namespace's": folder.signature(data, key=KEY, namespace="other"),
        "a stranger's": container.make_signature(
            data, stranger, key=KEY, namespace="team", epoch=0, signed_at=1
        ),
        "another time's": container.Signature(
            msgspec.structs.replace(mine.statement, signed_at=1), mine.value
        ),
        "with an origin": container.make_signature(
            data,
            read_private(signer.keys / f"{folder.current}.pem"),
            key=KEY,
            namespace="team",
            epoch=0,
            signed_at=1,
            origin="0" * 16,
        ),
        "nothing": container.Signature(mine.statement, b""),
    }
    signed_before = container.with_head(
        data, container.head_with(data, mine)
    )  # a bad signature after a good one
    for (what, lie), sent in itertools.product(lies.items(), (data, signed_before)):
        liar.answers["/v1/sign"] = codec.to_json(lie)
        with pytest.raises(Unavailable, match="is not used"):
            remote.sign(sent, key=KEY, namespace="team")
            pytest.fail(what)
    for other in (b"", b"{}", folder.sign(artifact(), key=KEY, namespace="team"), b" " * (2 << 20)):
        liar.answers["/v1/sign"] = other
        with pytest.raises(Exception, match="the signer") as refused:
            remote.sign(data, key=KEY, namespace="team")
        assert refused.value.status in (500, 503)  # type: ignore[attr-defined]
    del liar.answers["/v1/sign"]
    assert remote.sign(data, key=KEY, namespace="team")


def test_a_list_of_keys_that_is_not_the_signers_changes_nothing(
    signer: SignerProcess, liar: Liar, keyring_of: StartKeyring, tmp_path: Path
) -> None:
    remote, folder = keyring_of(liar.url), Keyring(signer.keys, {})
    other = Keyring(tmp_path / "other", {})
    for _ in range(5):
        other.rotate(60)
    older = folder.document()
    changed = folder.rotate(60)
    wait_until(lambda: remote.ring == changed, seconds=30)
    before = remote.document()
    stranger = Ed25519PrivateKey.generate()
    forged = msgspec.structs.replace(
        changed,
        serial=99,
        keys=[
            *changed.keys,
            msgspec.structs.replace(changed.keys[0], public=key_text(stranger.public_key())),
        ],
    )
    both = msgspec.structs.replace(changed, serial=99, keys=[*changed.keys, *other.ring.keys])
    lies = {
        "another installation's": other.document(),
        "an older one": older,
        "a key under another's id": sign_document(document_of(forged), [stranger]),
        "keys that did not sign": sign_document(document_of(both), [stranger]),
        "no keys": sign_document(document_of(msgspec.structs.replace(changed, keys=[])), [stranger]),
        "no document": msgspec.structs.replace(older, document=b"x"),
        "damaged": msgspec.structs.replace(older, signatures=dict.fromkeys(older.signatures, b"x" * 64)),
    }
    for what, lie in lies.items():
        liar.answers["/v1/ring"] = codec.to_json(RingReply(lie, []))
        with pytest.raises(SignatureError, match="the signer"):
            remote._refresh()
            pytest.fail(what)
        assert remote.document() == before, what
        if what != "an older one" and what != "another installation's":
            with pytest.raises(Unavailable, match="no good list of keys"):
                keyring_of(liar.url)
    liar.answers.clear()
    folder.disown()
    wait_until(lambda: remote.ring.epoch == 1, seconds=30)


def test_the_artifact_of_another_signer_is_not_taken_for_ones_own(
    signer: SignerProcess, keyring_of: StartKeyring, tmp_path: Path
) -> None:
    """The address of the signer now leads to one with other keys: nothing that it signs is used."""
    remote = keyring_of(signer.url)
    first = remote.ring
    signer.kill()
    signer.keys.rename(tmp_path / "gone")
    signer.start()
    with pytest.raises(Unavailable, match="unknown key"):
        remote.sign(artifact(), key=KEY, namespace="team")
    assert remote.ring == first


# --- a gateway's -------------------------------------------------------------------------------------------


def test_a_gateway_serves_what_a_signer_has_signed(
    signer: SignerProcess, start_gateway: StartGateway
) -> None:
    asks = {"signer_url": signer.url, "signer_admin_token": ADMIN_TOKEN}
    gateways = [start_gateway(**asks), start_gateway(busy_pool(), **asks)]
    with gateways[0].http() as http, gateways[1].http() as other:
        old = compiled(http, graph())
        (key,) = gateways[0].pool.calls
        trust = Keyring(signer.keys, {}).trust("default")
        assert container.verify(old, trust, key=key)
        assert post(other, graph()).content == old
        rotated = http.post("/v1/keys", json={"overlap_seconds": 3600}).json()
        assert container.statements(compiled(http, graph(2)))[-1].key_id == rotated["current"]
        assert http.delete(f"/v1/keys/{rotated['keys'][0]['id']}").status_code == 200
        wait_until(lambda: other.get(f"/v1/artifacts/{key}").status_code == 404, seconds=30)
        assert container.statements(compiled(other, graph()))[-1].key_id == rotated["current"]
        assert http.get("/v1/keys").json()["serial"] == Keyring(signer.keys, {}).ring.serial == 3
        signer.kill()
        assert post(other, graph()).status_code == 200
        answer = http.post("/v1/keys/epoch")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


def test_a_finished_compile_waits_for_a_signer_that_is_away_for_longer(
    signer: SignerProcess, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "PATIENCE_SECONDS", 0.1)
    gateway = start_gateway(
        ArtifactPool(),
        signer_url=signer.url,
        signer_admin_token=ADMIN_TOKEN,
        lease_seconds=1,
        abandon_seconds=0.5,
    )
    with gateway.http() as http:
        compiled(http, graph(1))
        signer.kill()
        key = post(http, graph(2)).json()["key"]
        stream = follow(http, key)
        while "cannot be reached" not in (said := next(stream))[2]["detail"]:
            assert said[1] not in ("done", "failed")
        assert post(http, graph(1)).status_code == 200
        signer.start()
        assert [stage for _, stage, _ in stream][-1] == "done"
    assert len(gateway.pool.calls) == 2


def test_a_silent_signer_holds_no_thread_that_others_need(
    signer: SignerProcess, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(signer_url=signer.url, signer_admin_token=ADMIN_TOKEN)
    assert signer.process is not None
    with gateway.http() as http:
        compiled(http, graph(1))
        (known,) = gateway.pool.calls
        signer.process.send_signal(signal.SIGSTOP)
        try:
            for size in range(2, 50):  # more than any executor has threads
                assert post(http, graph(size)).status_code == 202
            wait_until(lambda: len(gateway.pool.calls) == 49, seconds=30)
            assert http.get(f"/v1/cache/{known}").status_code == 200  # read in a thread
            large = graph(50, nodes=2000)  # checked in one
            assert post(http, large).status_code == 202
        finally:
            signer.process.send_signal(signal.SIGCONT)


def test_a_gateway_starts_without_its_signer_from_the_keys_that_it_knew_last(
    signer: SignerProcess, start_gateway: StartGateway
) -> None:
    asks = {"signer_url": signer.url, "signer_admin_token": ADMIN_TOKEN}
    first = start_gateway(**asks)
    with first.http() as http:
        compiled(http, graph())
    first.stop()
    signer.kill()
    second = start_gateway(**asks)
    with second.http() as http:
        assert post(http, graph()).status_code == 200
        signer.start()
        wait_until(lambda: b"torchrelay_signer_up 1.0" in http.get("/metrics").content, seconds=30)
        compiled(http, graph(2))


def test_keys_that_another_user_left_are_not_believed(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a file another user's")
    (tmp_path / "signer").mkdir()
    signer = SignerProcess(tmp_path / "signer").start()
    known = tmp_path / "known.json"
    RemoteKeyring(signer.url, ADMIN_TOKEN, known=known).close()
    signer.kill()
    os.chown(known, 65534, 65534)
    with pytest.raises(Unavailable):
        RemoteKeyring(signer.url, ADMIN_TOKEN, known=known)


# --- settings ----------------------------------------------------------------------------------------------


def test_the_settings_say_where_the_keys_are(signer: SignerProcess, tmp_path: Path) -> None:
    here = open_keyring(ServiceSettings(state_dir=tmp_path / "here"))
    assert isinstance(here, Keyring)
    given: dict[str, Any] = {"state_dir": tmp_path / "there", "signer_url": signer.url}
    for token in ("signer_token", "signer_admin_token"):
        value = SecretStr(SIGN_TOKEN if token == "signer_token" else ADMIN_TOKEN)
        there = open_keyring(ServiceSettings(**{**given, token: value}))
        assert isinstance(there, RemoteKeyring)
        assert there.ring == Keyring(signer.keys, {}).ring
        there.close()
    assert [each.name for each in (tmp_path / "there").iterdir()] == ["signer_keys.json"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"signer_token": None}, "needs a token"),
        ({"keys_dir": "/keys"}, "keys_dir is a setting of the signer"),
        ({"trusted_public_keys": "x"}, "trusted_public_keys is a setting of the signer"),
        ({"signer_url": "ftp://127.0.0.1"}, "cannot be used"),
        ({"signer_url": "unix://signer.sock"}, "absolute path"),
        ({"signer_url": "https://127.0.0.1:1", "signer_ca_file": "/nothing"}, "cannot be read"),
    ],
)
def test_settings_that_do_not_fit_a_signer_are_told(changes: dict[str, Any], told: str) -> None:
    given: dict[str, Any] = {"signer_url": "http://127.0.0.1:1", "signer_token": SIGN_TOKEN, **changes}
    with pytest.raises(SettingsError, match=told):
        open_keyring(ServiceSettings(**given))
