"""The programs of this process: looked up before Dynamo traces a frame, recorded after it has traced one.

A record is used only if the artifacts of its graphs have been obtained, verified and loaded; else the frame is traced.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from ....compiler import decoding
from ....compiler.artifact.programs.records import REVISION, FrameProgram, ProgramGraph
from ....compiler.graph.ambient import differing_process_state
from ....compiler.graph.captured_graph import CapturedGraph
from ....compiler.graph.configuration import Options, read_configuration, split_options
from ....compiler.graph.toolchain import local_target, local_toolchain
from ....compiler.request import schema
from ....compiler.torch_internals.distributed import process_groups
from ....compiler.torch_internals.dynamo.programs import values
from ....compiler.torch_internals.dynamo.programs.frames import FrameName, Part
from ....compiler.torch_internals.inductor import config
from ...reports.run_report import process_report
from ...settings import load_launcher_info
from ..load import collector
from ..ranks.job_source import JobSource
from ..source import ArtifactRequest
from .store import ProgramStore, digest

if TYPE_CHECKING:
    from .team_programs import TeamPrograms

_DYNAMO = "torch._dynamo.config"
_OF_THIS_MACHINE = frozenset({"base_dir", "debug_dir_root", "log_file_name", "pt2_compile_id_prefix"})
"""Its entries that say where files lie, and what logs call a compile."""


class ProcessPrograms:
    """The programs of frames whose back end is `backend` (frames.Programs). source: of artifacts, when it is first
    needed. shares: take the team's programs too, and send own ones. check_one_in: starts, of which one traces and
    compares the records with what it has traced; 0: none. Safe for threads."""

    def __init__(
        self,
        backend: Any,
        store: ProgramStore,
        source: Callable[[], JobSource],
        *,
        shares: bool = False,
        check_one_in: int = 0,
    ) -> None:
        self._backend = backend
        self._store = store
        self._source = source
        self._shares = shares
        self._check_one_in = check_one_in
        self._symbolic: list[tuple[str, FrameProgram]] = []
        """What this process has recorded with symbolic sizes."""

    @functools.cached_property
    def _team(self) -> TeamPrograms | None:
        if not self._shares:
            return None
        from .team_programs import TeamPrograms

        source = self._source().local
        return TeamPrograms(source.gateway, source.disk, source.verifier.signed)

    @functools.cached_property
    def _checks(self) -> bool:
        """Drawn once in a process. Ranks draw for themselves, so that a job of any size is slower as seldom."""
        if self._check_one_in < 2:
            return self._check_one_in == 1
        launch = load_launcher_info()
        return secrets.randbelow(self._check_one_in * (launch.world_size if launch else 1)) == 0

    def checks(self) -> bool:
        return self._checks

    def wants(self, compiler: Any) -> bool:
        return getattr(compiler, "compiler_fn", compiler) is self._backend

    def starting(self, frame: FrameName) -> contextlib.AbstractContextManager[None]:
        return process_report().function(_name(frame))

    def uninterrupted(self) -> contextlib.AbstractContextManager[None]:
        return collector.paused()

    @contextlib.contextmanager
    def timed(self, part: Part | Literal["lookup"]) -> Iterator[None]:
        with process_report().timed(part):
            yield

    def key(self, frame: FrameName) -> str:
        return _key(frame)

    def find(self, key: str) -> Iterator[FrameProgram]:
        known: set[str] = set()
        for program in self._looked_up(self._store.variants(key)):
            yield program
            if self._team is not None:
                known.add(digest(program))
        if self._team is not None:
            known.update(self._store.stale(key))
            others = self._looked_up(self._team.find(key))
            yield from (program for program in others if digest(program) not in known)

    def _looked_up(self, programs: Iterator[FrameProgram]) -> Iterator[FrameProgram]:
        while True:
            with self.timed("lookup"):
                program = next(programs, None)
            if program is None:
                return
            yield program

    def graph(self, frame: FrameName, record: ProgramGraph) -> Callable[..., Any] | str:
        start = time.perf_counter()
        try:
            captured, reason = self._captured(frame, record)
            if reason:
                return reason
            found = self._source().obtain(ArtifactRequest(captured, record.request, record.key))
        except Exception as error:  # the frame is traced, and says what is wrong in the usual way
            return f"a graph of it cannot be had: {error}"
        if record.artifact and found.digest != record.artifact:
            return "the artifact of a graph is another one now, and may assume other sizes"
        seconds = time.perf_counter() - start
        nodes = len(captured.request.graph.nodes)
        process_report().record(found.outcome, key=found.key, seconds=seconds, nodes=nodes)
        return found.compiled

    def changed(self, frame: FrameName, record: ProgramGraph) -> str:
        return self._captured(frame, record)[1]

    def _captured(self, frame: FrameName, record: ProgramGraph) -> tuple[CapturedGraph, str]:
        """The graph, and why it would be another one in this process now, or ''."""
        request = decoding.from_msgpack(record.request, type=schema.GraphRequest)
        background, options = split_options(_given_options(frame))
        trace, options = config.split_trace_options(options)
        inductor, aot, cudagraphs = read_configuration(request.mode, options)
        sizes = {symbol.name: symbol.hint for symbol in request.symbols}
        captured = CapturedGraph(request, sizes, record.device, cudagraphs)
        if self._source().may_begin_eagerly(background):
            return captured, "the ranks of a job decide together how long it runs eagerly"
        if trace.files:
            return captured, "Inductor's trace of a graph is to be written"
        other = other_settings(request, inductor, aot) or _other_device(request, record)
        return captured, f"a graph of it would be another one now, because of {other}" if other else ""

    def checked(self, frame: FrameName, key: str, record: FrameProgram, difference: str) -> None:
        if difference:
            self._store.drop(key, record)
        process_report().program_checked(_name(frame), difference)

    def made(
        self, frame: FrameName, key: str, program: FrameProgram, instead: FrameProgram | None = None
    ) -> None:
        if instead is None:
            process_report().recorded(_name(frame))
        try:
            self._keep(key, program, instead)
        except Exception as error:  # settings that lead to no service
            self.unfit(frame, f"its record cannot be kept: {type(error).__name__}: {error}")

    def _keep(self, key: str, program: FrameProgram, instead: FrameProgram | None) -> None:
        self._store.add(key, program)
        if program.shapes:
            self._symbolic.append((key, program))
        if self._team is not None:
            requests = (
                decoding.from_msgpack(graph.request, type=schema.GraphRequest) for graph in program.graphs
            )
            kinds = {request.target.kind for request in requests}
            self._team.send(key, program, "cuda" if "cuda" in kinds else "cpu", instead)

    def forget(self, graph: str) -> None:
        """No longer keep what this process has recorded of this graph (its key): its sizes do not vary, and the next
        start is to have them as constants."""
        for key, program in self._symbolic:
            if any(each.key == graph for each in program.graphs):
                self._store.remove(key, program)

    def unfit(self, frame: FrameName, reason: str) -> None:
        process_report().traced(_name(frame), reason)

    def used(self, frame: FrameName, key: str, record: FrameProgram) -> None:
        self._store.used(key, record)
        process_report().started(_name(frame))


def _name(frame: FrameName) -> str:
    return f"{frame.module}.{frame.name}"


def other_settings(request: schema.GraphRequest, inductor: Options, aot: Options) -> str:
    """Which settings are not as they were, so that this process would send another request for the graph; or ''."""
    if request.toolchain != local_toolchain():
        return "another toolchain"
    if request.target != local_target(request.target.kind):
        return "another device"
    if (inductor, aot) != (request.options, request.aot_options):
        return "the compiler's configuration"
    return differing_process_state(request)


def _other_device(request: schema.GraphRequest, record: ProgramGraph) -> str:
    """'' if the graph runs on the same GPU as the one that was traced. Guards say so of its inputs, if it has any."""
    if record.device is None or any(
        isinstance(each, schema.TensorInput) and each.device == "cuda" for each in request.inputs
    ):
        return ""
    return "" if record.device == torch.cuda.current_device() else "another GPU"


def _given_options(frame: FrameName) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = getattr(frame.compiler, "kwargs", {}).get("options")
    return found


def _key(frame: FrameName) -> str:
    """Names a frame and all that decides how it is traced, besides what its guards compare; 64 hex digits. Raises
    NotPortable for a filter of guards that another process cannot compare."""
    compiler = frame.compiler
    named = (
        REVISION,
        str(torch.__version__),
        sys.version,
        frame.module,
        frame.name,
        frame.code,
        frame.modules,
        frame.one_graph,
        frame.splits,
        _place(),
        repr(getattr(compiler, "dynamic", None)),
        repr(sorted(getattr(compiler, "kwargs", {}).items(), key=repr)),
        _dynamo_entries(),
        None if frame.guard_filter is None else values.described(frame.guard_filter),
    )
    return hashlib.sha256(msgspec.msgpack.encode(named)).hexdigest()


def _place() -> list[Any]:
    """Which rank of what this process is, and its GPU: a trace may take these without a guard."""
    launch = load_launcher_info()
    ranks = [launch.rank, launch.world_size] if launch is not None and launch.world_size > 1 else []
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device() if used else None
    return [ranks, process_groups.described(), device]


def _dynamo_entries() -> list[str]:
    """Dynamo's configuration: numbers and texts as they are, for the environment sets many of PyTorch's own values; of
    other entries those that code has changed."""
    found = []
    for name, value in sorted(config.config_entries(_DYNAMO).items()):
        if name in _OF_THIS_MACHINE:
            continue
        if value is None or isinstance(value, bool | int | float | str):
            found.append(f"{name}={value!r}")
        elif value != config.own_default(_DYNAMO, name):
            found.append(f"{name}={sorted(map(repr, value)) if isinstance(value, set) else repr(value)}")
    return found
