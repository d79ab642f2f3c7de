"""One decision for each key in a job: a key in; an artifact's digest or a typed error, the same for all ranks, out.

The first process that needs a key claims it in the store that the job's processes share, obtains the artifact, and
posts what came of it: the digest with the bytes beside it, or the error. The others wait for that and nothing else, so
a gateway is asked once, and its death between two ranks changes nothing. A leader never waits for a follower: ranks
may compile different graphs in any order. A leader that dies or stands still stops beating, and a follower takes over;
the first decision posted stands. Where processes share a job's name but no store, the gateway keeps the decision.

Nothing here is trusted: whoever takes bytes from a job verifies their signature as ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct

from ...compiler import decoding
from ...compiler.api import compiles
from ...compiler.errors import DeadlineExceeded, JobUnreachable, RelayError, SpecializeInputs
from ..gateway.compile_client import GatewayClient
from ..gateway.deadline import Deadline

_BEAT_SECONDS = 1.0
_LOST_SECONDS = 15.0
"""A leader that has not beaten for so long is replaced. Taking over too early costs one request more."""
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.25
_CHUNK_BYTES = 4 << 20
"""c10d's TCPStore refuses values past 8 MiB."""
_HELD_BYTES = 256 << 20
"""What one leader keeps in the store for ranks that have not read it yet; the oldest goes first."""

T = TypeVar("T")
ObtainArtifact = Callable[[], bytes]
"""Obtains, verifies and loads an artifact, and gives its bytes. Raises RelayError."""


class Decision(Struct, frozen=True, omit_defaults=True):
    """SHA-256 of an artifact's file, or why nobody has one. `posted`: (generation, chunks) of bytes in the store."""

    digest: str = ""
    error: compiles.ErrorBody | None = None
    posted: tuple[int, int] = (0, 0)


class Agreement(Protocol):
    """What the processes of one job decide through."""

    def agree(self, key: str, seconds: float, obtain: ObtainArtifact) -> Decision:
        """The job's decision; `obtain` is called at most once, by whoever leads. Raises JobUnreachable."""

    def artifact(self, key: str, decision: Decision) -> bytes | None:
        """The bytes decided on, where the job itself still holds them. Raises JobUnreachable."""

    def done(self, key: str, decision: Decision) -> None:
        """This process, which did not lead, has the bytes. Raises JobUnreachable."""


