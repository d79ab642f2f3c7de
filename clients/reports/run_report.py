"""What happened in this process: outcomes and seconds of every graph in, one frozen Report out.

A fallback to local compilation warns once for each error code and counts every time. The report holds
counts, keys and error codes, no file names and nothing of the graph. What `torchrelay explain` shows of a run,
a RunRecord of each process, is left in the state folder at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from ...compiler import decoding
from ...compiler.errors import ClientError, RelayError
from ..atomic_file import write_atomically
from ..settings import LauncherInfo

_log = logging.getLogger(__name__)

Outcome = Literal["hit", "disk_hit", "miss", "coalesced", "shared", "fallback", "raised"]
"""shared: another process of the job obtained it. raised: the error went to the program, in mode `require`."""
Stage = Literal["trace", "encode", "key", "wait", "fetch", "verify", "load"]
STAGES: tuple[Stage, ...] = ("trace", "encode", "key", "wait", "fetch", "verify", "load")

_GRAPHS_KEPT = 1000
RUN_FILE = "last_run.json"
"""In the client's state folder; of a job's rank N, last_run.N.json."""
_RUN_FILES = "last_run*.json"


class FallbackWarning(UserWarning):
    """A graph was compiled locally although the service was asked for; the text says why and what to do."""


class GraphRecord(Struct, frozen=True, kw_only=True):
    """One graph. `key`: 64 hex digits, '' if it never got one. `seconds`: request to callable."""

    key: str
    outcome: Outcome
    seconds: float
    nodes: int
    reason: str = ""
    """The error's code, if one kept the graph from being served."""


class Report(Struct, frozen=True, kw_only=True):
    """A process's counts so far.

    hits: the service had it. disk_hits: this machine had it. misses: compiled for this request. coalesced:
    waited for a compile that another request had started. shared: another process of the job obtained it.
    prefetched: hits that nobody waited for, because the artifact had come before the graph. prefetch_failures: what
    could not be fetched ahead. fallbacks: compiled locally, by error code. alone: graphs on which this process
    decided without its job, by error code. seconds: by stage, all graphs together. graphs: the latest 1000.
    """

    hits: int
    disk_hits: int
    misses: int
    coalesced: int
    shared: int
    prefetched: int
    prefetch_failures: int
    fallbacks: dict[str, int]
    alone: dict[str, int]
    seconds: dict[str, float]
    graphs: tuple[GraphRecord, ...]


class RunRecord(Struct, frozen=True, kw_only=True):
    """One process that compiled something. `program`: the script's name without folders; `ended`: seconds since
    1970; `run`: the same text in all ranks that one launcher started on this machine, '' for a process on its own."""

    program: str
    pid: int
    ended: float
    graphs: tuple[GraphRecord, ...]
    run: str = ""
    rank: int | None = None


class LastRun(Struct, frozen=True, kw_only=True):
    """The latest run of this user on this machine that compiled something: one process, or a job's ranks."""

    program: str
    ended: float
    processes: tuple[RunRecord, ...]


