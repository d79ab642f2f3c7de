"""Lets all ranks of a job agree on one artifact, or one error, for each key.

The first process that needs a key claims it in the store that the job's processes share. This leader obtains the
artifact and posts the decision: the digest and the bytes, or the error. The others wait for the decision, so the
gateway is asked once, and a gateway that dies between two ranks changes nothing. A leader never waits for a follower:
ranks may compile different graphs in any order. A leader that dies or hangs stops its heartbeat, and a follower takes
over; the first decision posted counts.

Nothing here is trusted: bytes from a job are verified by their signature like all others.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from ....compiler import decoding
from ....compiler.api import compiles
from ....compiler.artifact.symbol_versions import CUDA, check_needs
from ....compiler.errors import CannotLoad, DeadlineExceeded, JobUnreachable, RelayError
from ...gateway.connection import Deadline

HEARTBEAT_SECONDS = 1.0
LOST_SECONDS = 15.0
"""A leader without a heartbeat for so long is replaced. Taking over too early costs one more request."""
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.25
JOIN_SECONDS = 5.0
"""How long the first graph that a process leads waits for the others to tell what they can load. Some may compile
nothing, ever."""
_CHUNK_BYTES = 4 << 20
"""c10d's TCPStore refuses values past 8 MiB."""
_EAGER_CALLS = 4
"""Calls of a graph that ranks run eagerly before they look again whether it is compiled. Each look is a round trip to
the store."""
POSTED_BYTES = 256 << 20
"""What one leader has in the store at most for ranks that have not read it yet; the oldest is deleted first."""

_ABSENT = b"\0absent"
"""No value in the store."""

T = TypeVar("T")
ObtainArtifact = Callable[[], bytes]
"""Obtains, verifies and loads an artifact, and gives its bytes. Raises RelayError."""


class Decision(Struct, frozen=True, omit_defaults=True):
    """SHA-256 of an artifact's file, or why nobody has one. `posted`: (generation, chunks) of bytes in the store."""

    digest: str = ""
    error: compiles.ErrorBody | None = None
    posted: tuple[int, int] = (0, 0)


