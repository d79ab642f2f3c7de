"""A running job's queries to the service: QueryClient in the job, QueryRelay in the fork server.

A query goes through the job's pipe, the fork server, the actor and the pool to the gateway; the reply comes back on a
pipe of its own. A job that gets no reply in time goes on without it. The job is not trusted: it is killed if it sends
more queries, or more at once, than a QueryClient does, and replies that it does not read are dropped.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

import msgspec

from ...compiler import decoding
from ...compiler.errors import Unavailable
from ...compiler.tuning import queries
from ..messages import BadFrame, FrameDecoder, JobQuery, QueryReply, WorkerJob, decode_reply, encode

COMPILE_QUERY_LIMIT = 4096
"""Queries of one compile."""
SEARCH_QUERY_LIMIT = 1 << 20
"""Queries of one searcher: it names each candidate that it tries, and works for an hour."""
OPEN_QUERY_LIMIT = 8
"""Queries without a reply, at once."""
WAIT_SECONDS = 10.0
"""How long the job waits for a reply."""
REST_SECONDS = 30.0
"""After a query without a reply the job sends none for so long: a search of a hundred problems must not wait a hundred
times for a service that is down."""
UNREAD_BYTES = 16 << 20
"""Replies that a job has not read yet; the largest has some 4 MiB (256 entries)."""


def query_limit(job: WorkerJob) -> int:
    return SEARCH_QUERY_LIMIT if job.work == "search" else COMPILE_QUERY_LIMIT


class QueryClient:
    """The job's queries.SendQuery. Queries of several threads are sent one after the other.

    send: sends to the fork server. pipe: the reading end for replies. most: how many queries it may send.
    """

    def __init__(self, send: Callable[[JobQuery], None], pipe: int, most: int = COMPILE_QUERY_LIMIT) -> None:
        self._send = send
        self._pipe = pipe
        self._most = most
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._frames = FrameDecoder(QueryReply)
        self._sent = 0
        self._open: set[int] = set()
        self._rests_until = 0.0

    def __call__(self, question: queries.TuningQuery) -> queries.TuningReply:
        data = msgspec.msgpack.encode(question)
        if len(data) > queries.QUESTION_LIMIT:
            raise Unavailable(f"a question may have {queries.QUESTION_LIMIT} bytes, and this has {len(data)}")
        if os.getpid() != self._process:  # a copy of the job would take its answers
            raise Unavailable("a copy of the compile's process cannot ask the service")
        with self._lock:
            if time.monotonic() < self._rests_until:
                raise Unavailable("the service did not answer a moment ago")
            if self._sent >= self._most or len(self._open) >= OPEN_QUERY_LIMIT:
                raise Unavailable("this job has asked as much as it may")
            answer = self._exchange(data)
            if not answer:
                self._rests_until = time.monotonic() + REST_SECONDS
                raise Unavailable("the service has no answer about tuning", hint="Its log says why")
        try:
            answered: queries.TuningReply = decoding.from_msgpack(answer, type=queries.TuningReply)
            return answered
        except msgspec.MsgspecError as error:
            raise Unavailable(f"the service's answer about tuning cannot be read: {error}") from None

    def _exchange(self, question: bytes) -> bytes:
        """The answer, or b'' if none comes in time."""
        until = time.monotonic() + WAIT_SECONDS
        self._sent += 1
        own = self._sent
        self._open.add(own)
        self._send(JobQuery(own, question))
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while (left := until - time.monotonic()) > 0 and poll.poll(left * 1000):
            piece = os.read(self._pipe, 1 << 20)
            if not piece:
                break
            replies = [decode_reply(body) for body in self._frames.feed(piece)]
            self._open.difference_update(reply.id for reply in replies)
            for reply in replies:
                if reply.id == own:  # the others come too late
                    return reply.answer
        return b""


class QueryRelay:
    """Checks one job's queries and writes the replies, in the fork server.

    pipe: the writing end for replies, which does not block. most: how many queries the job may send.
    """

    def __init__(self, pipe: int, most: int = COMPILE_QUERY_LIMIT) -> None:
        self._pipe = pipe
        self._most = most
        self._received = 0
        self._open: set[int] = set()
        self._unread = bytearray()

    def ask(self, query: JobQuery) -> None:
        """Check `query`. Raises BadFrame for one that no QueryClient sends."""
        self._received += 1
        if self._received > self._most:
            raise BadFrame(f"more than {self._most} questions")
        if query.id in self._open or len(self._open) >= OPEN_QUERY_LIMIT:
            raise BadFrame("a question before earlier ones were answered")
        self._open.add(query.id)

    def answer(self, reply: QueryReply) -> None:
        """Write `reply` to the job, now or in `flush`; drop it if the job did not ask, or does not read."""
        if reply.id not in self._open:
            return
        self._open.remove(reply.id)
        if len(self._unread) + len(reply.answer) <= UNREAD_BYTES:
            self._unread += encode(reply)
            self.flush()

    @property
    def pending(self) -> bool:
        """Whether `flush` has something to write."""
        return bool(self._unread)

    def flush(self) -> None:
        """Write as much as the pipe takes."""
        try:
            while self._unread:
                del self._unread[: os.write(self._pipe, self._unread)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unread.clear()
