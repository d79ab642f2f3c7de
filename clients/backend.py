"""The torch.compile back end: it gets a compiled graph from the service, or compiles the graph here if it must.

`torchrelay` is the entry point (group torch_dynamo_backends). One promise above all: it never breaks training.
Whatever goes wrong on the way to the service warns once, is counted, and the graph is compiled by Inductor in
this process; if Inductor fails too (a machine without a compiler), the graph runs eagerly, which warns and counts as
well. Only TORCHRELAY_MODE=require raises, and then the typed error itself; in mode `off`, Inductor's errors are its
own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import torch

from ..compiler.api.runs import GraphRecord, Outcome
from ..compiler.errors import (
    ClientError,
    DataDependent,
    GatewayUnreachable,
    LocalCompileFailed,
    RelayError,
    SpecializeInputs,
    Unsupported,
)
from ..compiler.graph.configuration import DYNAMO_OPTIONS, portable_mode, split_options
from ..compiler.request import codec
from ..compiler.torch_internals import compatibility
from ..compiler.torch_internals.dynamo import backend_interface, tracing
from ..compiler.torch_internals.inductor import config
from .artifacts import load
from .artifacts.prefetch import Prefetch, prefetch_with, start_early
from .artifacts.ranks.job_source import JobSource
from .artifacts.source import ArtifactRequest, LocalSource
from .gateway import run_link
from .patch_compile import replace_inductor, restore_inductor
from .reports.run_report import FallbackWarning, RunReport, process_report
from .settings import (
    ClientSettings,
    LauncherInfo,
    check_platform,
    load_launcher_info,
    load_settings,
    requires_artifacts,
)

if TYPE_CHECKING:
    from ..compiler.graph.captured_graph import CapturedGraph
    from ..compiler.torch_internals.dynamo.varied_sizes import VariedSizes
    from .artifacts.background import BackgroundSource, PendingArtifact

M = TypeVar("M")

_log = logging.getLogger(__name__)


def torchrelay(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph through the service. `mode` and `options` are Inductor's own, but for
    "torchrelay.background".

    Raises RuntimeError for options that Inductor does not know, as Inductor does; a RelayError only in mode
    `require`.
    """
    mode = mode or "default"
    background, options = split_options(options)
    config.check_options(mode, options)
    compile_locally = functools.partial(_compile_locally, gm, example_inputs, mode, options)
    served = fallback = None
    try:
        try:
            served, fallback = _from_service(gm, example_inputs, mode, options, background)
        except Exception as error:
            if _is_meant_for_the_caller(error):
                raise
            known = _known(error)
            if _requires_artifacts():
                with contextlib.suppress(Exception):  # the report may be what failed
                    process_report().raised(known, nodes=len(gm.graph.nodes))
                raise backend_interface.user_error(known) from None
            fallback = _reported(known, len(gm.graph.nodes))
        if served is not None:
            return served
        return compile_locally() if fallback is None else _compiled_or_eager(gm, compile_locally, fallback)
    finally:
        try:
            process_report().end_of_backend()
        except Exception as error:  # the graph is ready; only seconds are told wrongly
            _log.debug("torchrelay: no time noted", exc_info=error)


def _from_service(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str,
    options: Mapping[str, Any],
    background: bool | None,
) -> tuple[Callable[..., Any] | None, GraphRecord | None]:
    """The service's artifact, or the graph itself until that is there; or the report's record of a failure; neither in
    mode `off`. In mode `require` raises the failure."""
    relay = process_backend()
    if relay.settings.mode == "off":
        return None, None
    start = time.perf_counter()
    try:
        return relay.compile(gm, example_inputs, mode, options, background=background), None
    except Exception as error:
        if _is_meant_for_the_caller(error):
            raise
        known = _known(error)
        seconds, nodes = time.perf_counter() - start, len(gm.graph.nodes)
        if relay.settings.mode == "require":
            relay.report.raised(known, seconds=seconds, nodes=nodes)
            raise backend_interface.user_error(known) from None
        return None, relay.fell_back(known, seconds=seconds, nodes=nodes)


