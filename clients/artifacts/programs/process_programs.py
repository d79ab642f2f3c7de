"""The programs of this process: looked up before Dynamo traces a frame, recorded after it has traced one.

A record is used only if the artifacts of its graphs have been obtained, verified and loaded; else the frame is traced.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec
import torch

from ....compiler import decoding
from ....compiler.artifact.programs.records import REVISION, FrameProgram, ProgramGraph, in_order
from ....compiler.graph.ambient import differing_process_state
from ....compiler.graph.toolchain import local_target, local_toolchain
from ....compiler.request import schema
from ....compiler.torch_internals.distributed import process_groups
from ....compiler.torch_internals.dynamo.programs.frames import FrameName, Part
from ....compiler.torch_internals.inductor import config_modules
from ...capture.configuration import Options, read_configuration, split_options
from ...capture.request import CapturedGraph
from ...reports.run_report import process_report
from ...settings import load_launcher_info
from ..load import collector
from ..source import ArtifactRequest, ArtifactSource
from .store import ProgramStore
from .team_programs import TeamPrograms

_DYNAMO = "torch._dynamo.config"


class ProcessPrograms:
    """The programs of frames whose back end is `backend` (frames.Programs). source: of artifacts, when it is first
    needed. shares: take the team's programs too, and send own ones. Safe for threads."""

    def __init__(
        self, backend: Any, store: ProgramStore, source: Callable[[], ArtifactSource], *, shares: bool = False
    ) -> None:
        self._backend = backend
        self._store = store
        self._source = source
        self._shares = shares

    @functools.cached_property
    def _team(self) -> TeamPrograms | None:
        if not self._shares:
            return None
        source = self._source()
        return TeamPrograms(source.gateway, source.disk, source.signed)

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
        with self.timed("lookup"):
            own = in_order(self._store.read(key))
        yield from own
        if self._team is None:
            return
        others = self._team.find(key)
        while True:
            with self.timed("lookup"):
                program = next(others, None)
            if program is None:
                return
            if program not in own:
                yield program

    def graph(self, frame: FrameName, record: ProgramGraph) -> Callable[..., Any] | str:
        start = time.perf_counter()
        try:
            request = decoding.from_msgpack(record.request, type=schema.GraphRequest)
            background, options = split_options(_given_options(frame))
            if self._source().may_begin_eagerly(background):
                return "the ranks of a job decide together how long it runs eagerly"
            inductor, aot, cudagraphs = read_configuration(request.mode, options)
            other = _other_settings(request, inductor, aot) or _other_device(request, record)
            if other:
                return f"a graph of it would be another one now, because of {other}"
            captured = _captured(request, record.device, cudagraphs)
            found = self._source().obtain(ArtifactRequest(captured, record.request, record.key, []))
        except Exception as error:  # the frame is traced, and says what is wrong in the usual way
            return f"a graph of it cannot be had: {error}"
        if record.artifact and found.digest != record.artifact:
            return "the artifact of a graph is another one now, and may assume other sizes"
        seconds = time.perf_counter() - start
        process_report().record(found.outcome, key=found.key, seconds=seconds, nodes=len(request.graph.nodes))
        return found.compiled

    def made(self, frame: FrameName, key: str, program: FrameProgram) -> None:
        try:
            self._keep(key, program)
        except Exception as error:  # settings that lead to no service
            self.unfit(frame, f"its record cannot be kept: {type(error).__name__}: {error}")

    def _keep(self, key: str, program: FrameProgram) -> None:
        self._store.add(key, program)
        if self._team is not None:
            requests = (
                decoding.from_msgpack(graph.request, type=schema.GraphRequest) for graph in program.graphs
            )
            kinds = {request.target.kind for request in requests}
            self._team.send(key, program, "cuda" if "cuda" in kinds else "cpu")

    def unfit(self, frame: FrameName, reason: str) -> None:
        process_report().traced(_name(frame), reason)

    def used(self, frame: FrameName) -> None:
        process_report().program()


def _name(frame: FrameName) -> str:
    return f"{frame.module}.{frame.name}"


def _captured(request: schema.GraphRequest, device: int | None, cudagraphs: bool) -> CapturedGraph:
    sizes = {symbol.name: symbol.hint for symbol in request.symbols}
    return CapturedGraph(request, sizes, device, cudagraphs, floats={})


def _other_settings(request: schema.GraphRequest, inductor: Options, aot: Options) -> str:
    """Which settings are not as they were, so that this process would send another request for the graph; or ''."""
    if request.toolchain != local_toolchain():
        return "another toolchain"
    if request.target != local_target(request.target.kind):
        return "another device"
    if (inductor, aot) != (request.options, request.aot_options):
        return "the compiler's configuration"
    return differing_process_state(request.ambient)


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
    """Names a frame and all that decides how it is traced, besides what its guards compare; 64 hex digits."""
    compiler = frame.compiler
    named = (
        REVISION,
        str(torch.__version__),
        sys.version,
        frame.module,
        frame.name,
        frame.code,
        frame.one_graph,
        frame.splits,
        _place(),
        repr(getattr(compiler, "dynamic", None)),
        repr(sorted(getattr(compiler, "kwargs", {}).items(), key=repr)),
        _changed_entries(),
    )
    return hashlib.sha256(msgspec.msgpack.encode(named)).hexdigest()


def _place() -> list[Any]:
    """Which rank of what this process is, and its GPU: a trace may take these without a guard."""
    launch = load_launcher_info()
    ranks = [launch.rank, launch.world_size] if launch is not None and launch.world_size > 1 else []
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device() if used else None
    return [ranks, process_groups.described(), device]


def _changed_entries() -> list[str]:
    """Entries of Dynamo's configuration that have another value than PyTorch's own."""
    entries = sorted(config_modules.config_entries(_DYNAMO).items())
    own = ((name, value, config_modules.own_default(_DYNAMO, name)) for name, value in entries)
    return [f"{name}={value!r}" for name, value, default in own if value is not default and value != default]
