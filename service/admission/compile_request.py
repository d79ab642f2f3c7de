"""Stage 4: decodes and checks a request's bytes and computes its key. No HTTP and no Redis."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from ...compiler import decoding
from ...compiler.api import compiles
from ...compiler.api.tuning import kernels as tuning_kernels
from ...compiler.errors import RelayError, from_code
from ...compiler.request import codec, key, schema, tuning_pins, validate

_VALUES = 20_000
_VALUES_PER_BYTE = 16
"""How many values a body's arguments may have: so many, and more for each byte on the wire. Real graphs have about one
for each byte; a thousand bytes of nothing but empty tuples would take five seconds to check."""


class CompileRequest(Struct, frozen=True):
    """A request that may be compiled. `canonical`: codec.encode_request's bytes; `key`: their digest."""

    key: str
    canonical: bytes
    toolchain: schema.Toolchain
    target: schema.Target
    components: dict[str, str]
    kernels: list[str]
    """Names of the user-written kernels whose source it holds."""
    sources: list[str] = []
    """Digests of these sources (kernels.source_digest)."""
    threads: int | None = None
    """Threads in which kernels are measured, 0 on a GPU; None: it tunes nothing, or takes all from a strict lock."""
    unkeyed: str = ""
    """key.unkeyed."""


class ParseInput(Struct, frozen=True):
    body: bytes
    limits: codec.Limits


def parse(body: bytes, limits: codec.Limits) -> CompileRequest:
    """Decode, check and name a request. Raises only subclasses of RequestError."""
    values = min(limits.values, _VALUES + _VALUES_PER_BYTE * len(body))
    limits = msgspec.structs.replace(limits, values=values)
    request = codec.unpack_request(body, limits)
    validate.check_request(request, limits)
    canonical = codec.encode_request(request)
    return CompileRequest(
        key.key_of(request, canonical),
        canonical,
        request.toolchain,
        request.target,
        key.components(request),
        [kernel.name for kernel in request.kernels],
        sorted({tuning_kernels.source_digest(kernel) for kernel in request.kernels}),
        _search_threads(request),
        key.unkeyed(request),
    )


def _search_threads(request: schema.GraphRequest) -> int | None:
    lock = request.tuning_lock
    if not tuning_pins.tunes(request) or (lock is not None and lock.strict):
        return None
    return request.ambient.threads if request.target.kind == "cpu" else 0


def encode_result(result: CompileRequest | RelayError) -> bytes:
    """What the child writes: a flag and the request, or a flag and the error."""
    if isinstance(result, RelayError):
        return b"e" + msgspec.msgpack.encode(compiles.ErrorBody(result.code, result.message, result.advice))
    return b"a" + msgspec.msgpack.encode(result)


def decode_result(data: bytes) -> CompileRequest:
    if data[:1] == b"a":
        return decoding.from_msgpack(memoryview(data)[1:], type=CompileRequest)
    error = decoding.from_msgpack(data[1:], type=compiles.ErrorBody)
    raise from_code(error.code, error.message, error.hint)
