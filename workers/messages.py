"""The messages between a slot's actor, its fork server and a job's child, as length-prefixed MessagePack frames.

The actor sends WorkerJob, CancelJob and QueryReply. The fork server answers ForkServerReady once, then for each job
any number of StageEvent and JobQuery and one of JobDone and JobFailed. The child writes these four to the fork server,
which checks each frame before it passes it on: a child that writes anything else is killed. The child reads QueryReply
alone. A job is not trusted: every field has a bound, each kind of message has a longest frame, which is checked before
the frame is read, and of a job's events only so many a second are passed on.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from ..compiler import decoding
from ..compiler.api import compiles
from ..compiler.api.protocols import WORKERS
from ..compiler.artifact.manifest import MAX_ARTIFACT_BYTES
from ..compiler.errors import CompileKilled, ProtocolMismatch, RelayError, from_code
from ..compiler.request import schema
from ..compiler.tuning.queries import QUESTION_LIMIT

MAX_FRAME = 2 << 30
"""Bytes of any frame."""
EVENTS_PER_SECOND = 10
EVENT_BURST = 20
"""Events of one job that are passed on, over time and at once."""

Name = Annotated[str, Meta(max_length=64)]
Detail = Annotated[str, Meta(max_length=500)]
Message = Annotated[str, Meta(max_length=1 << 14)]
Hint = Annotated[str, Meta(max_length=2000)]
_LENGTH = struct.Struct("<I")
QuestionId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class _Message(Struct, frozen=True, omit_defaults=True):
    """Fields that a later release has added are ignored."""


class WorkerJob(_Message, frozen=True, tag="job"):
    """`request`: a GraphRequest to compile, or a SearchJobSpec. Nobody outside the sandbox decodes it, so the service
    says beside it what must be known there: its `target`; `holds_source`: it runs its caller's source. `seconds`: what
    is left of its deadline; `namespace`: whose kernels it shares; `trace_id`: by which its log lines are found."""

    key: str
    request: bytes
    seconds: float
    target: schema.Target
    namespace: str = "default"
    work: Literal["compile", "search"] = "compile"
    holds_source: bool = True
    trace_id: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?$")] = ""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        """To a worker node, which may be of the release before: by names, of which it ignores those that are new."""
        return partial(decoding.from_msgpack, type=WorkerJob), (msgspec.msgpack.encode(self),)


class CancelJob(_Message, frozen=True, tag="cancel"):
    """Kill the running job, if there is one."""


class QueryReply(_Message, frozen=True, tag="reply"):
    """The answer to the running job's query `id`; b'': there is none."""

    id: QuestionId
    answer: bytes


class ForkServerReady(_Message, frozen=True, tag="ready"):
    """The fork server is warm. `jobs_dir`: its jobs' folders, for the process that cleans up after it.

    isolation: the layers that isolate its jobs, as /v1/workers names them. missing: a tool that jobs need and do not
    find there. device: the GPU of the node that it sees; '' for a CPU. processors: how many it may use; 0: unknown.
    protocol, revision: of the node's release (protocols.WORKERS, schema.REVISION). others: CPU targets that it builds
    for beside its own.
    """

    pid: int
    toolchain: schema.Toolchain
    target: schema.Target
    jobs_dir: Annotated[str, Meta(max_length=4096)]
    isolation: Annotated[list[Name], Meta(max_length=16)] = []
    missing: Detail = ""
    device: Detail = ""
    processors: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    protocol: Annotated[int, Meta(ge=1, le=999_999)] = 1
    revision: Name = ""
    others: Annotated[list[schema.OtherTarget], Meta(max_length=64)] = []

    def check(self, worker: str) -> None:
        """Raises ProtocolMismatch unless this release's dispatcher can use the worker."""
        WORKERS.check(self.protocol, own="this dispatcher", other=f"worker {worker}")
        if self.revision != schema.REVISION:
            raise ProtocolMismatch(
                f"worker {worker} compiles revision {self.revision}, this dispatcher has {schema.REVISION}",
                hint="Upgrade the older of the two",
            )


class StageEvent(_Message, frozen=True, tag="event"):
    """The job has entered `stage`."""

    stage: compiles.Stage
    detail: Detail = ""

    @classmethod
    def of(cls, stage: compiles.Stage, detail: str) -> StageEvent:
        return cls(stage, _cut(detail, 500))


