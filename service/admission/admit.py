"""Stage 4: limits on a request's body, and its parsing. Nothing from the wire gets past here unchecked.

Decoding holds the interpreter's lock, 40 ms for each MiB of nodes. So that the event loop does not stall, small bodies
are parsed in place, medium ones in a thread, large ones in a child process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec
from fastapi import Request

from ...compiler.errors import LimitExceeded, Unavailable
from ...compiler.request import codec
from ..base.budgets import FairWork
from ..base.http_bodies import UploadedFile, body_in_file, read_body
from ..storage.digests import sha256
from ..storage.redis.keys import DEFAULT_NAMESPACE
from .compile_request import CompileRequest, ParseInput, decode_result, parse

INLINE_BYTES = 32 << 10
THREAD_BYTES = 1 << 20
_REMEMBERED = 4096
PARSED_BYTES = 64 << 20
_PARSED = 1024
"""Parsed requests that are held in memory: their canonical bytes together, and how many. A small one takes ten times
its bytes."""
TOGETHER = 3
"""Medium ones that are parsed at once: more would wait for the interpreter's lock, with 50 MB each in memory."""
_CHILD_SECONDS = 60.0
_CHILD_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TMPDIR", "LANG", "LC_ALL")
"""All that the child gets of this process' environment, which has passwords."""


class Admission:
    """Reads and parses bodies.

    It remembers which bytes had which key, so that a known body is not parsed again. All who send the same bytes in one
    namespace at one time share one parse, and its error.
    """

    def __init__(
        self,
        limits: codec.Limits,
        work: FairWork | None = None,
        *,
        body_timeout_seconds: float,
        on_parse: Callable[[], None] = lambda: None,
    ) -> None:
        """work: in whose turns large bodies are parsed. on_parse: is called for each body that is parsed."""
        self._limits = limits
        self._work = work or FairWork(TOGETHER)
        self._threads = FairWork(TOGETHER)
        self._on_parse = on_parse
        self._body_timeout_seconds = body_timeout_seconds
        self._known: OrderedDict[str, str] = OrderedDict()
        self._parsing: dict[str, asyncio.Task[CompileRequest]] = {}
        self._parsed: OrderedDict[str, CompileRequest] = OrderedDict()
        """The latest. Keys of all three: see `_name`."""
        self._parsed_bytes = 0

    async def read(self, request: Request, limit_bytes: int | None = None) -> bytes:
        """The body; never more than the limit (a graph's if None) is in memory. A large declared size gets more time.

        Raises LimitExceeded, MalformedRequest.
        """
        limit = limit_bytes or self._limits.body_bytes
        return await read_body(request, limit, seconds=self._body_timeout_seconds)

    def read_file(self, request: Request, limit_bytes: int) -> AbstractAsyncContextManager[UploadedFile]:
        """Like `read`, into a file. Raises Unavailable too."""
        return body_in_file(request, limit_bytes, seconds=self._body_timeout_seconds)

    async def key_of(self, body: bytes, *, namespace: str) -> tuple[str, CompileRequest | None]:
        """The body's key, and the request unless these bytes were parsed before for this namespace.

        Raises subclasses of RequestError, Unavailable.
        """
        name = await _name(body, namespace)
        known = self._known.get(name)
        if known is not None:
            self._known.move_to_end(name)
            return known, self._parsed.get(name)
        request = await self._parse_once(name, body)
        self._known[name] = request.key
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return request.key, request

    async def request_of(self, body: bytes, *, namespace: str) -> CompileRequest:
        """Like `parse`, but once for all who need these bytes in this namespace at the same time."""
        return await self._parse_once(await _name(body, namespace), body)

    async def _parse_once(self, name: str, body: bytes) -> CompileRequest:
        if (parsed := self._parsed.get(name)) is not None:
            self._parsed.move_to_end(name)
            return parsed
        if (task := self._parsing.get(name)) is None:
            task = self._parsing[name] = asyncio.create_task(self._parse_for_all(name, body))
        return await asyncio.shield(task)  # a sender that is cancelled does not end it for the others

    async def _parse_for_all(self, name: str, body: bytes) -> CompileRequest:
        try:
            request = await self.parse(body, namespace=name.partition(" ")[0])
            self._hold(name, request)
            return request
        finally:
            del self._parsing[name]

    def _hold(self, name: str, request: CompileRequest) -> None:
        self._parsed[name] = request
        self._parsed_bytes += len(request.canonical)
        while self._parsed_bytes > PARSED_BYTES or len(self._parsed) > _PARSED:
            _, oldest = self._parsed.popitem(last=False)
            self._parsed_bytes -= len(oldest.canonical)

    async def parse(self, body: bytes, *, namespace: str = DEFAULT_NAMESPACE) -> CompileRequest:
        """`parse`, off the event loop for larger bodies, of which namespaces take turns. Raises subclasses of
        RequestError, Unavailable."""
        self._on_parse()
        size = await asyncio.to_thread(codec.unpacked_size, body, self._limits.request_bytes)
        if size <= INLINE_BYTES:
            return parse(body, self._limits)
        if size <= THREAD_BYTES:
            async with self._threads.turn(namespace):
                return await asyncio.to_thread(parse, body, self._limits)
        async with self._work.turn(namespace):
            return await _parse_in_child(body, self._limits)


async def _name(body: bytes, namespace: str) -> str:
    """What is shared, is shared in one namespace: the time of an answer must not reveal other tenants' requests."""
    return f"{namespace} {await sha256(body)}"


async def _parse_in_child(body: bytes, limits: codec.Limits) -> CompileRequest:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        f"{__package__}.parse_process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={name: os.environ[name] for name in _CHILD_VARIABLES if name in os.environ},
    )
    try:
        async with asyncio.timeout(_CHILD_SECONDS):
            out, _ = await child.communicate(msgspec.msgpack.encode(ParseInput(body, limits)))
    except TimeoutError:
        raise LimitExceeded(f"the request could not be checked within {_CHILD_SECONDS:g} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        raise Unavailable(f"the process that checks large requests ended with {child.returncode}")
    return decode_result(out)