class AgreementStore:
    """A c10d store under a prefix of ours; whatever it raises is JobUnreachable."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def get(self, name: str) -> bytes | None:
        # The store's own get waits for a name that is not there, and a name may go after it was looked for. This sets
        # nothing, and answers what is expected where there is no value.
        found = self._do(lambda: bytes(self._store.compare_set(self._prefix + name, _ABSENT, _ABSENT)))
        return None if found == _ABSENT else found

    def add(self, name: str, count: int) -> int:
        return self._do(lambda: int(self._store.add(self._prefix + name, count)))

    def put(self, name: str, value: bytes) -> None:
        self._do(lambda: self._store.set(self._prefix + name, value))

    def put_first(self, name: str, value: bytes) -> bytes:
        """Set `name` unless it is set; returns its value."""
        return self._do(lambda: bytes(self._store.compare_set(self._prefix + name, "", value)))

    def replace(self, name: str, old: bytes, new: bytes) -> bytes:
        """Set `name`, which is set, to `new` if it is `old`; returns its value."""
        return self._do(lambda: bytes(self._store.compare_set(self._prefix + name, old, new)))

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


class Machine(Struct, frozen=True):
    """What a process can load. `offered`: the versions of `offered()`. `problem`: why it can load no library at all, or
    ''."""

    offered: dict[str, str]
    problem: str = ""


class JobMachines:
    """What the machines of a job's processes can load. Each process tells it once, before its first graph; machines
    that are alike are one entry."""

    def __init__(self, store: AgreementStore, processes: int) -> None:
        self._store = store
        self._processes = processes
        self._known: list[Machine] = []
        self._complete = False
        self._waited = False

    def join(self, machine: Machine) -> None:
        """Tell what this process can load. Raises JobUnreachable."""
        data = msgspec.json.encode(machine, order="deterministic")
        if self._store.add(f"machine/{hashlib.sha256(data).hexdigest()}", 1) == 1:
            number = self._store.add("machines", 1)
            self._store.put(f"machine/{number}", data)
        self._store.add("joined", 1)

    def known(self) -> list[Machine]:
        """All kinds of machines, once all processes have joined. The first call waits for them, but not for long; one
        that joins later is known from then on. Raises JobUnreachable."""
        if not self._complete:
            self._complete = self._all_joined()
            for number in range(len(self._known) + 1, self._store.add("machines", 0) + 1):
                data = self._store.get(f"machine/{number}")
                if data is None:  # it is being put
                    break
                self._known.append(_decoded(data, Machine))
        return self._known

    def _all_joined(self) -> bool:
        until, pause = time.monotonic() + JOIN_SECONDS, _FIRST_PAUSE_SECONDS
        while self._store.add("joined", 0) < self._processes:
            if self._waited or time.monotonic() > until:
                self._waited = True
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
        return True


class _EagerCalls(Struct, frozen=True):
    """A graph's calls before number `end` (from 0) are eager. open: what comes then is not decided; else it is
    compiled."""

    end: int
    open: bool


class CommonCall:
    """The call from which on all ranks run one compiled version of a graph; before it they run it eagerly, or in the
    version before.

    The store has an _EagerCalls. While it is open, a rank may move its end up, or close it where it ends. A rank runs a
    call eagerly only after it has read an end beyond it: so no rank runs that call compiled, however far apart they
    are.
    """

    def __init__(self, store: AgreementStore, name: str) -> None:
        self._store = store
        self._name = name
        self._known: _EagerCalls | None = None

    def is_begun(self) -> bool:
        """Whether a rank has said how it begins. Raises JobUnreachable."""
        return self._store.get(self._name) is not None

    def begin(self, *, eager: bool) -> bool:
        """Whether the first calls are eager; the first rank's answer counts. Raises JobUnreachable."""
        first = _EagerCalls(_EAGER_CALLS if eager else 0, open=eager)
        self._known = _decoded(self._store.put_first(self._name, msgspec.json.encode(first)), _EagerCalls)
        return self._known.end > 0

    def is_eager(self, call: int, *, ready: bool) -> bool:
        """Whether call number `call` is eager in all ranks. ready: this rank has the artifact. Call it after `begin`.
        Raises JobUnreachable."""
        assert self._known is not None
        while call >= self._known.end and self._known.open:
            end = self._known.end
            wanted = _EagerCalls(end, open=False) if ready else _EagerCalls(end + _EAGER_CALLS, open=True)
            old, new = msgspec.json.encode(self._known), msgspec.json.encode(wanted)
            self._known = _decoded(self._store.replace(self._name, old, new), _EagerCalls)
        return call < self._known.end


