"""Forged artifacts in Redis, in the store and on the way: not served, not read, compiled once more or here."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import torch
import torchrelay
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from service_parts import (
    TARGET,
    TOKEN,
    TOOLCHAIN,
    ArtifactPool,
    RedisServer,
    Running,
    StartGateway,
    compiled,
    graph,
    post,
)
from signed import assembled, evil_members, manifest_of, sign, signed, signed_again, taken_apart
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torchrelay.clients.artifacts.verification import TrustStore
from torchrelay.clients.backend import process_backend
from torchrelay.clients.reports.run_report import process_report
from torchrelay.clients.settings import load_settings
from torchrelay.compiler import decoding
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest
from torchrelay.compiler.artifact.signing import key_text
from torchrelay.compiler.artifact.trust_document import SignedDocument, TrustDocument, sign_document
from torchrelay.compiler.request import codec, key, schema
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.signing.key_files import read_private
from torchrelay.service.signing.keyring import Keyring

STRANGER = Ed25519PrivateKey.from_private_bytes(b"\2" * 32)
Change = Callable[[bytes], bytes]


def flip_member(data: bytes) -> bytes:
    return data[:-20] + bytes([data[-20] ^ 4]) + data[-19:]


def cut_short(data: bytes) -> bytes:
    return data[:-7]


def by_a_stranger(data: bytes) -> bytes:
    return signed_again(data, STRANGER)


def by_a_stranger_under_our_name(data: bytes) -> bytes:
    return signed_again(data, STRANGER, key_id=container.statements(data)[0].key_id)


def for_another_namespace(data: bytes) -> bytes:
    """What a colleague of another team gets from the same gateway, handed on with its statement rewritten."""
    envelope, frames = taken_apart(data)
    (signature,) = envelope.signatures
    statement = msgspec.structs.replace(signature.statement, namespace="rivals")
    changed = msgspec.structs.replace(signature, statement=statement)
    return assembled(msgspec.structs.replace(envelope, signatures=[changed]), frames)


def another_manifest(data: bytes) -> bytes:
    envelope, frames = taken_apart(data)
    manifest = decoding.from_msgpack(envelope.manifest, type=artifact_manifest.Manifest)
    changed = msgspec.msgpack.encode(msgspec.structs.replace(manifest, guards=["True"]))
    return assembled(msgspec.structs.replace(envelope, manifest=changed), frames)


def another_member(data: bytes) -> bytes:
    envelope, _ = taken_apart(data)
    frame = codec.compress(b"import os; os.system('true')")
    rest = [len(frame), *[0] * (len(envelope.frames) - 1)]
    return assembled(msgspec.structs.replace(envelope, frames=rest), frame)


def nothing(data: bytes) -> bytes:
    return b""


FORGERIES: list[Change] = [
    flip_member,
    cut_short,
    by_a_stranger,
    by_a_stranger_under_our_name,
    for_another_namespace,
    another_manifest,
    another_member,
    nothing,
]
NAMES = [change.__name__ for change in FORGERIES]


def plant(redis_server: RedisServer, name: str, data: bytes) -> None:
    """What somebody with Redis' password can do: an entry whose digest fits its bytes."""
    redis, digest = redis_server.client(), hashlib.sha256(data).hexdigest()
    redis.set(f"torchrelay:blob:{digest}", data)
    index = next(name for name in _index_names(redis, name))
    redis.hset(index, mapping={"digest": digest, "size": len(data), "place": "redis"})


def _index_names(redis: Any, name: str) -> Iterator[bytes]:
    for found in redis.keys(f"*{name}*"):
        if redis.type(found) == b"hash" and redis.hexists(found, "digest"):
            yield found


