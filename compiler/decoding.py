"""Bytes and plain values into typed messages, in any thread: the one place that makes msgspec's decoders.

msgspec prepares a struct when it is first decoded, and lets other threads see it before its fields are ready: two
threads that decode a type for the first time at the same moment end the process (SIGSEGV, up to version 0.22 at least).
A training script has such threads: its own, the one that prefetches, those that tell the service. Here one at a time
prepares a type, and no process is forked meanwhile.
"""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")


class NestedTooDeep(msgspec.DecodeError):
    """Values in values, deeper than Python's limit of recursion."""


_preparing = threading.RLock()
_json: dict[tuple[Any, bool], msgspec.json.Decoder[Any]] = {}
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_preparing.acquire, after_in_parent=_preparing.release, after_in_child=_preparing.release
    )


@overload
def from_json(data: bytes | bytearray | memoryview | str, *, type: type[T], strict: bool = True) -> T: ...
@overload
def from_json(data: bytes | bytearray | memoryview | str, *, type: Any = Any, strict: bool = True) -> Any: ...
def from_json(data: bytes | bytearray | memoryview | str, *, type: Any = Any, strict: bool = True) -> Any:
    """`data` as a `type`. Raises msgspec.DecodeError, as ValidationError or NestedTooDeep if it is one of these."""
    return _decode(_json_decoder(type, strict), data)


@overload
def from_msgpack(data: bytes | bytearray | memoryview, *, type: type[T]) -> T: ...
@overload
def from_msgpack(data: bytes | bytearray | memoryview, *, type: Any = Any) -> Any: ...
def from_msgpack(data: bytes | bytearray | memoryview, *, type: Any = Any) -> Any:
    """`data` as a `type`. Raises as `from_json` does."""
    decoder = _msgpack.get(type)
    if decoder is None:
        with _preparing:
            decoder = _msgpack[type] = msgspec.msgpack.Decoder(type)
    return _decode(decoder, data)


def _decode(decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T], data: Any) -> T:
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"text that is not UTF-8: {error.reason}") from None
    except RecursionError:
        raise NestedTooDeep("nested too deep") from None


@overload
def convert(value: Any, *, type: type[T], strict: bool = True) -> T: ...
@overload
def convert(value: Any, *, type: Any, strict: bool = True) -> Any: ...
def convert(value: Any, *, type: Any, strict: bool = True) -> Any:
    """Plain values as a `type`. Raises as msgspec.convert does: ValidationError."""
    _json_decoder(type, strict)
    return msgspec.convert(value, type, strict=strict)


def _json_decoder(type: Any, strict: bool) -> msgspec.json.Decoder[Any]:
    decoder = _json.get((type, strict))
    if decoder is None:
        with _preparing:
            decoder = _json[type, strict] = msgspec.json.Decoder(type, strict=strict)
    return decoder
