"""What a worker in foreign hands sends: what the service refuses to sign or store, and the memory that this takes."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from service_parts import ArtifactPool, RedisServer, StartGateway, follow, graph, post
from signed import KEY, manifest_of, packed
from signed import sign as sign_by
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest
from torchrelay.compiler.artifact.signing import Trust
from torchrelay.compiler.errors import ArtifactError
from torchrelay.compiler.request import codec
from zstd_frames import frame

SIGNER = Ed25519PrivateKey.generate()
FILES = {"code.py": b"print(1)\n" * 100}


def sign(data: bytes) -> bytes:
    return sign_by(data, SIGNER, key=KEY, namespace="default", epoch=0, signed_at=1)


def _passed(error: float, seconds: float) -> artifact_manifest.Verification:
    return artifact_manifest.Verification("passed", "", error, seconds)


def _measured(**changes: Any) -> list[artifact_manifest.Measurement]:
    usual = {"problem": "mm", "winner": "aten", "milliseconds": 0.5, "candidates": 3, "uses": 1}
    return [artifact_manifest.Measurement(**{**usual, **changes})]


IMPOSSIBLE: list[dict[str, Any]] = [
    {"stages": [("aot", math.nan)]},
    {"stages": [("aot", math.inf)]},
    {"stages": [("aot", -1.0)]},
    {"stages": [("aot", 1e300)]},
    {"stages": [("aot", 1.0)] * 1000},
    {"stages": [("a" * 1000, 1.0)]},
    {"verification": _passed(math.nan, 0.1)},
    {"verification": _passed(math.inf, 0.1)},
    {"verification": _passed(0.0, math.nan)},
    {"verification": _passed(0.0, 1e300)},
    {"verification": artifact_manifest.Verification("skipped", "x" * 100_000, 0.0, 0.1)},
    {"tuning": _measured(milliseconds=math.nan)},
    {"tuning": _measured(milliseconds=math.inf)},
    {"tuning": _measured(candidates=-1)},
    {"tuning": _measured(uses=1 << 62)},
    {"tuning": _measured(problem="x" * 1_000_000)},
    {"kernels": -1},
    {"kernels": 1 << 62},
    {"kernels_built": -1},
    {"searched": -1},
    {"searched": 1 << 62},
    {"recalled": 1 << 62},
    {"benchmarks": 1 << 62},
    {"created": "2" * 1000},
    {"worker": "w" * 10_000},
    {"guards": ["x" * 1_000_000]},
    {"needs": {"x" * 1000: "1"}},
    {"needs": {"GLIBC": "2" * 1000}},
    {"needs": {f"family{n}": "1" for n in range(1000)}},
]


@pytest.mark.parametrize("changes", IMPOSSIBLE, ids=lambda changes: f"{changes}"[:60])
def test_a_manifest_with_an_impossible_value_is_never_signed(changes: dict[str, Any]) -> None:
    frames = [codec.compress(data) for data in FILES.values()]
    assert sign(packed(manifest_of(FILES), frames))
    with pytest.raises(ArtifactError, match="manifest cannot be read"):
        sign(packed(manifest_of(FILES, **changes), frames))


@pytest.mark.parametrize(("guards", "refused"), [(1_700, "manifest has"), (4_000, "head has")])
def test_a_manifest_has_a_largest_size(guards: int, refused: str) -> None:
    """Above 16 MiB; above 17 MiB the length at the beginning of the file says so."""
    frames = [codec.compress(data) for data in FILES.values()]
    long = manifest_of(FILES, guards=["x" * 10_000] * guards)
    with pytest.raises(ArtifactError, match=refused):
        sign(packed(long, frames))


def test_an_artifact_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    data = container.pack(manifest_of(FILES), FILES)
    monkeypatch.setattr(artifact_manifest, "MAX_ARTIFACT_BYTES", len(data))
    assert sign(data)
    with pytest.raises(ArtifactError, match=f"has {len(data) + 1} bytes"):
        sign(data + b"x")


class Talker(ArtifactPool):
    """A pool whose worker tells far too much, at once."""

    async def compile(self, request_bytes: bytes, *, on_progress: Any, **rest: Any) -> bytes:
        for _ in range(10_000):
            on_progress("inductor", "x" * 100_000)
        return await super().compile(request_bytes, on_progress=on_progress, **rest)


def test_a_worker_that_talks_too_much_fills_neither_redis_nor_the_gateway(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    gateway = start_gateway(Talker())
    with gateway.http() as http:
        name = post(http, graph()).json()["key"]
        *steps, (_, last, _) = follow(http, name)
        assert last == "done"
        assert len(steps) < 100
        assert max(len(told["detail"]) for _, _, told in steps) == 500
        with redis_server.client() as redis:
            assert redis.memory_usage(f"torchrelay:events:{name}") < 200_000


def zeros(count: int) -> bytes:
    """A zstd frame of so many zeros: 4 bytes for each 128 KiB."""
    return frame(count, declared=count)


def bomb(*members: tuple[str, int, bytes]) -> bytes:
    """An artifact of members (name, size, frame); each 128 MiB of zeros has its true digest."""
    true = {128 << 20: hashlib.sha256(bytes(128 << 20)).hexdigest(), 0: hashlib.sha256().hexdigest()}
    entries = [
        artifact_manifest.Member(name=name, size=size, sha256=true.get(size, "0" * 64))
        for name, size, _ in members
    ]
    return packed(manifest_of({}, members=entries), [data for *_, data in members])


BOMBS = {
    "one member": bomb(("a", 1 << 30, zeros(1 << 30))),
    "many members": bomb(*((f"m{n}", 128 << 20, zeros(128 << 20)) for n in range(64))),
    "more than it says": bomb(("a", 1 << 10, zeros(1 << 30))),
    "members without end": bomb(*((f"m{n}", 0, codec.compress(b"")) for n in range(20_000))),
    "a large window": bomb(("a", 1 << 20, b"\x28\xb5\x2f\xfd\x00\x90" + b"\x01\x00\x00")),
}
"""Each is a few KiB, or MiB in the last but one."""

_SIGN = """
import sys
from pathlib import Path
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torchrelay.compiler.artifact import container
from torchrelay.compiler.errors import ArtifactError

