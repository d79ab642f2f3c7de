"""Stage 4: an HTTP body -> a checked request with its key. Nothing from the wire gets past here unchecked.

Decoding holds the interpreter's lock, 40 ms for each MiB of nodes, so the work is done where it cannot stall
the event loop: small bodies in place, middling ones in a thread, large ones in a child process.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict

import msgspec
from fastapi import Request
from msgspec import Struct

from ..compiler import check, decoding, key, pinned, tune_kernels, wire
from ..compiler.errors import LimitExceeded, MalformedRequest, RelayError, Unavailable, from_code
from .blobs import sha256

_INLINE_BYTES = 32 << 10
_THREAD_BYTES = 1 << 20
_REMEMBERED = 4096
_CHILDREN = 2
_CHILD_SECONDS = 60.0
_DRAIN_SECONDS = 2.0
_SLOWEST = 256 << 10
"""Bytes a second of a large body that is still waited for."""


class Ask(Struct, frozen=True):
    """A request that may be compiled. `canonical`: wire.encode_request's bytes; `key`: their digest."""

    key: str
    canonical: bytes
    toolchain: wire.Toolchain
    target: wire.Target
    components: dict[str, str]
    kernels: list[str]
    """Names of the user-written kernels whose source it holds."""
    sources: list[str] = []
    """Digests of these sources (tune_kernels.source_digest)."""
    threads: int | None = None
    """That what it may want searched runs in, 0 on a GPU; None: it tunes nothing, or takes all from a strict lock."""


class ChildInput(Struct, frozen=True):
    body: bytes
    limits: wire.Limits


def parse(body: bytes, limits: wire.Limits) -> Ask:
    """Decode, check and name a request. Raises RequestError's children, nothing else."""
    request = wire.unpack_request(body, limits)
    check.check(request, limits)
    canonical = wire.encode_request(request)
    return Ask(
        key.key_of_bytes(canonical),
        canonical,
        request.toolchain,
        request.target,
        key.components(request),
        [kernel.name for kernel in request.kernels],
        sorted({tune_kernels.source_digest(kernel) for kernel in request.kernels}),
        _search_threads(request),
    )


def _search_threads(request: wire.GraphRequest) -> int | None:
    lock = request.tuning_lock
    if not pinned.tunes(request) or (lock is not None and lock.strict):
        return None
    return request.ambient.threads if request.target.kind == "cpu" else 0


class Intake:
    """Bodies in, Asks out; remembers which bytes had which key, so that known bodies are not parsed again."""

    def __init__(self, limits: wire.Limits, *, body_timeout_seconds: float) -> None:
        self._limits = limits
        self._body_timeout_seconds = body_timeout_seconds
        self._known: OrderedDict[str, str] = OrderedDict()
        self._children = asyncio.Semaphore(_CHILDREN)

    async def read(self, request: Request, limit_bytes: int | None = None) -> bytes:
        """The body, never more than the limit (a graph's if None) in memory. One that says that it is large has longer.

        Raises LimitExceeded, MalformedRequest.
        """
        limit = limit_bytes or self._limits.body_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            await _drain(request, limit)
            raise LimitExceeded(f"body has {declared} bytes, limit {limit}")
        parts: list[bytes] = []
        size = 0
        seconds = max(self._body_timeout_seconds, int(declared) / _SLOWEST if declared.isdecimal() else 0.0)
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        break
                    parts.append(part)
        except TimeoutError:
            raise MalformedRequest(f"the body did not arrive within {seconds:g} s") from None
        if size > limit:
            await _drain(request, limit)
            raise LimitExceeded(f"body has more than {limit} bytes")
        return b"".join(parts)

    async def key_of(self, body: bytes, *, namespace: str) -> tuple[str, Ask | None]:
        """The body's key; with the Ask, unless these very bytes were parsed before, for this namespace: how long the
        answer takes shall not tell one tenant what another has asked."""
        name = f"{namespace} {await sha256(body)}"
        known = self._known.get(name)
        if known is not None:
            self._known.move_to_end(name)
            return known, None
        ask = await self.parse(body)
        self._known[name] = ask.key
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return ask.key, ask

    async def parse(self, body: bytes) -> Ask:
        """`parse`, off the event loop where that matters. Raises RequestError's children, Unavailable."""
        size = await asyncio.to_thread(wire.unpacked_size, body, self._limits.request_bytes)
        if size <= _INLINE_BYTES:
            return parse(body, self._limits)
        if size <= _THREAD_BYTES:
            return await asyncio.to_thread(parse, body, self._limits)
        async with self._children:
            return await _parse_in_child(body, self._limits)


async def _parse_in_child(body: bytes, limits: wire.Limits) -> Ask:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        f"{__package__}.intake_child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_CHILD_SECONDS):
            out, _ = await child.communicate(msgspec.msgpack.encode(ChildInput(body, limits)))
    except TimeoutError:
        raise LimitExceeded(f"the request could not be checked within {_CHILD_SECONDS:g} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        raise Unavailable(f"the process that checks large requests ended with {child.returncode}")
    return decode_result(out)


def encode_result(result: Ask | RelayError) -> bytes:
    """What the child writes: a flag and the Ask, or a flag and the error."""
    if isinstance(result, RelayError):
        return b"e" + msgspec.msgpack.encode(wire.ErrorBody(result.code, result.message, result.advice))
    return b"a" + msgspec.msgpack.encode(result)


def decode_result(data: bytes) -> Ask:
    if data[:1] == b"a":
        return decoding.from_msgpack(data[1:], type=Ask)
    error = decoding.from_msgpack(data[1:], type=wire.ErrorBody)
    raise from_code(error.code, error.message, error.hint)


async def _drain(request: Request, limit: int) -> None:
    """Read on for a little and throw it away: a client that is still sending would miss the answer."""
    size = 0
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    return
    except TimeoutError:
        return