class StoreAgreement:
    """A job whose processes share a c10d store. `readers`: how many others will want what one leads."""

    def __init__(self, store: AgreementStore, readers: int) -> None:
        self._store = store
        self._readers = readers
        self._posted: deque[_PostedArtifact] = deque()
        self._begun: Counter[str] = Counter()
        self.machines = JobMachines(store, readers + 1)

    def common_call(self, key: str) -> CommonCall:
        """The common call of a graph with this key. Graphs of one key are told apart by their order, which is that of
        all ranks."""
        self._begun[key] += 1
        return CommonCall(self._store, f"{key}/calls/{self._begun[key]}")

    def agree(self, key: str, seconds: float, obtain: ObtainArtifact) -> Decision:
        """The job's decision; `obtain` is called at most once, by the leader. Raises JobUnreachable."""
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
        """The bytes decided on, if the job's store still has them. Raises JobUnreachable."""
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
        """This process, which did not lead, has the bytes. Raises JobUnreachable."""
        if self._store.add(f"{key}/read", 1) == self._readers:
            self._drop(key, *decision.posted)

    def check_needs(self, needs: Mapping[str, str]) -> None:
        """Raises CannotLoad if a process of the job, as far as is known, cannot load what `needs` this."""
        machines: list[Machine] = []
        with contextlib.suppress(JobUnreachable):  # the decision cannot be posted either
            machines = self.machines.known() if needs else []
        for machine in machines:
            check_needs(needs, machine.offered, "the machine of another process of this job")
            if machine.problem and needs.keys() - {CUDA}:
                raise CannotLoad(
                    f"a process of this job can load no library: {machine.problem}",
                    hint="Give it a TMPDIR or a cache folder that is its user's and not mounted noexec",
                )

    # --- leading -------------------------------------------------------------------------------------------

    def _lead(self, key: str, generation: int, seconds: float, obtain: ObtainArtifact) -> Decision:
        with self._heartbeat(f"{key}/beat/{generation}", seconds):
            try:
                data = obtain()
            except RelayError as error:
                return self._decide(key, refusal(error))
            except BaseException:  # Ctrl-C, or Dynamo starts again: another process may lead at once
                with contextlib.suppress(JobUnreachable):
                    self._store.put(f"{key}/gone/{generation}", b"1")
                raise
            chunks = self._post(key, generation, data)
            own = Decision(digest=hashlib.sha256(data).hexdigest(), posted=(generation, chunks))
            decision = self._decide(key, own)
            if decision != own:  # another process took over while this one hung
                self._drop(key, generation, chunks)
            return decision

    def _post(self, key: str, generation: int, data: bytes) -> int:
        """Put the bytes where followers find them; the number of chunks, 0 for too many bytes."""
        if len(data) > POSTED_BYTES or self._readers < 1:
            return 0
        parts = [data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES)]
        for index, part in enumerate(parts):
            self._store.put(_chunk(key, generation, index), part)
        self._posted.append(_PostedArtifact(key, generation, len(parts), len(data)))
        while sum(posted.size for posted in self._posted) > POSTED_BYTES:
            oldest = self._posted.popleft()
            self._drop(oldest.key, oldest.generation, oldest.chunks)
        return len(parts)

    def _drop(self, key: str, generation: int, chunks: int) -> None:
        for index in range(chunks):
            self._store.delete(_chunk(key, generation, index))

    @contextlib.contextmanager
    def _heartbeat(self, name: str, seconds: float) -> Iterator[None]:
        """Send a heartbeat to the followers, but not for longer than the deadline."""
        over, every = threading.Event(), HEARTBEAT_SECONDS
        until = time.monotonic() + seconds

        def beat() -> None:
            with contextlib.suppress(JobUnreachable):
                while not over.wait(every) and time.monotonic() < until:
                    self._store.add(name, 1)

        with contextlib.suppress(RuntimeError):  # no thread can start, as at exit: others may take over
            threading.Thread(target=beat, name="torchrelay leads", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    # --- following -----------------------------------------------------------------------------------------

    def _follow(self, key: str, generation: int, clock: Deadline) -> Decision | None:
        """The decision; None once the leader is gone. At the deadline, the decision is that there is none."""
        beats, last_beat, pause = -1, time.monotonic(), _FIRST_PAUSE_SECONDS
        last_check = last_beat
        while True:
            decision = self._decision(key)
            if decision is not None:
                return decision
            if (now := time.monotonic()) - last_check >= HEARTBEAT_SECONDS:
                last_check = now
                if self._store.get(f"{key}/gone/{generation}") is not None:
                    return None
                if (found := self._store.add(f"{key}/beat/{generation}", 0)) != beats:
                    beats, last_beat = found, now
                elif now - last_beat > LOST_SECONDS:
                    return None
            try:
                clock.sleep(pause)
            except DeadlineExceeded as error:
                return self._decide(key, refusal(error))
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def _decision(self, key: str) -> Decision | None:
        found = self._store.get(f"{key}/decision")
        return None if found is None else _decoded(found, Decision)

    def _decide(self, key: str, decision: Decision) -> Decision:
        decided = self._store.put_first(f"{key}/decision", msgspec.json.encode(decision))
        return _decoded(decided, Decision)


def refusal(error: RelayError) -> Decision:
    return Decision(error=compiles.ErrorBody(error.code, error.message, error.advice))


def _chunk(key: str, generation: int, index: int) -> str:
    return f"{key}/bytes/{generation}/{index}"


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return decoding.from_json(data, type=kind)
    except msgspec.MsgspecError as error:
        raise JobUnreachable(f"the job's store holds what another version wrote: {error}") from None