data, key = sys.stdin.buffer.read(), sys.argv[1]
signer, outcome = Ed25519PrivateKey.generate(), "signed"
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew, see proc(5)

def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])

before = status("VmRSS")
try:
    container.make_signature(data, signer, key=key, namespace="default", epoch=0, signed_at=1)
except ArtifactError as error:
    outcome = error.message
print(status("VmHWM") - before, outcome)
"""


def signed_elsewhere(data: bytes) -> tuple[int, str]:
    """What a process that signs `data` takes of memory for it, in bytes, and what came of it."""
    done = subprocess.run([sys.executable, "-c", _SIGN, KEY], input=data, capture_output=True, check=True)
    growth, _, outcome = done.stdout.decode().strip().partition(" ")
    return int(growth) << 10, outcome


@pytest.mark.parametrize("name", BOMBS)
def test_an_artifact_bomb_is_refused_without_memory_for_it(name: str) -> None:
    growth, outcome = signed_elsewhere(BOMBS[name])
    assert outcome != "signed"
    assert growth < 48 << 20, outcome


def test_a_large_artifact_is_signed_without_holding_its_members() -> None:
    files = {f"lib{n}.so": os.urandom(1 << 20) * 64 for n in range(4)}
    growth, outcome = signed_elsewhere(container.pack(manifest_of(files), files))
    assert outcome == "signed"
    assert growth < 48 << 20


def test_what_is_checked_is_what_is_opened() -> None:
    files = {"a.so": b"1" * 3_000_000, "b.so": b"", "c.so": os.urandom(5_000_000)}
    data = sign(container.pack(manifest_of(files), files))
    trust = Trust.of([SIGNER.public_key()])
    opened = container.verify(data, trust, key=KEY)
    assert container.check(data, trust, key=KEY) == (opened.manifest, opened.statement)
    for at in (len(data) - 1, len(data) - 4_000_000, len(data) // 2):
        harmed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        for read in (container.check, container.verify):
            with pytest.raises(ArtifactError, match=r"damaged|does not match"):
                read(harmed, trust, key=KEY)