class AgreementStore:
    """A c10d store under a prefix of ours; whatever it raises is JobUnreachable."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def get(self, name: str) -> bytes | None:
        name = self._prefix + name
        # A get waits for a name that is not there.
        return self._do(lambda: bytes(self._store.get(name)) if self._store.check([name]) else None)

    def add(self, name: str, count: int) -> int:
        return self._do(lambda: int(self._store.add(self._prefix + name, count)))

    def put(self, name: str, value: bytes) -> None:
        self._do(lambda: self._store.set(self._prefix + name, value))

    def put_first(self, name: str, value: bytes) -> bytes:
        """What stands under `name`: `value`, unless somebody was first."""
        return self._do(lambda: bytes(self._store.compare_set(self._prefix + name, "", value)))

    def delete(self, name: str) -> None:
        self._do(lambda: self._store.delete_key(self._prefix + name))

    def _do(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (RuntimeError, OSError, ValueError) as error:  # c10d's DistError is a RuntimeError
            text = str(error).partition("\n")[0]
            raise JobUnreachable(f"the job's store failed: {text or type(error).__name__}") from None


class _PostedArtifact(NamedTuple):
    key: str
    generation: int
    chunks: int
    size: int


class StoreAgreement:
    """A job whose processes share a c10d store. `readers`: how many others will want what one leads."""

    def __init__(self, store: AgreementStore, readers: int) -> None:
        self._store = store
        self._readers = readers
        self._held: deque[_PostedArtifact] = deque()

    def agree(self, key: str, seconds: float, obtain: ObtainArtifact) -> Decision:
        clock = Deadline(seconds)
        generation = 0
        while True:
            decision = self._decision(key)
            if decision is not None:
                return decision
            if self._store.add(f"{key}/claim/{generation}", 1) == 1:
                return self._lead(key, generation, seconds, obtain)
            decision = self._follow(key, generation, clock)
            if decision is not None:
                return decision
            generation += 1

    def artifact(self, key: str, decision: Decision) -> bytes | None:
        generation, count = decision.posted
        chunks = []
        for index in range(count):
            chunk = self._store.get(_chunk(key, generation, index))
            if chunk is None:
                break
            chunks.append(chunk)
        data = b"".join(chunks)
        return data if count and hashlib.sha256(data).hexdigest() == decision.digest else None

    def done(self, key: str, decision: Decision) -> None:
        if self._store.add(f"{key}/read", 1) == self._readers:
            self._drop(key, *decision.posted)

    # --- leading -------------------------------------------------------------------------------------------

    def _lead(self, key: str, generation: int, seconds: float, obtain: ObtainArtifact) -> Decision:
        with self._beating(f"{key}/beat/{generation}", seconds):
            try:
                data = obtain()
            except RelayError as error:
                return self._decide(key, refusal(error))
            except BaseException:  # Ctrl-C, or Dynamo starts over: somebody else may lead at once
                with contextlib.suppress(JobUnreachable):
                    self._store.put(f"{key}/gone/{generation}", b"1")
                raise
            chunks = self._post(key, generation, data)
            mine = Decision(digest=hashlib.sha256(data).hexdigest(), posted=(generation, chunks))
            decision = self._decide(key, mine)
            if decision != mine:  # taken over while it stood still
                self._drop(key, generation, chunks)
            return decision

    def _post(self, key: str, generation: int, data: bytes) -> int:
        """Put the bytes where followers find them; the number of chunks, 0 for too many bytes."""
        if len(data) > _HELD_BYTES or self._readers < 1:
            return 0
        parts = [data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES)]
        for index, part in enumerate(parts):
            self._store.put(_chunk(key, generation, index), part)
        self._held.append(_PostedArtifact(key, generation, len(parts), len(data)))
        while sum(held.size for held in self._held) > _HELD_BYTES:
            oldest = self._held.popleft()
            self._drop(oldest.key, oldest.generation, oldest.chunks)
        return len(parts)

    def _drop(self, key: str, generation: int, chunks: int) -> None:
        for index in range(chunks):
            self._store.delete(_chunk(key, generation, index))

    @contextlib.contextmanager
    def _beating(self, name: str, seconds: float) -> Iterator[None]:
        """Tell followers that this process lives, but not for longer than its deadline."""
        over, every = threading.Event(), _BEAT_SECONDS
        until = time.monotonic() + seconds

        def beat() -> None:
            with contextlib.suppress(JobUnreachable):
                while not over.wait(every) and time.monotonic() < until:
                    self._store.add(name, 1)

        threading.Thread(target=beat, name="torchrelay leads", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    # --- following -----------------------------------------------------------------------------------------

    def _follow(self, key: str, generation: int, clock: Deadline) -> Decision | None:
        """The decision; None once the leader is gone. At the deadline, the decision is that there is none."""
        beats, heard, pause = -1, time.monotonic(), _FIRST_PAUSE_SECONDS
        looked = heard
        while True:
            decision = self._decision(key)
            if decision is not None:
                return decision
            if (now := time.monotonic()) - looked >= _BEAT_SECONDS:
                looked = now
                if self._store.get(f"{key}/gone/{generation}") is not None:
                    return None
                if (found := self._store.add(f"{key}/beat/{generation}", 0)) != beats:
                    beats, heard = found, now
                elif now - heard > _LOST_SECONDS:
                    return None
            try:
                clock.sleep(pause)
            except DeadlineExceeded as error:
                return self._decide(key, refusal(error))
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def _decision(self, key: str) -> Decision | None:
        found = self._store.get(f"{key}/decision")
        return None if found is None else _read(found)

    def _decide(self, key: str, decision: Decision) -> Decision:
        return _read(self._store.put_first(f"{key}/decision", msgspec.json.encode(decision)))


class GatewayAgreement:
    """A job whose processes share a name (hashed) but no store: each obtains, and the first to tell decides."""

    def __init__(self, gateway: GatewayClient, name: str) -> None:
        self._gateway = gateway
        self._name = name

    def agree(self, key: str, seconds: float, obtain: ObtainArtifact) -> Decision:
        try:
            mine = Decision(digest=hashlib.sha256(obtain()).hexdigest())
        except SpecializeInputs:  # Dynamo traces again, and what comes of that is to be decided
            raise
        except RelayError as error:
            mine = refusal(error)
        try:
            told = self._gateway.decide(
                self._name, key, compiles.AgreedOutcome(digest=mine.digest, error=mine.error)
            )
        except RelayError as error:
            raise JobUnreachable(f"the gateway did not keep the job's decision: {error.message}") from None
        return Decision(digest=told.digest, error=told.error)

    def artifact(self, key: str, decision: Decision) -> bytes | None:
        return None

    def done(self, key: str, decision: Decision) -> None:
        return


def refusal(error: RelayError) -> Decision:
    return Decision(error=compiles.ErrorBody(error.code, error.message, error.advice))


def _chunk(key: str, generation: int, index: int) -> str:
    return f"{key}/bytes/{generation}/{index}"


def _read(data: bytes) -> Decision:
    try:
        return decoding.from_json(data, type=Decision)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise JobUnreachable(f"the job's store holds no decision of this version: {error}") from None