class RunReport:
    """The counters behind `torchrelay.report()`; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: Counter[Outcome] = Counter()
        self._fallbacks: Counter[str] = Counter()
        self._alone: Counter[str] = Counter()
        self._prefetched = 0
        self._prefetch_failures = 0
        self._seconds: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)
        self._graphs: deque[GraphRecord] = deque(maxlen=_GRAPHS_KEPT)
        self._warned: set[str] = set()
        self._written: set[Path] = set()

    def add_seconds(self, stage: Stage, seconds: float) -> None:
        with self._lock:
            self._seconds[stage] += seconds

    @contextlib.contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Add the block's duration to `stage`, whether it succeeds or not."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(stage, time.perf_counter() - start)

    def record(self, outcome: Outcome, *, key: str = "", seconds: float = 0.0, nodes: int = 0) -> None:
        """Count a graph that was served. A fallback goes to `fallback`, which needs the error."""
        self._append(GraphRecord(key=key, outcome=outcome, seconds=seconds, nodes=nodes))

    def fallback(self, error: RelayError, *, key: str = "", seconds: float = 0.0, nodes: int = 0) -> None:
        """Count a graph that is compiled locally because of `error`, and warn if its code is new."""
        self._append(
            GraphRecord(key=key, outcome="fallback", seconds=seconds, nodes=nodes, reason=error.code)
        )
        self.warn_once(error)

    def raised(self, error: RelayError, *, seconds: float = 0.0, nodes: int = 0) -> None:
        """List a graph whose error is raised; it counts as nothing that was served or compiled."""
        self._append(
            GraphRecord(key=error.key, outcome="raised", seconds=seconds, nodes=nodes, reason=error.code)
        )

    def alone(self, error: RelayError) -> None:
        """Count a graph on which this process decides without its job; the first of each reason is in the log as a
        warning."""
        with self._lock:
            self._alone[error.code] += 1
            first = self._alone[error.code] == 1
        _log.log(logging.WARNING if first else logging.INFO, "torchrelay: decided without the job: %s", error)

    def prefetched(self) -> None:
        """Count a hit that was there before it was needed."""
        with self._lock:
            self._prefetched += 1

    def prefetch_failed(self) -> None:
        with self._lock:
            self._prefetch_failures += 1

    def warn_once(self, error: RelayError) -> None:
        """One FallbackWarning for each error code in a process; later ones go to the log at level info."""
        with self._lock:
            first = error.code not in self._warned
            self._warned.add(error.code)
        text = f"torchrelay: compiled locally: {error}"
        if first:
            warnings.warn(text, FallbackWarning, stacklevel=3)
        else:
            _log.info("%s", text)

    def snapshot(self) -> Report:
        with self._lock:
            return Report(
                hits=self._outcomes["hit"],
                disk_hits=self._outcomes["disk_hit"],
                misses=self._outcomes["miss"],
                coalesced=self._outcomes["coalesced"],
                shared=self._outcomes["shared"],
                prefetched=self._prefetched,
                prefetch_failures=self._prefetch_failures,
                fallbacks=dict(self._fallbacks),
                alone=dict(self._alone),
                seconds={stage: self._seconds[stage] for stage in STAGES},
                graphs=tuple(self._graphs),
            )

    def write_at_exit(self, path: Path) -> None:
        """Write the snapshot as JSON to `path` when this process ends (not its forked children). `{pid}` in
        the path becomes the process id, so that ranks can share one setting. Asking twice is asking once."""
        with self._lock:
            if path in self._written:
                return
            self._written.add(path)
        atexit.register(self._write, path, os.getpid())

    def leave_at_exit(self, folder: Path, launch: LauncherInfo | None = None) -> None:
        """Leave the process' RunRecord in `folder` when it ends (not its forked children), unless it compiled
        nothing; each rank of a job its own. A folder that cannot be written is noted in the log at level info."""
        path, run, rank = folder / RUN_FILE, "", None
        if launch is not None:
            path, rank = path.with_suffix(f".{launch.rank}.json"), launch.rank
            run = f"{launch.run}/{os.getppid()}"  # launchers give several starts one name
        with self._lock:
            if path in self._written:
                return
            self._written.add(path)
        atexit.register(self._leave, path, os.getpid(), run, rank)

    def _append(self, record: GraphRecord) -> None:
        with self._lock:
            self._outcomes[record.outcome] += 1
            if record.outcome == "fallback":
                self._fallbacks[record.reason] += 1
            self._graphs.append(record)

    def _write(self, path: Path, owner: int) -> None:
        if os.getpid() != owner:
            return
        target = Path(str(path).replace("{pid}", str(owner)))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(msgspec.json.format(msgspec.json.encode(self.snapshot())) + b"\n")
        except OSError as error:
            _log.warning("the run's report could not be written to %s: %s", target, error)

    def _leave(self, path: Path, owner: int, run: str, rank: int | None) -> None:
        with self._lock:
            graphs = tuple(self._graphs)
        if os.getpid() != owner or not graphs:
            return
        program = Path(sys.argv[0]).name if sys.argv else ""
        try:
            data = msgspec.json.encode(
                RunRecord(program=program, pid=owner, ended=time.time(), graphs=graphs, run=run, rank=rank)
            )
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, data)
        except (OSError, ValueError) as error:  # ValueError: a name that is no text
            _log.info("the run's record could not be left in %s: %s", path, error)


def last_run(folder: Path) -> LastRun | None:
    """What the latest run left in `folder`, all its ranks, lowest first; None if there is nothing. Raises ClientError
    for another file in a record's place."""
    records = [record for path in folder.glob(_RUN_FILES) if (record := _record(path)) is not None]
    if not records:
        return None
    latest = max(records, key=lambda record: record.ended)
    same = [record for record in records if latest.run and record.run == latest.run] or [latest]
    return LastRun(
        program=latest.program,
        ended=latest.ended,
        processes=tuple(sorted(same, key=lambda record: record.rank or 0)),
    )


def _record(path: Path) -> RunRecord | None:
    try:
        return decoding.from_json(path.read_bytes(), type=RunRecord)
    except FileNotFoundError:  # replaced meanwhile
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ClientError(
            f"{path} cannot be read: {error}", hint="Delete it; the next run writes a new one"
        ) from None


@functools.cache
def process_report() -> RunReport:
    """This process's one RunReport."""
    return RunReport()


def report() -> Report:
    """A snapshot of what torchrelay did in this process: hits, misses, fallbacks by reason, seconds."""
    return process_report().snapshot()