def _is_meant_for_the_caller(error: Exception) -> bool:
    return (
        isinstance(error, FallbackWarning)  # the user's filter makes it an error
        or backend_interface.is_user_error(error)
        or backend_interface.symbols_to_specialize(error) is not None
        or backend_interface.breaks_graph_at_data(error)
    )


def _requires_artifacts() -> bool:
    try:
        return process_backend().settings.mode == "require"
    except Exception:  # settings that cannot be read; that is what is reported
        return requires_artifacts()


def _reported(error: RelayError, nodes: int) -> GraphRecord:
    """Report a graph that is compiled locally. Raises FallbackWarning if the user's filter makes it an error."""
    try:
        return process_report().fallback(error, nodes=nodes)
    except FallbackWarning:
        raise
    except Exception:
        _log.exception("torchrelay: compiled locally: %s: %s", type(error).__name__, error)
        return GraphRecord(key="", outcome="fallback", seconds=0.0, nodes=nodes, reason=error.code)


def _known(error: Exception) -> RelayError:
    """The error itself; or the typed one for a defect here, or for a PyTorch that this was not made for. The log gets
    the traceback of such an error."""
    if isinstance(error, RelayError):
        return error
    _log.error("torchrelay: unexpected %s", type(error).__name__, exc_info=error)
    return ClientError(
        f"unexpected {type(error).__name__}: {error}", hint="Please report this with the traceback in the log"
    )


def _compile_locally(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], mode: str, options: Mapping[str, Any]
) -> Callable[..., Any]:
    from ..compiler.torch_internals.inductor import compile_fx

    return compile_fx.compile_graph(gm, example_inputs, {**config.mode_options(mode), **options})


