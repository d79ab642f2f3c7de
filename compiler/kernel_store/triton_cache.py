"""Finds the binaries and the winners of Triton kernels that earlier compiles built and measured, by key.

Binaries have Triton's own key (source, signature, options, target, versions of Triton and ptxas) and are found through
Triton's interface for caches. A winner's key is a digest of the kernel's generated source, launch sizes and candidates,
and of the GPU and versions that measured. Both are in the namespace's kernel store (libraries.py); a stored winner can
only choose among a kernel's candidates.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from .. import decoding
from ..errors import RelayError
from ..request import codec
from .libraries import KernelExchange

_KEY = re.compile(r"[A-Z2-7]{52}")
_PACK_LIMIT = 64 << 20


class TritonWinner(Struct, frozen=True, forbid_unknown_fields=True):
    """The fastest configuration, as Triton prints it; its time; and how many were compared."""

    configuration: str
    milliseconds: float
    candidates: int


@contextlib.contextmanager
def sharing_binaries(exchange: KernelExchange | None) -> Iterator[None]:
    """Inside the block, and in processes forked there, Triton looks kernels up in the store before it compiles."""
    if exchange is None or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    store = exchange

    class Manager(FileCacheManager):  # type: ignore[misc]
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            super().__init__(key, override=override, dump=dump)
            self._shares = not (override or dump) and _KEY.fullmatch(key) is not None

        def get_group(self, filename: str) -> dict[str, str] | None:
            found: dict[str, str] | None = super().get_group(filename)
            if found is not None or not self._shares:
                return found
            files = unpacked(store.read(_binaries_name(self.key)))
            if filename not in files:
                return None
            paths = {name: self.put(data, name) for name, data in files.items()}
            super().put_group(filename, paths)
            _mark(Path(self.cache_dir)).touch()
            return paths

        def put_group(self, filename: str, group: dict[str, str]) -> str:
            path: str = super().put_group(filename, group)
            if self._shares:
                files = {name: Path(file).read_bytes() for name, file in group.items()}
                store.offer_bytes(_binaries_name(self.key), codec.compress(msgspec.msgpack.encode(files)))
            return path

    before = vars(knobs.cache).get("manager_class")
    knobs.cache.manager_class = Manager
    try:
        yield
    finally:
        if before is None:
            vars(knobs.cache).pop("manager_class", None)
        else:
            knobs.cache.manager_class = before


def was_reused(folder: Path) -> bool:
    """Whether the binaries in a folder of Triton's cache came from the store."""
    return _mark(folder).exists()


def find_winner(exchange: KernelExchange | None, key: bytes) -> TritonWinner | None:
    """None if nothing was measured, or the stored file is malformed."""
    data = None if exchange is None else exchange.read(winner_name(key))
    if data is None:
        return None
    try:
        return decoding.from_json(data, type=TritonWinner)
    except msgspec.DecodeError:
        return None


def offer_winner(exchange: KernelExchange | None, key: bytes, winner: TritonWinner) -> None:
    """Offer a measurement to later compiles."""
    if exchange is not None:
        exchange.offer_bytes(winner_name(key), msgspec.json.encode(winner))


def winner_key(source: str, sizes: list[int], candidates: list[str], made_by: list[str]) -> bytes:
    """source: a digest of the kernel's. sizes: the numbers it is launched with. candidates: configurations, in any
    order. made_by: GPU and versions."""
    parts: list[Any] = [source, sizes, sorted(candidates), made_by]
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()


def _mark(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.reused")


def _binaries_name(key: str) -> str:
    return f"t{key.lower()}.triton"


def winner_name(key: bytes) -> str:
    return f"w{base64.b32encode(key).decode().rstrip('=').lower()}.json"


def unpacked(data: bytes | None) -> dict[str, bytes]:
    if data is None:
        return {}
    try:
        files = decoding.from_msgpack(codec.decompress(data, _PACK_LIMIT), type=dict[str, bytes])
    except (msgspec.DecodeError, RelayError):
        return {}
    return files if all(name == Path(name).name for name in files) else {}
