"""What a worker in foreign hands sends: what the service refuses to sign or store, and the memory that this takes."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from conftest import StartGateway
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from service_parts import ArtifactPool, RedisServer, follow, graph, post
from signed import KEY, manifest_of
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest
from torchrelay.compiler.errors import ArtifactError
from torchrelay.compiler.request import codec

SIGNER = Ed25519PrivateKey.generate()
FILES = {"code.py": b"print(1)\n" * 100}


def packed(manifest: artifact_manifest.Manifest, frames: list[bytes]) -> bytes:
    head = msgspec.msgpack.encode(
        container.Envelope(msgspec.msgpack.encode(manifest), [len(frame) for frame in frames])
    )
    return b"".join([container.MAGIC, len(head).to_bytes(4, "little"), head, *frames])


def sign(data: bytes) -> bytes:
    return container.sign(data, SIGNER, key=KEY, namespace="default", epoch=0, signed_at=1)


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


def test_a_manifest_has_a_largest_size() -> None:
    frames = [codec.compress(data) for data in FILES.values()]
    long = manifest_of(FILES, guards=["x" * 10_000] * 4_000)
    with pytest.raises(ArtifactError, match="manifest has"):
        sign(packed(long, frames))


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
