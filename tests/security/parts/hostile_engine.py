"""An engine for the fork server that controls its child: the size of a request's tensor says what it tries."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import service_parts
from signed import manifest_of, packed
from torchrelay.compiler import decoding
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest
from torchrelay.compiler.errors import VerifyFailed
from torchrelay.compiler.request import codec, schema
from zstd_frames import frame

FILES = {"bundle": b"honest"}


def preload() -> None:
    return


def warm_up(folder: Path) -> None:
    return


def describe(kind: str) -> tuple[schema.Toolchain, schema.Target]:
    return service_parts.TOOLCHAIN, service_parts.TARGET


def others(kind: str) -> list[schema.OtherTarget]:
    return []


def missing(kind: str) -> str:
    return ""


def preparation(target: schema.Target) -> str:
    return ""


def compile_graph(request: bytes, *, key: str, progress: Callable[[str, str], None], **_: Any) -> bytes:
    (tensor,) = decoding.from_msgpack(request, type=schema.GraphRequest).inputs
    assert isinstance(tensor, schema.TensorInput)
    number = int(tensor.shape[0])
    attack = list(ATTACKS.values())[number - FIRST] if number >= FIRST else honest
    return attack(key, progress)


def honest(key: str, progress: Callable[[str, str], None]) -> bytes:
    progress("aot", "")
    return container.pack(manifest_of(FILES, key=key), FILES)


def _no_number(key: str, progress: Any) -> bytes:
    return packed(manifest_of(FILES, key=key, stages=[("aot", math.nan)]), [codec.compress(b"honest")])


def _bomb(key: str, progress: Any) -> bytes:
    size = 1 << 30
    digest = hashlib.sha256(b"").hexdigest()
    members = [artifact_manifest.Member(name="a", size=size, sha256=digest)]
    return packed(manifest_of({}, key=key, members=members), [frame(size, declared=size)])


def _of_another_key(key: str, progress: Any) -> bytes:
    return honest("cd" * 32, progress)


def _no_artifact(key: str, progress: Any) -> bytes:
    return os.urandom(1 << 20)


def _floods(key: str, progress: Callable[[str, str], None]) -> bytes:
    for number in range(20_000):
        progress("inductor", f"{number} " + "x" * 10_000)
    return _no_artifact(key, progress)


def _long_error(key: str, progress: Any) -> bytes:
    raise VerifyFailed("outputs\nof another job " * 500_000, hint="h" * 5_000_000)


def _writes(*frames: bytes) -> Callable[[str, Any], bytes]:
    """To each descriptor above standard error: one of them is the pipe to the server."""

    def attack(key: str, progress: Any) -> bytes:
        for name in [each.name for each in Path("/proc/self/fd").iterdir()]:
            for each in frames:
                if int(name) > 2:
                    try:
                        os.write(int(name), each)
                    except OSError:
                        break
        os._exit(0)

    return attack


def _framed(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


ATTACKS: dict[str, Callable[[str, Any], bytes]] = {
    "a time that is no number": _no_number,
    "a bomb": _bomb,
    "another graph's artifact": _of_another_key,
    "no artifact": _no_artifact,
    "a flood of progress": _floods,
    "an error without an end": _long_error,
    "a frame of 4 GiB": _writes(b"\xff" * 4 + b"x" * 1000),
    "a frame of 2 GiB": _writes((2 << 30).to_bytes(4, "little") + b"x" * 1000),
    "no MessagePack": _writes((100).to_bytes(4, "little") + b"\xc1" * 100),
    "another type's fields": _writes(_framed({"type": "JobDone", "artifact": [1] * 1000})),
    "a flood of frames": _writes(*[_framed({"type": "stage", "stage": "aot", "detail": "y" * 400})] * 5_000),
}
FIRST = 100
"""The size for the first of them; a smaller one is honest."""
