"""Between actor, fork server and compile child: length-prefixed MessagePack frames; structs in, bytes out.

The actor sends Job, Cancel and Reply. The fork server answers Ready once, then for each job any number of Event and
Query and one of Done and Failed. The child speaks Event, Query, Done and Failed to the fork server, which checks each
frame before it passes it on: a child that writes anything else is killed. All that the child hears is Reply.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ..compiler import decoding, wire
from ..compiler.errors import RelayError, from_code

MAX_FRAME = 2 << 30
"""Bytes. Past it a length prefix is garbage rather than an artifact."""

_LENGTH = struct.Struct("<I")
QuestionId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class _Message(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Job(_Message, tag="job"):
    """`request`: a wire.GraphRequest to compile, or a SearchOrder. `seconds`: what is left of its deadline;
    `namespace`: whose kernels it shares."""

    key: str
    request: bytes
    seconds: float
    namespace: str = "default"
    work: Literal["compile", "search"] = "compile"


class Cancel(_Message, tag="cancel"):
    """Kill the running job, if there is one."""


class Reply(_Message, tag="reply"):
    """What the running job asked under `id` is answered so; b'': nobody answers."""

    id: QuestionId
    answer: bytes


class Ready(_Message, tag="ready"):
    """The fork server is warm. `jobs_dir` is its own, for whoever must clean up after it.

    isolation: what shuts its jobs in, as /v1/workers names it. missing: what jobs need and do not find there. device:
    which of a node's GPUs it sees; '' for a CPU. processors: that it may use; 0: it does not tell.
    """

    pid: int
    toolchain: wire.Toolchain
    target: wire.Target
    jobs_dir: str
    isolation: list[str] = []
    missing: str = ""
    device: str = ""
    processors: int = 0


class Event(_Message, tag="event"):
    """The job has entered `stage`."""

    stage: wire.Stage
    detail: str = ""


class Query(_Message, tag="query"):
    """The job wants to know something of the service (an encoded tuning.Question), and goes on without if it must."""

    id: QuestionId
    question: bytes


class Done(_Message, tag="done"):
    """The unsigned artifact."""

    artifact: bytes


class Failed(_Message, tag="failed"):
    """A RelayError, by its parts."""

    code: str
    message: str
    hint: str

    @classmethod
    def of(cls, error: RelayError) -> Failed:
        return cls(error.code, error.message, error.advice)

    def error(self) -> RelayError:
        return from_code(self.code, self.message, self.hint)


Order = Job | Cancel | Reply
Answer = Ready | Event | Query | Done | Failed
FromChild = Event | Query | Done | Failed


class BadFrame(Exception):
    """Bytes that are no frame, or a frame that is no message."""


def encode(message: Order | Answer) -> bytes:
    """One frame: a 4-byte little-endian length and the message."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def frame_length(prefix: bytes) -> int:
    """The length that a frame's first 4 bytes announce. Raises BadFrame past MAX_FRAME."""
    length: int = _LENGTH.unpack(prefix)[0]
    if length > MAX_FRAME:
        raise BadFrame(f"a frame announces {length} bytes")
    return length


def decode_order(body: bytes) -> Order:
    return _decode(body, Order)


def decode_answer(body: bytes) -> Answer:
    return _decode(body, Answer)


def decode_from_child(body: bytes) -> FromChild:
    return _decode(body, FromChild)


def decode_reply(body: bytes) -> Reply:
    return _decode(body, Reply)


def _decode(body, union):
    try:
        return decoding.from_msgpack(body, type=union)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(str(error)) from None


class Frames:
    """Bytes as they come off a pipe, cut into frames' bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add `data`; return the bodies that are now whole. Raises BadFrame."""
        self._buffer += data
        bodies = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + frame_length(bytes(self._buffer[: _LENGTH.size]))
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return bodies
