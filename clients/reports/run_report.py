"""Counts what happened in this process: outcomes, errors and seconds of all graphs.

A fallback to local compilation warns once for each error code, and for each operator that cannot be sent; it counts
every time. Of graphs the report holds counts, keys, error codes and operators that cannot be sent; with programs, which
functions started without tracing, and why others were traced. At exit each process writes a RunRecord to the state
folder; `torchrelay explain` shows these.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from ...compiler import decoding, errors
from ...compiler.api.runs import (
    STAGES,
    GraphRecord,
    Outcome,
    RefusedOperator,
    Report,
    RunRecord,
    Stage,
    TracedFunction,
)
from ...compiler.process.fork_safe_lock import ForkSafeLock
from ..atomic_file import write_atomically, write_whole
from ..settings import LauncherInfo
from .start_trace import About, StartTrace, seconds_since_process_start

_log = logging.getLogger(__name__)

Count = Literal[
    "hits", "disk_hits", "misses", "coalesced", "shared", "prefetched", "prefetch_failures", "programs",
    "programs_checked", "programs_stale", "checked", "unchecked", "eager", "autotune_hits",
]  # fmt: skip
"""Fields of Report that are one count."""
_SERVED: dict[Outcome, Count] = {
    "hit": "hits",
    "disk_hit": "disk_hits",
    "miss": "misses",
    "coalesced": "coalesced",
    "shared": "shared",
}
"""Where an outcome is counted."""

_PACKAGE = Path(__file__).parents[2]
_PASSED_OVER = (f"{_PACKAGE}/clients/", f"{_PACKAGE}/compiler/", contextlib.__file__, functools.__file__, "<")
"""Beginnings of the file names of code through which a user's call comes to the back end; PyTorch's are added."""
_GRAPHS_KEPT = 1000
_FUNCTIONS_KEPT = 1000
RUN_FILE = "last_run.json"
"""The file in the client's state folder; that of a job's rank N is last_run.N.json."""
_RUN_FILES = "last_run*.json"


class FallbackWarning(UserWarning):
    """A graph was compiled locally, not by the service; the text says why and what to do."""


class StaleProgramWarning(UserWarning):
    """A program that was kept is not what a new trace makes of the function, and is not used again; the text says which
    function, and what differs."""


class LastRun(Struct, frozen=True, kw_only=True):
    """The latest run of this user on this machine that compiled something: one process, or a job's ranks."""

    program: str
    ended: float
    processes: tuple[RunRecord, ...]


