"""A signer in a process of its own: what it signs, for whom, within which limits, and what it has loaded."""

from __future__ import annotations

import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from certificates import Authority
from signed import KEY, assembled, manifest_of, taken_apart
from signer_parts import ADMIN_TOKEN, SIGN_TOKEN, SignerProcess, artifact, sign
from torchrelay.compiler import decoding
from torchrelay.compiler.api.trace_context import new_trace
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.signing import key_text
from torchrelay.compiler.errors import ArtifactError, Forbidden, NotFound, SignatureError, Unavailable
from torchrelay.service.base.tracing import in_trace
from torchrelay.service.signing.keyring import Keyring
from torchrelay.service.signing.messages import RingReply
from waiting import wait_until
from zstd_frames import frame

StartSigner = Callable[..., SignerProcess]
GROWTH_BYTES = 64 << 20


@pytest.fixture
def start_signer(tmp_path: Path) -> Iterator[StartSigner]:
    started: list[SignerProcess] = []

    def start(name: str = "signer", **options: Any) -> SignerProcess:
        (tmp_path / name).mkdir()
        started.append(SignerProcess(tmp_path / name, **options))
        return started[-1].start()

    yield start
    for signer in started:
        signer.kill()


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SignerProcess]:
    """One for all tests that leave it as it was."""
    signer = SignerProcess(
        tmp_path_factory.mktemp("signer"), signer_memory_bytes=8 << 20, body_timeout_seconds=1
    )
    yield signer.start()
    signer.kill()


def code_of(answer: object) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]  # type: ignore[attr-defined]


# --- it signs as the folder's keyring does -----------------------------------------------------------------


