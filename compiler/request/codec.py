"""Stage 2: a GraphRequest into canonical bytes and an HTTP body, and back within limits; and zstd for all who need it.

Decoding checks types and bounds. What a request names is checked by validate.py."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from .. import decoding
from ..errors import LimitExceeded, MalformedRequest, SchemaMismatch
from .schema import SCHEMA, GraphRequest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


GRAPH_MEDIA_TYPE = "application/vnd.torchrelay.graph+msgpack"


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds checked before and while a request is decoded."""

    body_bytes: Annotated[int, Meta(gt=0)] = 32 << 20
    """Compressed request, bytes."""
    request_bytes: Annotated[int, Meta(gt=0)] = 128 << 20
    """Decompressed request, bytes."""
    nodes: int = 100_000
    """Nodes of all graphs together."""
    values: int = 2_000_000
    """Values in the arguments of all nodes together: a few bytes each before compression, a hundred in memory."""
    depth: int = 32
    """Nesting of arguments and of subgraphs."""
    constant_bytes: int = 16 << 20
    """All constants together, bytes."""
    inputs: int = 20_000
    kernels: int = 64
    """User-written Triton kernels."""
    source_bytes: int = 1 << 20
    """Their sources together, bytes."""


_PIECE = 1 << 20
_WINDOW_LOG = 23
"""`compress` makes frames with windows of 2 MiB at most; one that asks a reader for more than 8 is not its."""
_request_encoder = msgspec.msgpack.Encoder()


def encode_request(request: GraphRequest) -> bytes:
    """Canonical bytes of a request, before compression: the key's input."""
    return _request_encoder.encode(request)


def compress(data: bytes, level: int = 3) -> bytes:
    return zstd.compress(data, level)


def unpacked_size(data: bytes, limit: int) -> int:
    """Bytes that a zstd frame holds, counted without keeping them where the frame does not say.

    Raises LimitExceeded past `limit`, MalformedRequest on garbage.
    """
    try:
        size = zstd.get_frame_info(data).decompressed_size
    except zstd.ZstdError as error:
        raise MalformedRequest(f"body is not a zstd frame: {error}") from None
    if size is None:
        return sum(map(len, decompressed([data], limit)))
    if size > limit:
        raise LimitExceeded(f"body holds more than {limit} bytes after decompression")
    return size


def decompress(data: bytes, limit: int) -> bytes:
    """Decompress at most `limit` bytes; raises LimitExceeded past it and MalformedRequest on garbage."""
    return b"".join(decompressed([data], limit, piece=limit + 1))


def decompressed(parts: Iterable[bytes], limit: int, *, piece: int = _PIECE) -> Iterator[bytes]:
    """Decompress a frame that comes in parts, and in pieces of at most `piece` bytes. What is held besides is
    one part: the decompressor copies what it has not used of it."""
    unread = iter(parts)
    decompressor = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})
    size = 0
    while not decompressor.eof:
        is_empty = decompressor.needs_input  # if not, a piece was full, and there may be no more than that
        part = next(unread, b"") if is_empty else b""
        try:
            out = decompressor.decompress(part, max_length=piece)
        except zstd.ZstdError as error:
            raise MalformedRequest(f"body is not a zstd frame: {error}") from None
        size += len(out)
        if size > limit:
            raise LimitExceeded(f"body holds more than {limit} bytes after decompression")
        if is_empty and not out and not part:
            raise MalformedRequest("body ends inside its zstd frame")
        yield out
    if decompressor.unused_data or next(unread, b""):
        raise MalformedRequest("bytes follow the body's zstd frame")


def pack_request(request: GraphRequest) -> bytes:
    """The HTTP body: zstd-compressed canonical bytes."""
    return compress(encode_request(request))


def unpack_request(body: bytes, limits: Limits = Limits()) -> GraphRequest:  # noqa: B008 (frozen)
    """The HTTP body back into a request, bounded by `limits`; types checked, targets not yet (graph.check).

    Raises LimitExceeded, MalformedRequest, SchemaMismatch.
    """
    if len(body) > limits.body_bytes:
        raise LimitExceeded(f"body has {len(body)} bytes, limit {limits.body_bytes}")
    data = decompress(body, limits.request_bytes)
    try:
        request = decoding.from_msgpack(data, type=GraphRequest)
    except decoding.NestedTooDeep:
        raise LimitExceeded("arguments are nested too deep") from None
    except msgspec.ValidationError as error:
        _raise_if_other_schema(data)
        raise MalformedRequest(f"request does not match schema {SCHEMA}: {error}") from None
    except msgspec.DecodeError as error:
        raise MalformedRequest(f"request cannot be read: {error}") from None
    if request.schema != SCHEMA:
        raise SchemaMismatch(f"request has schema {request.schema}, this side speaks {SCHEMA}")
    return request


class _SchemaOnly(Struct):
    schema: int


def _raise_if_other_schema(data: bytes) -> None:
    try:
        found = decoding.from_msgpack(data, type=_SchemaOnly).schema
    except decoding.NestedTooDeep:  # in what is skipped on the way to the schema
        raise LimitExceeded("the request is nested too deep") from None
    except msgspec.MsgspecError:
        return
    if found != SCHEMA:
        raise SchemaMismatch(f"request has schema {found}, this side speaks {SCHEMA}")


def to_json(message: Any) -> bytes:
    return msgspec.json.encode(message)