@pytest.mark.parametrize("forge", FORGERIES, ids=NAMES)
def test_an_entry_forged_in_redis_is_not_served_and_is_compiled_once_more(
    forge: Change, start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    gateway = start_gateway()
    with gateway.http() as http:
        good = compiled(http, graph())
        name = gateway.pool.calls[0]
        plant(redis_server, name, forge(good))
        assert http.get(f"/v1/artifacts/{name}").status_code == 404
        fresh = compiled(http, graph())
        assert len(gateway.pool.calls) == 2
        assert post(http, graph()).content == fresh
        assert http.get(f"/v1/artifacts/{name}").content == fresh
        assert len(gateway.pool.calls) == 2
        assert http.get("/v1/stats").json()["damaged"] == 1
        log = http.get("/v1/audit").json()["entries"]
        assert [entry["key"] for entry in log if entry["action"] == "quarantined"] == [name]
        assert container.verify(fresh, gateway.app.state.gateway.keyring.trust("default"), key=name)


def test_a_good_artifact_of_another_request_is_not_served(
    gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    compiled(http, graph(1))
    other = compiled(http, graph(2))
    plant(redis_server, gateway.pool.calls[0], other)
    trust = gateway.app.state.gateway.keyring.trust("default")
    for size, name in ((1, gateway.pool.calls[0]), (2, gateway.pool.calls[1])):
        container.verify(compiled(http, graph(size)), trust, key=name)
    # Redis holds equal bytes once, so the second may have gone with the first.
    assert len(gateway.pool.calls) <= 4


# --- on the way to the client ----------------------------------------------------------------------------


class EvilPool(ArtifactPool):
    """Its artifacts fit the request, and their bundle writes `canary` when somebody unpickles it."""

    def __init__(self, canary: Path) -> None:
        super().__init__()
        self.canary = canary
        self.last: bytes | None = None
        self.keyring: Keyring | None = None
        """Of the gateway that it works for."""

    async def compile(self, request_bytes: bytes, **asked: Any) -> bytes:
        request = decoding.from_msgpack(request_bytes, type=schema.GraphRequest)
        self.calls.append(asked["key"])
        files = evil_members(self.canary)
        manifest = manifest_of(
            files, key=asked["key"], toolchain=request.toolchain, target=request.target, guards=[]
        )
        self.last = container.pack(manifest, files)
        return self.last


class Between:
    """Stands between gateway and client, and changes the artifacts that pass."""

    def __init__(self, app: ASGIApp, change: Change) -> None:
        self._app = app
        self._change = change

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {}

        async def changed(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                if (b"content-type", artifact_manifest.ARTIFACT_MEDIA_TYPE.encode()) not in message[
                    "headers"
                ]:
                    await send(message)
                return
            if (b"content-type", artifact_manifest.ARTIFACT_MEDIA_TYPE.encode()) in start.get("headers", []):
                assert not message.get("more_body")
                message = {**message, "body": self._change(message["body"])}
                length = str(len(message["body"])).encode()
                headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
                await send({**start, "headers": [*headers, (b"content-length", length)]})
            await send(message)

        await self._app(scope, receive, changed)


@pytest.fixture
def through(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., EvilPool]]:
    """Make this process a client of a gateway whose artifacts `change` passes through on their way here."""
    started: list[Running] = []

    def connect(change: Change, *, trusts: Ed25519PrivateKey | None = None) -> EvilPool:
        pool = EvilPool(tmp_path / "canary")
        running = Running(ServiceSettings(**settings), pool)
        running.app.add_middleware(Between, change=change)
        running.start()
        started.append(running)
        pool.keyring = running.app.state.gateway.keyring
        for name in [name for name in os.environ if name.startswith("TORCHRELAY_")]:
            monkeypatch.delenv(name)
        with running.http() as http:
            public = http.get("/v1/info").json()["public_keys"][0]
        if trusts is not None:
            public = key_text(trusts.public_key())
        monkeypatch.setenv("TORCHRELAY_URL", running.url)
        monkeypatch.setenv("TORCHRELAY_TOKEN", TOKEN)
        monkeypatch.setenv("TORCHRELAY_PUBLIC_KEYS", public)
        monkeypatch.setenv("TORCHRELAY_CACHE_DIR", str(tmp_path / "client"))
        monkeypatch.setenv("TORCHRELAY_MODE", "remote")
        monkeypatch.setenv("TORCHRELAY_STATE_DIR", str(tmp_path / "client-state"))
        process_backend.cache_clear()
        process_report.cache_clear()
        torch.compiler.reset()
        return pool

    yield connect
    for running in started:
        running.stop()
    process_backend.cache_clear()
    process_report.cache_clear()
    torch.compiler.reset()


def loss(x: torch.Tensor) -> torch.Tensor:
    return x.sin().square().sum()


def trains() -> dict[str, int]:
    """Fallbacks by code, after a step whose result was right."""
    x = torch.linspace(-1, 1, 8).requires_grad_()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        torch.compile(loss, backend="torchrelay")(x).backward()
    torch.testing.assert_close(x.grad, torch.sin(2 * x.detach()))
    return dict(torchrelay.report().fallbacks)


@pytest.mark.parametrize(
    ("forge", "code"),
    [
        (flip_member, "bad_artifact"),
        (cut_short, "bad_artifact"),
        (by_a_stranger, "bad_signature"),
        (by_a_stranger_under_our_name, "bad_signature"),
        (for_another_namespace, "bad_signature"),
        (another_manifest, "bad_signature"),
        (another_member, "bad_artifact"),
        (nothing, "bad_artifact"),
    ],
    ids=NAMES,
)
def test_an_artifact_changed_on_the_way_is_not_read_and_training_goes_on(
    forge: Change, code: str, through: Callable[..., EvilPool], tmp_path: Path
) -> None:
    pool = through(forge)
    assert trains() == {code: 1}
    assert len(pool.calls) == 1
    assert not pool.canary.exists()
    kept = [path for path in (tmp_path / "client").rglob("*") if path.is_file() and path.name != ".lock"]
    assert kept == []


def test_a_file_forged_on_this_machines_disk_is_not_read_and_goes(
    through: Callable[..., EvilPool], tmp_path: Path
) -> None:
    pool = through(by_a_stranger)
    trains()
    name = pool.calls[0]
    assert pool.last is not None
    path = tmp_path / "client" / "artifacts" / name[:2] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        sign(pool.last, STRANGER, key=name, namespace="default", epoch=0, signed_at=1_800_000_000)
    )
    process_backend.cache_clear()
    process_report.cache_clear()
    torch.compiler.reset()
    assert trains() == {"bad_signature": 1}
    assert torchrelay.report().disk_hits == 0
    assert not path.exists()
    assert not pool.canary.exists()


def test_an_artifact_signed_by_a_key_that_is_not_trusted_is_not_read(
    through: Callable[..., EvilPool],
) -> None:
    pool = through(lambda data: data, trusts=STRANGER)
    assert trains() == {"bad_signature": 1}
    assert not pool.canary.exists()


def told(pool: EvilPool, *, revoked: list[str], epoch: int) -> SignedDocument:
    """What the gateway's own key says of itself, which somebody now withholds."""
    assert pool.keyring is not None
    document = TrustDocument(serial=9, epoch=epoch, issued=1, keys=pool.keyring.ring.keys, revoked=revoked)
    signer = read_private(pool.keyring.folder / f"{pool.keyring.current}.pem")
    return sign_document(document, [signer])


@pytest.mark.parametrize("what", ["revoked key", "expired epoch", "other namespace"])
def test_a_good_signature_that_counts_no_longer_or_elsewhere_is_not_believed(
    what: str, through: Callable[..., EvilPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = through(lambda data: data)
    assert pool.keyring is not None
    if what == "other namespace":
        monkeypatch.setenv("TORCHRELAY_NAMESPACE", "rivals")
    else:
        revoked = [pool.keyring.current] if what == "revoked key" else []
        news = told(pool, revoked=revoked, epoch=0 if revoked else 1)
        TrustStore(load_settings()).learn(news)
    process_backend.cache_clear()
    assert trains() == {"bad_signature": 1}
    assert not pool.canary.exists()


def test_a_file_on_this_machines_disk_goes_when_its_key_is_revoked(
    through: Callable[..., EvilPool], tmp_path: Path
) -> None:
    pool = through(lambda data: data)
    assert pool.keyring is not None
    name = prepared_name(pool)
    assert pool.last is not None
    path = tmp_path / "client" / "artifacts" / name[:2] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pool.keyring.sign(pool.last, key=name, namespace="default"))
    pool.canary.unlink(missing_ok=True)
    pool.keyring.revoke(pool.keyring.current)
    TrustStore(load_settings()).learn(pool.keyring.document())
    process_backend.cache_clear()
    process_report.cache_clear()
    torch.compiler.reset()
    assert trains() == {"bad_signature": 1}
    assert torchrelay.report().disk_hits == 0
    assert not path.exists()
    assert not pool.canary.exists()


def prepared_name(pool: EvilPool) -> str:
    """The key of what `trains` asks for, once the pool has made its artifact."""
    trains()
    return pool.calls[0]


def test_a_trusted_signature_is_all_that_keeps_the_bundle_from_being_read(
    through: Callable[..., EvilPool],
) -> None:
    """Else the tests above would prove nothing: with the right signature the canary is written."""
    pool = through(lambda data: data)
    trains()
    assert pool.canary.exists()


# --- what verification does ------------------------------------------------------------------------------

_VERIFY = """
import pathlib, sys
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torchrelay.clients.artifacts.verification import verify
from torchrelay.compiler.request import codec
from torchrelay.compiler.errors import RelayError
from torchrelay.compiler.artifact.signing import Trust

folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
keys = Trust.of([Ed25519PrivateKey.from_private_bytes(b"\\1" * 32).public_key()], namespace="default")
request = codec.unpack_request((folder / "request").read_bytes())
files = {path: path.read_bytes() for path in sorted(folder.glob("*.art"))}
seen = []
FREE = {"os.listdir", "object.__getattr__", "sys._getframe", "time.sleep", "cpython.PyInterpreterState_New"}
verify((folder / "good").read_bytes(), keys, key=name, request=request)
watching = [True]
sys.addaudithook(lambda event, arguments: watching[0] and seen.append((event, str(arguments)[:200])))
refused = 0
for data in files.values():
    try:
        verify(data, keys, key=name, request=request)
    except RelayError:
        refused += 1
watching[0] = False
done = [event for event in seen if event[0] not in FREE]
assert refused == len(files) > 0, (refused, len(files))
assert done == [], done
"""


def test_nothing_is_imported_opened_or_run_before_an_artifact_is_refused(tmp_path: Path) -> None:
    signer = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
    body = graph()
    name = key.key_of(codec.unpack_request(body))
    files = evil_members(tmp_path / "canary")
    good = signed(files, signer, key=name)
    forged = [forge(good) for forge in FORGERIES]
    forged += [
        signed(files, signer, key="cd" * 32),
        signed(files, signer, key=name, schema=schema.SCHEMA + 1),
        signed(files, signer, key=name, toolchain=msgspec.structs.replace(TOOLCHAIN, torch="2.12.0")),
        signed(files, signer, key=name, target=msgspec.structs.replace(TARGET, cpu=["avx2"])),
        signed({**files, "../evil.so": b"evil"}, signer, key=name),
        pickle.dumps(ArtifactPool),
    ]
    (tmp_path / "request").write_bytes(body)
    (tmp_path / "good").write_bytes(good)
    for position, data in enumerate(forged):
        (tmp_path / f"{position}.art").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", _VERIFY, str(tmp_path), name],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (tmp_path / "canary").exists()