@pytest.mark.parametrize("way", ["http", "https", "unix"])
def test_who_asks_a_signer_gets_what_its_folder_says(
    way: str, start_signer: StartSigner, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    made = authority.issue("127.0.0.1")
    tls = {"scheme": "https", "tls_cert_file": made.cert, "tls_key_file": made.key} if way == "https" else {}
    signer = start_signer(unix=way == "unix", **tls)
    local = Keyring(signer.keys, {})
    remote = signer.keyring(SIGN_TOKEN, ca_file=authority.file if tls else None)
    data = artifact(size=3 << 20)
    signed = remote.sign(data, key=KEY, namespace="team")
    (statement,) = container.statements(signed)
    assert (statement.namespace, statement.key_id, statement.origin) == ("team", local.current, "")
    assert abs(statement.signed_at - time.time()) < 60
    before, after = taken_apart(data), taken_apart(signed)
    assert (after[0].manifest, after[0].frames, after[1]) == (before[0].manifest, before[0].frames, before[1])
    for keyring in (local, remote):
        assert container.verify(signed, keyring.trust("team"), key=KEY).statement == statement
        with pytest.raises(SignatureError, match="namespace"):
            container.verify(signed, keyring.trust("other"), key=KEY)
    assert (remote.ring, remote.current, remote.document()) == (local.ring, local.current, local.document())
    assert [*map(key_text, remote.public)] == [*map(key_text, local.public)]
    remote.close()


def test_an_import_is_signed_only_on_the_word_of_a_site_that_the_signer_trusts(
    start_signer: StartSigner, tmp_path: Path
) -> None:
    site, stranger = Keyring(tmp_path / "site", {}), Keyring(tmp_path / "stranger", {})
    signer = start_signer(trusted_public_keys=key_text(site.public[0]))
    remote = signer.keyring()
    theirs = site.sign(artifact(), key=KEY, namespace="theirs")
    mine = remote.sign(theirs, key=KEY, namespace="mine", origin=site.current)
    assert container.verify(mine, remote.trust("mine"), key=KEY).statement.origin == site.current
    assert set(remote.import_trust().sites) == {site.current}
    assert remote.vouches_for(site.current) and not remote.vouches_for(stranger.current)
    unknown = stranger.sign(artifact(), key=KEY, namespace="x")
    for data, origin in ((unknown, stranger.current), (artifact(), site.current), (theirs, remote.current)):
        with pytest.raises(SignatureError):
            remote.sign(data, key=KEY, namespace="mine", origin=origin)
    remote.revoke(site.current)
    assert not remote.vouches_for(site.current)
    with pytest.raises(SignatureError, match="revoked"):
        remote.sign(theirs, key=KEY, namespace="mine", origin=site.current)
    remote.close()


# --- for whom ----------------------------------------------------------------------------------------------


def test_without_a_token_of_the_signer_nothing_is_answered(signer: SignerProcess) -> None:
    for token in (None, "", "x" * 40, SIGN_TOKEN[:-1], "ü" * 40):
        with signer.http(None) as http:
            if token is not None:
                http.headers["Authorization"] = f"Bearer {token}".strip()
            for path in ("/v1/sign", "/v1/rotate", "/v1/revoke", "/v1/disown"):
                assert code_of(http.post(path)) == (401, "unauthenticated")
            assert code_of(http.get("/v1/ring")) == (401, "unauthenticated")
    with pytest.raises(Unavailable, match="carries no token of this signer"):
        signer.keyring("x" * 40)


def test_who_may_have_artifacts_signed_may_change_no_keys(signer: SignerProcess) -> None:
    remote = signer.keyring(SIGN_TOKEN)
    before = remote.ring
    for change in (lambda: remote.rotate(60), lambda: remote.revoke(remote.current), remote.disown):
        with pytest.raises(Forbidden, match="change no keys"):
            change()
    with signer.http() as http:
        assert http.get("/v1/ring").status_code == 200
    assert Keyring(signer.keys, {}).ring == before
    remote.close()


def test_without_an_administrators_token_nobody_changes_keys(start_signer: StartSigner) -> None:
    signer = start_signer(signer_admin_token="")
    for token, status in ((SIGN_TOKEN, 403), (ADMIN_TOKEN, 401), ("", 401)):
        with signer.http(None) as http:
            http.headers["Authorization"] = f"Bearer {token}".strip()
            assert http.post("/v1/disown").status_code == status


def test_a_change_that_cannot_be_is_a_typed_answer(signer: SignerProcess) -> None:
    remote = signer.keyring()
    with pytest.raises(NotFound, match="there is no key 0000000000000000"):
        remote.revoke("0" * 16)
    with signer.http() as http:
        for path, body in (
            ("/v1/revoke", b'{"key_id": "../x"}'),
            ("/v1/rotate", b'{"overlap_seconds": -1}'),
            ("/v1/rotate", b"{}"),
            ("/v1/rotate", b"["),
        ):
            assert code_of(http.post(path, content=body)) == (422, "malformed")
        assert code_of(http.post("/v1/rotate", content=b" " * 5000)) == (413, "limit_exceeded")
        assert http.get("/v1/sign").status_code == 405
        assert code_of(http.get("/v2")) == (404, "not_found")
    remote.close()


# --- within which limits -----------------------------------------------------------------------------------


def damaged() -> dict[str, bytes]:
    whole = artifact()
    envelope, frames = taken_apart(whole)
    other = msgspec.structs.replace(
        envelope, manifest=msgspec.msgpack.encode(manifest_of({"code.py": b"else"}))
    )
    return {
        "cut short": whole[:-10],
        "nothing": b"",
        "no artifact": b"x" * 5000,
        "another member": assembled(other, frames),
        "a head without end": container.MAGIC + b"\xff\xff\xff\xff",
        "a bomb": bomb(64 << 30, told=1000),
        "a bomb that tells": bomb(64 << 30, told=64 << 30),
        "a bomb within the ratio": bomb(64 << 30, told=60 << 20),
    }


def bomb(total: int, *, told: int) -> bytes:
    """An artifact whose member unpacks to `total` zeros."""
    manifest = manifest_of({"code.py": b""})
    (member,) = manifest.members
    manifest = msgspec.structs.replace(manifest, members=[msgspec.structs.replace(member, size=told)])
    packed = frame(total, declared=None)
    return assembled(container.Envelope(msgspec.msgpack.encode(manifest), [len(packed)]), packed)


@pytest.mark.parametrize("what", damaged())
def test_what_is_no_whole_artifact_is_not_signed_and_takes_no_memory(
    what: str, signer: SignerProcess
) -> None:
    data = damaged()[what]
    with signer.http(SIGN_TOKEN) as http:
        assert sign(http, artifact(size=6 << 20)).status_code == 200  # memory for a body's own bytes is there
        began = time.perf_counter()
        growth = signer.peak_growth(
            lambda: code_of(sign(http, data)) == (422, "bad_artifact") or pytest.fail(what)
        )
        assert growth < GROWTH_BYTES
        assert time.perf_counter() - began < 30


def test_the_key_in_the_query_must_be_the_artifacts_and_all_of_it_has_bounds(signer: SignerProcess) -> None:
    with signer.http(SIGN_TOKEN) as http:
        assert sign(http, artifact()).status_code == 200
        assert code_of(sign(http, artifact(), key="0" * 64)) == (422, "bad_artifact")
        for wrong in (
            {"namespace": ""},
            {"namespace": "x" * 129},
            {"key": "x" * 256},
            {"origin": "x" * 17},
            {"epoch": "0"},
        ):
            assert code_of(sign(http, artifact(), **wrong)) == (422, "malformed")
    remote = signer.keyring(SIGN_TOKEN)
    with pytest.raises(ArtifactError, match="answers"):
        remote.sign(artifact(), key="0" * 64, namespace="default")
    remote.close()


def test_a_body_past_the_limit_is_refused(signer: SignerProcess) -> None:
    with signer.http(SIGN_TOKEN) as http:
        assert code_of(sign(http, bytes(9 << 20))) == (413, "limit_exceeded")


def test_an_artifact_of_no_declared_size_is_refused(signer: SignerProcess) -> None:
    with signer.http(SIGN_TOKEN) as http:
        for body in (artifact(), bytes(9 << 20)):
            answer = http.post("/v1/sign", content=iter([body]), params={"key": KEY, "namespace": "default"})
            assert code_of(answer) == (422, "malformed")
            assert "Content-Length" in answer.json()["error"]["message"]
        assert sign(http, artifact()).status_code == 200


def test_artifacts_on_their_way_take_room_and_a_slow_one_is_given_up(signer: SignerProcess) -> None:
    head = (
        f"POST /v1/sign?key={KEY}&namespace=x HTTP/1.1\r\nHost: s\r\nAuthorization: Bearer {SIGN_TOKEN}\r\n"
    )
    data = artifact()
    with socket.create_connection(("127.0.0.1", signer.port)) as slow, signer.http(SIGN_TOKEN) as http:
        slow.settimeout(60)
        slow.sendall(f"{head}Content-Length: {8 << 20}\r\n\r\n".encode() + b"x")
        wait_until(lambda: sign(http, data).status_code == 429, seconds=20)
        began = time.monotonic()
        assert slow.recv(12) == b"HTTP/1.1 422"
        assert time.monotonic() - began < 60
        wait_until(lambda: sign(http, data).status_code == 200, seconds=20)


def test_a_head_that_does_not_come_closes_its_connection(signer: SignerProcess) -> None:
    with socket.create_connection(("127.0.0.1", signer.port)) as slow:
        slow.settimeout(60)
        slow.sendall(b"POST /v1/sign HTTP/1.1\r\n")
        assert slow.recv(1) == b""


# --- the process -------------------------------------------------------------------------------------------


def test_the_signer_has_loaded_neither_ray_nor_torch_nor_redis(start_signer: StartSigner) -> None:
    signer = start_signer()
    remote = signer.keyring()
    remote.sign(artifact(), key=KEY, namespace="default")
    remote.rotate(60)
    remote.close()
    with signer.http() as http:
        assert code_of(sign(http, b"")) == (422, "bad_artifact")
    assert signer.ended() == 0
    loaded = {name.partition(".")[0] for name in signer.modules.read_text().split()}
    assert {"torchrelay", "cryptography", "uvicorn"} <= loaded
    assert loaded & {"ray", "torch", "redis", "fastapi", "obstore", "numpy"} == set()


def test_its_log_names_what_it_signed_in_whose_trace_and_no_token(start_signer: StartSigner) -> None:
    signer = start_signer()
    remote = signer.keyring()
    trace = new_trace()
    with in_trace(trace):
        remote.sign(artifact(), key=KEY, namespace="team")
    remote.rotate(60)
    remote.close()
    assert signer.ended() == 0
    log = signer.log.read_text()
    entries = [decoding.from_json(line) for line in log.splitlines()]
    (signed,) = [entry for entry in entries if entry["event"] == "signed"]
    assert (signed["key"], signed["namespace"], signed["trace_id"]) == (KEY, "team", trace.trace_id)
    assert "key_rotated" in [entry["event"] for entry in entries]
    assert SIGN_TOKEN not in log and ADMIN_TOKEN not in log


def test_its_socket_is_for_its_group_and_replaces_that_of_a_killed_one(start_signer: StartSigner) -> None:
    signer = start_signer(unix=True)
    assert signer.socket is not None
    assert stat.S_IMODE(signer.socket.stat().st_mode) == 0o660
    second = run(signer.arguments, signer.environment)
    assert (second.returncode, "cannot listen" in second.stderr) == (2, True)
    signer.kill()
    assert signer.socket.exists()
    signer.start()
    assert signer.ended() == 0
    assert not signer.socket.exists()


def run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "torchrelay.service", *arguments]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"SIGNER_TOKEN": ""}, "TORCHRELAY_SERVICE_SIGNER_TOKEN"),
        ({"SIGNER_TOKEN": "x" * 31}, "signer_token"),
        ({"SIGNER_ADMIN_TOKEN": SIGN_TOKEN}, "are the same"),
        ({"TRUSTED_PUBLIC_KEYS": "x"}, "trusted_public_keys"),
        ({"KEYS_DIR": "/dev/null/keys"}, "/dev/null/keys, cannot be used: Not a directory"),
    ],
)
def test_wrong_settings_are_told_in_one_line(settings: dict[str, str], told: str, tmp_path: Path) -> None:
    signer = SignerProcess(tmp_path)
    changed = {f"TORCHRELAY_SERVICE_{name}": value for name, value in settings.items()}
    environment = {name: value for name, value in {**signer.environment, **changed}.items() if value}
    done = run(signer.arguments, environment)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert told in done.stderr


def test_without_its_folder_it_signs_on_and_changes_nothing(start_signer: StartSigner) -> None:
    signer = start_signer()
    remote = signer.keyring()
    shutil.rmtree(signer.keys)
    with pytest.raises(Unavailable, match="cannot be written"):
        remote.disown()
    assert remote.sign(artifact(), key=KEY, namespace="default")
    assert remote.ring.epoch == 0
    remote.close()


def test_the_answer_on_keys_is_what_the_messages_say(signer: SignerProcess) -> None:
    with signer.http(SIGN_TOKEN) as http:
        reply = decoding.from_json(http.get("/v1/ring").content, type=RingReply)
    assert reply == RingReply(Keyring(signer.keys, {}).document(), [])