def _compile_outside_dynamo(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    mode: str,
    options: Mapping[str, Any],
    fallback: GraphRecord,
    *,
    symbolic: bool = False,
) -> Callable[..., Any]:
    """What `_compiled_or_eager` makes in a call of the graph, for the sizes of its inputs; symbolic: for any."""
    if symbolic:

        def inductor(traced: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            compiled = functools.partial(_compile_locally, traced, examples, mode, options)
            return _compiled_or_eager(traced, compiled, fallback)

        return torch.compile(gm.forward, backend=inductor, dynamic=True)

    def compile_locally() -> Callable[..., Any]:
        with tracing.outside_dynamo(inputs) as examples:
            return _compile_locally(gm, examples, mode, options)

    return _compiled_or_eager(gm, compile_locally, fallback, in_dynamo=False)


def _compiled_or_eager(
    gm: torch.fx.GraphModule,
    compile_locally: Callable[[], Callable[..., Any]],
    fallback: GraphRecord,
    *,
    in_dynamo: bool = True,
) -> Callable[..., Any]:
    """What Inductor makes here of a graph that fell back; where it cannot, the graph itself, which warns and counts.

    Without a compiler, or at exit, where none of Inductor's threads starts, no graph can be compiled here. in_dynamo:
    Dynamo called the back end, so what it handles itself is raised.
    """
    eager = gm.forward  # as it is before Inductor's passes, which change the graph
    try:
        return compile_locally()
    except Exception as error:
        if isinstance(error, FallbackWarning) or (in_dynamo and backend_interface.is_dynamos_own(error)):
            raise
        _log.info("torchrelay: Inductor failed", exc_info=error)
        process_report().runs_eagerly(fallback, LocalCompileFailed.of(error))
        return eager


class RelayBackend:
    """What one process uses to reach the service: settings, connection, sources of artifacts, counters."""

    def __init__(
        self,
        settings: ClientSettings,
        report: RunReport,
        prefetch: Prefetch | None = None,
        launch: LauncherInfo | None = None,
    ) -> None:
        self.settings = settings
        self.report = report
        shows_waits = launch is None or launch.rank == 0
        self.source = JobSource(LocalSource(settings, report, prefetch, shows_waits=shows_waits), launch)
        self._prefetch = prefetch
        self._lock = None
        if settings.tuning_lock is not None:
            from .jobfiles.tuning_lock import LockedTunings

            self._lock = LockedTunings(settings.tuning_lock, strict=settings.tuning_lock_mode == "strict")

    @functools.cached_property
    def _background(self) -> BackgroundSource:
        from .artifacts.background import BackgroundSource

        return BackgroundSource(self.source)

    def compile(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        mode: str,
        options: Mapping[str, Any],
        *,
        background: bool | None = None,
    ) -> Callable[..., Any]:
        """Capture, fetch, verify, load. background: run a graph that is still to be compiled eagerly meanwhile; None:
        as the settings say. Raises RelayError; anything else for a defect here, or a PyTorch it was not made for."""
        if background is None:
            background = self.settings.background
        source = self._background if background else self.source
        check_platform()
        compatibility.check("capture")
        self.report.add_trace_seconds(tracing.trace_seconds())
        from ..compiler.graph.capture import capture  # a start without tracing needs none of these
        from ..compiler.request import key as keys
        from .artifacts.background import PendingArtifact

        start = time.perf_counter()
        with self.report.timed("encode"):
            trace, options = config.split_trace_options(options)
            sent_mode, sent_options = portable_mode(mode, options)
            captured = capture(
                gm, example_inputs, mode=sent_mode, options=sent_options, target=self.settings.target
            )
            if self._lock is not None:
                pinned = self._lock.pin(captured.request)
                captured = msgspec.structs.replace(captured, request=pinned)
            canonical = codec.encode_request(captured.request)
        with self.report.timed("key"):
            key = keys.key_of(captured.request, canonical)
        try:
            artifact = source.obtain(ArtifactRequest(captured, canonical, key))
        except SpecializeInputs as error:
            names = [captured.floats[p] for p in error.positions if p in captured.floats]
            raise (
                backend_interface.restart_analysis(names)
                or Unsupported(f"the service asks in vain for constants: {error.message}")
            ) from None
        except RelayError as error:
            if isinstance(error, DataDependent) and (broken := backend_interface.graph_break_at_data()):
                raise broken from None
            error.key = key
            raise
        if isinstance(artifact, PendingArtifact):
            bound = captured.without_inputs()

            def compile_locally(inputs: Sequence[Any], fallback: GraphRecord) -> Callable[..., Any]:
                return _compile_outside_dynamo(gm, inputs, mode, options, fallback)

            return _BackgroundGraph(self, gm, artifact, bound, key, compile_locally).call
        if trace.files:
            from .artifacts.lowered import write_trace

            write_trace(self.source.local, captured, trace)
        if captured.symints and self._prefetch is not None and self._prefetch.sizes is not None:
            watched = self._prefetch.sizes.watched(artifact.compiled, example_inputs, key)
            artifact = msgspec.structs.replace(artifact, compiled=watched)
        compiled = captured.bind(artifact.compiled)
        plain = not (captured.edges or captured.floats)
        if self.settings.keeps_programs and plain and artifact.key == key:
            from ..compiler.artifact.programs.records import ProgramGraph
            from ..compiler.torch_internals.dynamo.programs import recording

            digest = artifact.digest if captured.symints else ""
            record = ProgramGraph("", key, canonical, digest, captured.device_index)
            recording.note_graph(compiled, record, captured.hoisted.values())
        self.report.record(artifact.outcome, key=artifact.key, began=start, nodes=len(gm.graph.nodes))
        symbolic = bool(captured.request.symbols)
        return self.bound(
            gm,
            compiled,
            artifact.key,
            lambda inputs, fallback: _compile_outside_dynamo(
                gm, inputs, mode, options, fallback, symbolic=symbolic
            ),
        )

    def bound(
        self,
        gm: torch.fx.GraphModule,
        compiled: Callable[..., Any],
        key: str,
        compile_locally: Callable[[Sequence[Any], GraphRecord], Callable[..., Any]],
    ) -> Callable[..., Any]:
        """What runs as `gm`: `compiled`. Its first call is compared with eager, if a setting says so; an artifact that
        differs is not used, and `compile_locally` of the inputs is."""
        if not self.settings.check or secrets.randbelow(self.settings.check):
            return compiled
        from .artifacts.first_call_check import CheckedGraph

        def refuse(error: RelayError, inputs: Sequence[Any]) -> Callable[..., Any]:
            self.source.local.disk.remove(key)
            nodes = len(gm.graph.nodes)
            if self.settings.mode == "require":
                self.report.raised(error, nodes=nodes)
                raise error
            return compile_locally(inputs, self.fell_back(error, seconds=0.0, nodes=nodes))

        return CheckedGraph(gm, compiled, key, self.report, refuse).call

    def fell_back(self, error: RelayError, *, seconds: float, nodes: int) -> GraphRecord:
        """Count a graph compiled locally, here and (if it answers at once) at the service."""
        record = self.report.fallback(error, key=error.key, seconds=seconds, nodes=nodes)
        self.count_fallback(error)
        return record

    def count_fallback(self, error: RelayError) -> None:
        """At the service."""
        if isinstance(error, GatewayUnreachable) or not self.settings.url:
            return
        with contextlib.suppress(RuntimeError):  # no thread can start: only a count is lost
            threading.Thread(target=self._report_fallback, args=(error.code,), daemon=True).start()

    def _report_fallback(self, code: str) -> None:
        try:
            self.source.local.gateway.report(code)
        except RelayError:
            return  # only a count is lost


class _BackgroundGraph:
    """A graph whose artifact is pending: what runs meanwhile, what takes over, and what the report says of it."""

    def __init__(
        self,
        relay: RelayBackend,
        gm: torch.fx.GraphModule,
        pending: PendingArtifact,
        captured: CapturedGraph,
        key: str,
        compile_locally: Callable[[Sequence[Any], GraphRecord], Callable[..., Any]],
    ) -> None:
        """compile_locally: for the sizes of a call's inputs; eagerly if that fails, which the record then says."""
        from .artifacts.background import ChangingGraph

        self._relay = relay
        self._gm = gm
        self._pending = pending
        self._captured = captured
        self._compile_locally = compile_locally
        self._start = time.perf_counter()
        nodes = len(gm.graph.nodes)
        self._record = relay.report.background(
            GraphRecord(key=key, outcome="background", seconds=0.0, nodes=nodes)
        )
        self._refused = False
        self.call = ChangingGraph(gm.forward, pending.is_due, self._take_over).call

    def _take_over(self, calls: int, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            artifact = self._pending.load()
        except Exception as failure:
            error = _known(failure)
            error.key = self._record.key
            return self._without(error, calls, inputs)
        self._end(artifact.outcome, calls)
        compiled = self._captured.bind(artifact.compiled)
        return self._relay.bound(self._gm, compiled, artifact.key, self._compile_locally)

    def _without(self, error: RelayError, calls: int, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs from now on, since the artifact cannot be had. Says so once. Raises `error` in mode `require`."""
        first, self._refused = not self._refused, True
        if self._relay.settings.mode == "require":
            if first:
                self._end("raised", calls, error.code)
            raise error from None
        if first:
            self._end("fallback", calls, error.code)
            self._relay.report.warn_once(error)
            self._relay.count_fallback(error)
        return self._compile_locally(inputs, self._record)

    def _end(self, outcome: Outcome, calls: int, reason: str = "") -> None:
        seconds = time.perf_counter() - self._start
        ended = msgspec.structs.replace(
            self._record, outcome=outcome, seconds=seconds, reason=reason, eager_calls=calls
        )
        self._relay.report.end_background(self._record, ended)
        self._record = ended


@functools.cache
def process_backend() -> RelayBackend:
    """This process's back end, made at the first graph from the settings as they are then; what it leaves at exit, and
    the prefetch, begin with it. Raises SettingsError."""
    settings, report, launch = load_settings(), process_report(), load_launcher_info()
    backend = RelayBackend(settings, report, prefetch_with(settings), launch)
    if settings.url:
        report.errors_page = f"{settings.url.rstrip('/')}/errors"
    if settings.report is not None:
        report.write_at_exit(settings.report)
    if settings.trace is not None:
        report.write_trace_at_exit(settings.trace)
    if settings.state_dir is not None:
        report.leave_at_exit(settings.state_dir, launch)
    if settings.summary and settings.url and settings.mode != "off":
        report.tell_at_exit(functools.partial(run_link.tell, settings), launch)
    return backend


def compile(
    model: M,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> M:
    """`torch.compile(model, backend="torchrelay", ...)`, with the options checked now, not at the first call.

    options: Inductor's, those that torch.compile takes for itself (`guard_filter_fn`), and "torchrelay.background": a
    graph that is still to be compiled runs eagerly meanwhile.
    Raises RuntimeError for a mode or an option that is not known.
    """
    backend_interface.register_backend("torchrelay", torchrelay)
    ours = split_options(options)[1]
    for name in DYNAMO_OPTIONS:
        ours.pop(name, None)
    config.check_options(mode or "default", ours)
    compiled = torch.compile(
        cast(Callable[..., Any], model),
        backend="torchrelay",
        mode=mode,
        options=None if options is None else dict(options),
        dynamic=dynamic,
        fullgraph=fullgraph,
    )
    return cast(M, compiled)


def enable() -> None:
    """Make torchrelay the back end of every `torch.compile` in this process that names none, or names "inductor".

    Trainers name it: Accelerate, Hugging Face's Trainer, torchtitan. `Module.compile` is included. Accelerate, if it is
    imported already, accepts "torchrelay" as a back end's name from here on. A function that was imported before by
    `from torch import compile` is reached only where it names no back end, from torch 2.13 on. A background thread
    begins to fetch what this script used the last time. A second call starts none, and changes nothing but that an
    Accelerate imported meanwhile accepts the name.
    """
    backend_interface.register_backend("torchrelay", torchrelay)
    replace_inductor()
    backend_interface.set_default_backend("torchrelay")
    start_early()


def disable() -> None:
    """Undo `enable`. What was compiled before keeps its back end. A second call changes nothing."""
    restore_inductor()
    if backend_interface.default_backend() == "torchrelay":
        backend_interface.set_default_backend(None)


def _begin() -> None:
    """What comes before the first graph. The first torch.compile that names this back end imports this module, before
    its function is traced. Never raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first graph repeats them
            settings = load_settings()
    except Exception:  # the first graph reports settings that cannot be read
        return
    if settings.trace is not None:
        process_report().begin_trace()
    prefetch = start_early(settings)
    if settings.mode != "off":
        with contextlib.suppress(Exception):  # the first graph reports what cannot be imported
            load.preload()  # before torch.compile imports the same with all that only a compile uses
    if prefetch is not None:
        _share_sizes(prefetch)
    if settings.keeps_programs and settings.state_dir is not None:
        _start_programs(settings, settings.state_dir, None if prefetch is None else prefetch.sizes)


def _share_sizes(prefetch: Prefetch) -> None:
    """Have functions traced with symbols for what varied in earlier runs, and watch what varies in this one."""
    launch = load_launcher_info()
    if launch is not None and launch.world_size > 1:
        return
    try:
        from ..compiler.torch_internals.dynamo.varied_sizes import VariedSizes

        compatibility.check("sizes")
        sizes = VariedSizes(torchrelay, lambda: prefetch.varied)
        sizes.install()
        prefetch.sizes = sizes
    except Exception as error:  # a PyTorch that this was not made for; functions are traced as ever
        process_report().prefetch_failed(error)


def _start_programs(settings: ClientSettings, state_dir: Path, sizes: VariedSizes | None) -> None:
    """Start functions without tracing: those that begin so do not come to `sizes`."""
    try:
        from ..compiler.torch_internals.dynamo.programs import frames
        from .artifacts.programs.process_programs import ProcessPrograms
        from .artifacts.programs.store import ProgramStore

        check_platform()
        compatibility.check("programs")
        store = ProgramStore(settings.cache_dir, state_dir)
        shares = settings.programs == "team"
        programs = ProcessPrograms(
            torchrelay,
            store,
            lambda: process_backend().source,
            shares=shares,
            check_one_in=1 if settings.check == 1 else settings.programs_check,
        )
        frames.install(programs)
        if sizes is not None:
            sizes.on_constant = programs.forget
    except Exception as error:
        process_report().traced("every function", str(error))


_begin()