class RunReport:
    """The counters behind `torchrelay.report()`; safe for threads."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._process_began = time.perf_counter() - (seconds_since_process_start() or 0.0)
        self._counts: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()
        self._refused: dict[str, RefusedOperator] = {}
        self._alone: Counter[str] = Counter()
        self._autotune_failures: Counter[str] = Counter()
        self._started: Counter[str] = Counter()
        self._traced: dict[TracedFunction, None] = {}
        self.trace: StartTrace | None = None
        self.errors_page = ""
        """Where the gateway says what each error code means; '' without a gateway."""
        self._seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._graphs: deque[GraphRecord] = deque(maxlen=_GRAPHS_KEPT)
        self._background: list[GraphRecord] = []
        self._warned: set[tuple[str, str]] = set()
        self._complained: set[str] = set()
        self._frame = threading.local()
        self._written: set[Path] = set()

    def begin_trace(self) -> StartTrace:
        """From now on, imports, stages and graphs become spans too. A second call changes nothing."""
        with self._lock:
            begun, self.trace = self.trace, self.trace or StartTrace()
        if begun is None:
            self.trace.time_imports()
        return self.trace

    def add_seconds(
        self, stage: Stage, seconds: float, *, ago: float = 0.0, about: About | None = None
    ) -> None:
        """A stage that took `seconds`, until `ago` seconds ago. about: what a trace says of it."""
        ended = time.perf_counter() - ago
        with self._lock:
            self._seconds[stage] += seconds
        if stage != "trace":  # it ends after the graph is recorded
            stages = self._frame.__dict__.setdefault("stages", {})
            stages[stage] = stages.get(stage, 0.0) + seconds
        if self.trace is not None and seconds:
            self.trace.add("stage", stage, ended - seconds, ended, about)

    def add_trace_seconds(self, seconds: float) -> None:
        """Adds Dynamo's tracing of a frame. seconds: since it began on the frame. Of a frame that is traced again, only
        what this thread has spent since it left the back end is added."""
        spent = time.perf_counter() - getattr(self._frame, "back_end_left", 0.0)
        self.add_seconds("trace", min(seconds, spent))

    def end_of_backend(self) -> None:
        """From here on this thread is in Dynamo again, or in the program."""
        self._frame.back_end_left = time.perf_counter()

    @contextlib.contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Adds the block's duration to `stage`, whether it succeeds or not."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(stage, time.perf_counter() - start)

    def function(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A span around the block that looks for a program of this function."""
        return contextlib.nullcontext() if self.trace is None else self.trace.span("function", name)

    def first_call(self, key: str, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`; in a trace, its first call is a span."""
        return compiled if self.trace is None else self.trace.first_call(f"graph {key[:12]}", compiled)

    def record(
        self,
        outcome: Outcome,
        *,
        key: str = "",
        seconds: float = 0.0,
        began: float | None = None,
        nodes: int = 0,
    ) -> None:
        """Counts a graph that was served. began: when time.perf_counter read so; instead of seconds. A fallback goes to
        `fallback`, which needs the error."""
        if began is not None:
            seconds = time.perf_counter() - began
        self._append(GraphRecord(key=key, outcome=outcome, seconds=seconds, nodes=nodes), began)

    def fallback(
        self, error: errors.RelayError, *, key: str = "", seconds: float = 0.0, nodes: int = 0
    ) -> GraphRecord:
        """Counts a graph that is compiled locally because of `error`, and warns if its code or its operator is new."""
        fallback = GraphRecord(key=key, outcome="fallback", seconds=seconds, nodes=nodes, reason=error.code)
        record = self._append(fallback)
        self._count_refused(error)
        self.warn_once(error)
        return record

    def runs_eagerly(self, fallback: GraphRecord, error: errors.RelayError) -> None:
        """Counts a graph that fell back, and that Inductor could not compile here because of `error`: it runs as it is.
        Warns the first time."""
        with self._lock:
            self._counts["eager"] += 1
            for position, listed in enumerate(self._graphs):
                if listed is fallback:
                    self._graphs[position] = msgspec.structs.replace(fallback, outcome="eager")
        self.warn_once(error, "not compiled, a graph runs eagerly")

    def _count_refused(self, error: errors.RelayError) -> None:
        if isinstance(error, errors.Unsupported) and error.operator:
            with self._lock:
                known = self._refused.get(error.operator, RefusedOperator(error.operator, error.line, 0))
                self._refused[error.operator] = msgspec.structs.replace(known, graphs=known.graphs + 1)

    def raised(self, error: errors.RelayError, *, seconds: float = 0.0, nodes: int = 0) -> None:
        """Lists a graph whose error is raised; it counts as neither served nor compiled."""
        self._count_refused(error)
        self._append(
            GraphRecord(key=error.key, outcome="raised", seconds=seconds, nodes=nodes, reason=error.code)
        )

    def background(self, record: GraphRecord) -> GraphRecord:
        """Lists a graph that runs eagerly until its artifact is there, until `end_background` of what this returns."""
        with self._lock:
            self._background = [*self._background, record]
        return record

    def end_background(self, record: GraphRecord, ended: GraphRecord) -> None:
        """Counts a graph that was listed as `record` as `ended`, by its outcome."""
        with self._lock:
            self._background = [other for other in self._background if other is not record]
        self._append(ended)

    def count(self, what: Count) -> None:
        """Adds one to this count of the Report."""
        with self._lock:
            self._counts[what] += 1

    def alone(self, error: errors.RelayError) -> None:
        """Counts a graph on which this process decides without the other processes of its job."""
        with self._lock:
            self._alone[error.code] += 1
        self.complain_once(f"decided without the job: {error}", about=f"alone {error.code}")

    def autotune_failed(self, error: errors.RelayError) -> None:
        """Counts a winner that could not be fetched or sent. No filter can make an exception of what is logged, in the
        launch of a kernel."""
        with self._lock:
            self._autotune_failures[error.code] += 1
        self.complain_once(
            f"the team's autotune winners cannot be had now, and kernels are measured here: {error}",
            about="autotune",
        )

    def program_checked(self, function: str, difference: str) -> None:
        """Counts a function whose program was compared with a trace; warns of each that differs. Raises
        StaleProgramWarning only if a filter names it."""
        with self._lock:
            self._counts["programs_checked"] += 1
            self._counts["programs_stale"] += bool(difference)
        if difference:
            self.traced(function, f"its program was stale, and was dropped: {difference}")
            _warn(
                f"torchrelay: the program of {function} was stale, and is dropped. A new trace differs in its "
                f"{difference}. Starts from it may have computed something else than the code says: docs/programs.md "
                "tells what programs do not see",
                StaleProgramWarning,
            )

    def started(self, function: str) -> None:
        """Counts a function that starts without tracing."""
        with self._lock:
            self._counts["programs"] += 1
            if function in self._started or len(self._started) < _FUNCTIONS_KEPT:
                self._started[function] += 1

    def traced(self, function: str, reason: str) -> None:
        """Lists a function that is traced although programs are on."""
        _log.info("torchrelay: %s is traced: %s", function, reason)
        with self._lock:
            if len(self._traced) < _FUNCTIONS_KEPT:
                self._traced[TracedFunction(function, reason)] = None

    def recorded(self, function: str) -> None:
        """Lists a function that is traced and recorded, unless it is listed already: then its records do not fit."""
        with self._lock:
            listed = any(each.function == function for each in self._traced)
        if not listed:
            self.traced(function, "it had no record")

    def prefetch_failed(self, error: Exception) -> None:
        self.count("prefetch_failures")
        self.not_used("a prefetched artifact", error)

    def not_used(self, what: str, error: Exception) -> None:
        """Logs that something which was fetched without being waited for is not used: the first time as a warning if it
        was damaged or forged, else at level info."""
        if isinstance(error, errors.ArtifactError | errors.SignatureError):
            self.complain_once(f"{what} is not used: {error}", about=f"{what} {error.code}")
        else:
            _log.info("torchrelay: %s is not used: %s: %s", what, type(error).__name__, error)

    def complain_once(self, text: str, *, about: str) -> None:
        """Logs as a warning what concerns no graph, once for each `about` in a process; then at level info."""
        with self._lock:
            first = about not in self._complained
            self._complained.add(about)
        _log.log(logging.WARNING if first else logging.INFO, "torchrelay: %s", text)

    def warn_once(self, error: errors.RelayError, what: str = "compiled locally") -> None:
        """Warns once for each error code in a process, for each artifact that differs from eager, and for each operator
        that cannot be sent, at the user's line; later ones are logged at level info. what: became of the graph. Raises
        FallbackWarning only if a filter names it."""
        cause = str(error) if isinstance(error, errors.ResultsDiffer) else error.code
        operator, line = (error.operator, error.line) if isinstance(error, errors.Unsupported) else ("", "")
        with self._lock:
            first = (cause, operator) not in self._warned
            self._warned.add((cause, operator))
        page = f" ({self.errors_page}#{error.code})" if self.errors_page else ""
        text = f"torchrelay: {what}: {error}{page}"
        if not first:
            _log.info("%s", text)
            return
        _warn(text, FallbackWarning, line)

    def snapshot(self) -> Report:
        with self._lock:
            return Report(
                **self._counts,
                started=dict(self._started),
                traced=tuple(self._traced),
                background=len(self._background),
                fallbacks=dict(self._fallbacks),
                refused=tuple(self._refused.values()),
                alone=dict(self._alone),
                autotune_failures=dict(self._autotune_failures),
                seconds=dict(self._seconds),
                graphs=(*self._graphs, *self._background),
            )

    def write_at_exit(self, path: Path) -> None:
        """Writes the snapshot as JSON to `path` when this process ends. `{pid}` in the path becomes the process id, so
        that ranks can share one setting."""
        self._at_exit(path, lambda: _written(self._write, path))

    def write_trace_at_exit(self, path: Path) -> None:
        """Writes the trace as `write_at_exit` writes the snapshot."""
        trace = self.begin_trace()
        self._at_exit(path, lambda: _written(trace.write, path))

    def leave_at_exit(self, folder: Path, launch: LauncherInfo | None = None) -> None:
        """Writes this process's RunRecord to `folder` when it ends, unless it compiled nothing; each rank of a job
        writes its own file. An error is logged at level info."""
        path = folder / RUN_FILE
        if launch is not None:
            path = path.with_suffix(f".{launch.rank}.json")
        self._at_exit(path, lambda: self._leave(path, launch))

    def tell_at_exit(self, tell: Callable[[RunRecord], None], launch: LauncherInfo | None) -> None:
        """Gives this process's RunRecord to `tell` when it ends, unless it compiled nothing."""
        self._at_exit(Path(), lambda: tell(record) if (record := self._record(launch)) else None)

    def _at_exit(self, path: Path, write: Callable[[], None]) -> None:
        """Registers `write` once for each path ('.': for none). It does not run in children that this process forks."""
        with self._lock:
            if path in self._written:
                return
            self._written.add(path)
        owner = os.getpid()
        atexit.register(lambda: write() if os.getpid() == owner else None)

    def _append(self, record: GraphRecord, began: float | None = None) -> GraphRecord:
        """Returns the record as it is listed: the stages that this thread has timed since its last graph are its."""
        stages = self._frame.__dict__.pop("stages", {})
        ended = time.perf_counter() - self._process_began
        record = msgspec.structs.replace(record, ended=ended, stages=stages)
        with self._lock:
            if record.outcome in _SERVED:
                self._counts[_SERVED[record.outcome]] += 1
            if record.outcome == "fallback":
                self._fallbacks[record.reason] += 1
            self._graphs.append(record)
        if self.trace is not None:
            now = time.perf_counter()
            about: About = {"outcome": record.outcome, "nodes": record.nodes, "reason": record.reason}
            self.trace.add("graph", f"graph {record.key[:12]}", now if began is None else began, now, about)
        return record

    def _write(self, path: Path) -> None:
        write_whole(path, msgspec.json.format(msgspec.json.encode(self.snapshot())) + b"\n")

    def _leave(self, path: Path, launch: LauncherInfo | None) -> None:
        record = self._record(launch)
        if record is None:
            return
        try:
            data = msgspec.json.encode(record)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, data)
        except (OSError, ValueError) as error:  # ValueError: a name that is not valid text
            _log.info("the run's record could not be left in %s: %s", path, error)

    def _record(self, launch: LauncherInfo | None) -> RunRecord | None:
        """None for a process that has compiled nothing. Launchers give several starts one name, hence its process."""
        found = self.snapshot()
        if not found.graphs and not found.traced:
            return None
        return RunRecord(
            **asdict(found),
            program=Path(sys.argv[0]).name if sys.argv else "",
            pid=os.getpid(),
            ended=time.time(),
            run=f"{launch.run}/{os.getppid()}" if launch else "",
            rank=launch.rank if launch else None,
            launch=launch.run if launch else "",
            torch=str(getattr(sys.modules.get("torch"), "__version__", "")),
        )


def _warn(text: str, category: type[Warning], line: str = "") -> None:
    """Warn at `FILE:LINE`, or at the user's call. Raises the warning only if a filter names its class."""
    file, number = _user_line(line)
    try:
        warnings.warn_explicit(text, category, file, number)
    except category:
        matching = (f[2] for f in warnings.filters if issubclass(category, f[2]))
        if next(matching, None) is category:
            raise
        _log.warning("%s", text)  # -W error is for other warnings: training goes on


def _user_line(line: str = "") -> tuple[str, int]:
    """(file, line) of `FILE:LINE`; without that, of the innermost call in this thread that is neither PyTorch's nor
    torchrelay's: the call of the compiled function."""
    file, _, number = line.rpartition(":")
    if file and number.isdecimal():
        return file, int(number)
    frame = sys._getframe(1)
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    passed_over = (*_PASSED_OVER, f"{Path(torch).parent}/") if torch else _PASSED_OVER
    while frame.f_code.co_filename.startswith(passed_over) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _written(write: Callable[[Path], None], path: Path) -> None:
    """`write` to the path, in which `{pid}` becomes the process id. A failure is logged as a warning."""
    path = Path(str(path).replace("{pid}", str(os.getpid())))
    try:
        write(path)
    except OSError as error:
        _log.warning("torchrelay: %s could not be written: %s", path, error)


def last_run(folder: Path) -> LastRun | None:
    """The latest run that left records in `folder`, with all its ranks, lowest first; None if there is no record.
    Raises ClientError if a record cannot be read."""
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
        raise errors.ClientError(
            f"{path} cannot be read: {error}", hint="Delete it; the next run writes a new one"
        ) from None


@functools.cache
def process_report() -> RunReport:
    """This process's one RunReport."""
    return RunReport()


def report() -> Report:
    """A snapshot of what torchrelay did in this process: hits, misses, fallbacks by reason, seconds."""
    return process_report().snapshot()


class ReportValues:
    """This process's report as named numbers, for the logger of a trainer. `changed` gives the values after each graph,
    and nothing between two graphs."""

    def __init__(self) -> None:
        self._counted = 0

    def changed(self) -> dict[str, float]:
        """Counts of this process so far by outcome (hits include those of this machine's disk, of other ranks and of
        compiles that others started), and seconds by stage; {} if no graph was added since the last call."""
        now = report()
        hits = now.hits + now.disk_hits + now.shared + now.coalesced
        fallbacks = sum(now.fallbacks.values())
        counted = hits + now.misses + fallbacks
        if counted == self._counted:
            return {}
        self._counted = counted
        return {
            "torchrelay/hits": float(hits),
            "torchrelay/misses": float(now.misses),
            "torchrelay/fallbacks": float(fallbacks),
            **{f"torchrelay/{stage}_seconds": round(seconds, 4) for stage, seconds in now.seconds.items()},
        }