class JobQuery(_Message, frozen=True, tag="query"):
    """The job wants to know something of the service (an encoded queries.TuningQuery), and goes on without if
    it must."""

    id: QuestionId
    question: Annotated[bytes, Meta(max_length=QUESTION_LIMIT)]


class JobDone(_Message, frozen=True, tag="done"):
    """The unsigned artifact."""

    artifact: Annotated[bytes, Meta(max_length=MAX_ARTIFACT_BYTES)]


class JobFailed(_Message, frozen=True, tag="failed"):
    """A RelayError, by its parts."""

    code: Name
    message: Message
    hint: Hint

    @classmethod
    def of(cls, error: RelayError) -> JobFailed:
        return cls(error.code, _cut(error.message, 1 << 14), _cut(error.advice, 2000))

    def error(self) -> RelayError:
        return from_code(self.code, self.message, self.hint)


Command = WorkerJob | CancelJob | QueryReply
Answer = ForkServerReady | StageEvent | JobQuery | JobDone | JobFailed
FromChild = StageEvent | JobQuery | JobDone | JobFailed


class WorkerLost(CompileKilled):
    """A worker's actor, a job's driver or its node has gone, probably not because of its job."""


class BadFrame(Exception):
    """Bytes that are no frame, or a frame that is no message."""


def _cut(text: str, length: int) -> str:
    """A text's beginning, up to a space if there is one."""
    return text if len(text) <= length else text[:length].rpartition(" ")[0] or text[:length]


_LONGEST = {
    WorkerJob: MAX_FRAME,
    CancelJob: 1 << 10,
    QueryReply: 32 << 20,
    ForkServerReady: 1 << 20,
    StageEvent: 1 << 12,
    JobQuery: QUESTION_LIMIT + (1 << 10),
    JobDone: MAX_ARTIFACT_BYTES + (1 << 10),
    JobFailed: 1 << 17,
}
"""Bytes of a frame of each kind."""
_HEADS = {kind: b"\xa4type" + msgspec.msgpack.encode(kind.__struct_config__.tag) for kind in _LONGEST}
"""How each kind begins, after the byte that says how many fields follow."""
HEAD_BYTES = 1 + max(map(len, _HEADS.values()))


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


def check_length(length: int, head: bytes, kinds: Any) -> None:
    """Raises BadFrame unless a frame of one of `kinds` may have so many bytes. `head`: its first HEAD_BYTES, or all."""
    found = next((kind for kind in get_args(kinds) or (kinds,) if head.startswith(_HEADS[kind], 1)), None)
    if found is None or length > _LONGEST[found]:
        raise BadFrame(f"a frame of {length} bytes that begins with {head!r}")


def _decode(union: Any, body: bytes) -> Any:
    """Raises BadFrame."""
    try:
        return decoding.from_msgpack(body, type=union)
    except msgspec.MsgspecError as error:
        raise BadFrame(str(error)) from None


decode_command: Callable[[bytes], Command] = partial(_decode, Command)
decode_answer: Callable[[bytes], Answer] = partial(_decode, Answer)
decode_from_child: Callable[[bytes], FromChild] = partial(_decode, FromChild)
decode_reply: Callable[[bytes], QueryReply] = partial(_decode, QueryReply)


class FrameDecoder:
    """Bytes as they come off a pipe, cut into frames' bodies. `kinds`: the messages that may come."""

    def __init__(self, kinds: Any) -> None:
        self._kinds = kinds
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add `data`; return the bodies that are now whole. Raises BadFrame."""
        self._buffer += data
        bodies = []
        while len(self._buffer) >= _LENGTH.size:
            length = frame_length(bytes(self._buffer[: _LENGTH.size]))
            end = _LENGTH.size + length
            head = _LENGTH.size + min(length, HEAD_BYTES)
            if len(self._buffer) >= head:
                check_length(length, bytes(self._buffer[_LENGTH.size : head]), self._kinds)
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return bodies


class EventRate:
    """Which of a job's events are passed on: they are for people, and the others are dropped. `clock`: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._left = float(EVENT_BURST)

    def allows(self) -> bool:
        """Whether one more may pass now; it counts then."""
        now = self._clock()
        self._left = min(EVENT_BURST, self._left + (now - self._last) * EVENTS_PER_SECOND)
        self._last = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
