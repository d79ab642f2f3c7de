"""The messages between a slot's actor, its fork server and a job's child, as length-prefixed MessagePack frames.

The actor sends WorkerJob, CancelJob and QueryReply. The fork server answers ForkServerReady once, then for each job
any number of StageEvent and JobQuery and one of JobDone and JobFailed. The child writes these four to the fork server,
which checks each frame before it passes it on: a child that writes anything else is killed. The child reads QueryReply
alone.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ..compiler import decoding
from ..compiler.api import compiles
from ..compiler.errors import CompileKilled, RelayError, from_code
from ..compiler.request import schema

MAX_FRAME = 2 << 30
"""Bytes. Past it a length prefix is garbage rather than an artifact."""

_LENGTH = struct.Struct("<I")
QuestionId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class _Message(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class WorkerJob(_Message, tag="job"):
    """`request`: a wire.GraphRequest to compile, or a SearchJobSpec. `seconds`: what is left of its deadline;
    `namespace`: whose kernels it shares."""

    key: str
    request: bytes
    seconds: float
    namespace: str = "default"
    work: Literal["compile", "search"] = "compile"


class CancelJob(_Message, tag="cancel"):
    """Kill the running job, if there is one."""


class QueryReply(_Message, tag="reply"):
    """The answer to the running job's query `id`; b'': there is none."""

    id: QuestionId
    answer: bytes


class ForkServerReady(_Message, tag="ready"):
    """The fork server is warm. `jobs_dir`: its jobs' folders, for the process that cleans up after it.

    isolation: the layers that isolate its jobs, as /v1/workers names them. missing: a tool that jobs need and do not
    find there. device: the GPU of the node that it sees; '' for a CPU. processors: how many it may use; 0: unknown.
    """

    pid: int
    toolchain: schema.Toolchain
    target: schema.Target
    jobs_dir: str
    isolation: list[str] = []
    missing: str = ""
    device: str = ""
    processors: int = 0


class StageEvent(_Message, tag="event"):
    """The job has entered `stage`."""

    stage: compiles.Stage
    detail: str = ""


class JobQuery(_Message, tag="query"):
    """The job wants to know something of the service (an encoded queries.TuningQuery), and goes on without if
    it must."""

    id: QuestionId
    question: bytes


class JobDone(_Message, tag="done"):
    """The unsigned artifact."""

    artifact: bytes


class JobFailed(_Message, tag="failed"):
    """A RelayError, by its parts."""

    code: str
    message: str
    hint: str

    @classmethod
    def of(cls, error: RelayError) -> JobFailed:
        return cls(error.code, error.message, error.advice)

    def error(self) -> RelayError:
        return from_code(self.code, self.message, self.hint)


Command = WorkerJob | CancelJob | QueryReply
Answer = ForkServerReady | StageEvent | JobQuery | JobDone | JobFailed
FromChild = StageEvent | JobQuery | JobDone | JobFailed


class WorkerLost(CompileKilled):
    """A worker's actor, a job's driver or its node has gone, probably not because of its job."""


class BadFrame(Exception):
    """Bytes that are no frame, or a frame that is no message."""


def encode(message: Command | Answer) -> bytes:
    """One frame: a 4-byte little-endian length and the message."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def frame_length(prefix: bytes) -> int:
    """The length that a frame's first 4 bytes announce. Raises BadFrame past MAX_FRAME."""
    length: int = _LENGTH.unpack(prefix)[0]
    if length > MAX_FRAME:
        raise BadFrame(f"a frame announces {length} bytes")
    return length


def decode_command(body: bytes) -> Command:
    return _decode(body, Command)


def decode_answer(body: bytes) -> Answer:
    return _decode(body, Answer)


def decode_from_child(body: bytes) -> FromChild:
    return _decode(body, FromChild)


def decode_reply(body: bytes) -> QueryReply:
    return _decode(body, QueryReply)


def _decode(body, union):
    try:
        return decoding.from_msgpack(body, type=union)
    except msgspec.MsgspecError as error:
        raise BadFrame(str(error)) from None


class FrameDecoder:
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
