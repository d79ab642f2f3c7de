"""An engine for the fork server: a request names a way to use the disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torchrelay.compiler import decoding
from torchrelay.compiler.request import schema

TOOLCHAIN = schema.Toolchain(python="cp311", torch="0.0.0", triton="", cuda="", platform="linux-x86_64")
TARGET = schema.Target(kind="cpu", name="", capability="", units=0, cpu=["avx2"])


def preload() -> None:
    return


def warm_up(folder: Path) -> None:
    return


def describe(kind: str) -> tuple[schema.Toolchain, schema.Target]:
    return TOOLCHAIN, TARGET


def others(kind: str) -> list[schema.OtherTarget]:
    return []


def missing(kind: str) -> str:
    return ""


def preparation(target: schema.Target) -> str:
    return ""


def compile_graph(request: bytes, **_: object) -> bytes:
    """Write as many bytes as the request says to one file, and answer with what it holds."""
    path = Path(tempfile.gettempdir()) / "written"
    path.write_bytes(bytes(decoding.from_json(request, type=int)))
    return path.read_bytes()
