"""The torch.compile back end: it gets a compiled graph from the service, or compiles the graph here if it must.

`torchrelay` is the entry point (group torch_dynamo_backends). One promise above all: it never breaks training.
Whatever goes wrong on the way to the service warns once, is counted, and the graph is compiled by Inductor in
this process; only TORCHRELAY_MODE=require raises, and then the typed error itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
import torch

from ..compiler.errors import ClientError, GatewayUnreachable, RelayError, SpecializeInputs
from ..compiler.request import codec
from ..compiler.request import key as keys
from ..compiler.torch_internals import compatibility, counters
from ..compiler.torch_internals.dynamo import backend_interface, tracing
from ..compiler.torch_internals.dynamo.programs import frames, recording
from ..compiler.torch_internals.inductor import compile_fx, config
from .artifacts.prefetch import prefetch_with, start_early
from .artifacts.programs.process_programs import ProcessPrograms
from .artifacts.programs.store import ProgramStore
from .artifacts.source import ArtifactRequest, ArtifactSource, LoadedArtifact, PendingArtifact
from .artifacts.takeover import ChangingGraph, Pending, Takeover
from .capture.configuration import Mode, split_options
from .capture.locked_tunings import LockedTunings
from .capture.prepare import PreparedGraph, prepare
from .capture.replace_inductor import replace_inductor, restore_inductor
from .gateway.compile_client import GatewayClient
from .reports.run_report import FallbackWarning, GraphRecord, Outcome, RunReport, UntunedRun, process_report
from .settings import (
    ClientSettings,
    check_platform,
    load_launcher_info,
    load_settings,
    requires_artifacts,
    wants_programs,
)

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
    try:
        compiled = _from_service(gm, example_inputs, cast(Mode, mode), options, background)
    except Exception as error:
        if _is_meant_for_the_caller(error):
            raise
        _warn(error)
        compiled = None
    return compiled or _compile_locally(gm, example_inputs, mode, options)


def _from_service(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: Mode,
    options: Mapping[str, Any],
    background: bool | None,
) -> Callable[..., Any] | None:
    """The service's artifact, or the graph itself until that is there; None after a failure that was reported, and in
    mode `off`. In mode `require` raises the failure."""
    try:
        relay = process_backend()
    except RelayError as error:  # settings that cannot be read
        if requires_artifacts():
            raise backend_interface.user_error(error) from None
        raise
    if relay.settings.mode == "off":
        return None
    start = time.perf_counter()
    try:
        return relay.compile(gm, example_inputs, mode, options, background=background)
    except RelayError as error:
        seconds, nodes = time.perf_counter() - start, len(gm.graph.nodes)
        if relay.settings.mode == "require":
            relay.report.raised(error, seconds=seconds, nodes=nodes)
            raise backend_interface.user_error(error) from None
        relay.fell_back(error, seconds=seconds, nodes=nodes)
        return None


def _is_meant_for_the_caller(error: Exception) -> bool:
    return (
        isinstance(error, FallbackWarning)  # the user's filter makes it an error
        or backend_interface.is_user_error(error)
        or backend_interface.symbols_to_specialize(error) is not None
    )


def _warn(error: Exception) -> None:
    """Report a graph that is compiled locally. Raises FallbackWarning if the user's filter makes it an error."""
    try:
        process_report().fallback(error if isinstance(error, RelayError) else _unexpected(error))
    except FallbackWarning:
        raise
    except Exception:
        _log.exception("torchrelay: compiled locally: %s: %s", type(error).__name__, error)


def _unexpected(error: Exception) -> ClientError:
    return ClientError(
        f"unexpected {type(error).__name__}: {error}", hint="Please report this with its traceback"
    )


def _compile_locally(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], mode: str, options: Mapping[str, Any]
) -> Callable[..., Any]:
    patches = {**config.mode_options(mode), **options}
    try:
        return compile_fx.compile_graph(gm, example_inputs, patches)
    except Exception:
        if _threads_start():
            raise
        _log.warning(
            "torchrelay: a graph runs as it is: Inductor compiles in threads, and none can start at exit"
        )
        return gm.forward


def _compile_outside_dynamo(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    mode: str,
    options: Mapping[str, Any],
    *,
    symbolic: bool = False,
) -> Callable[..., Any]:
    """As `_compile_locally`, in a call of the graph, for the sizes of its inputs; symbolic: for any. The graph has run
    eagerly, so it goes on like that if Inductor refuses it."""
    try:
        if symbolic:

            def inductor(traced: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
                return _compile_locally(traced, examples, mode, options)

            return torch.compile(gm.forward, backend=inductor, dynamic=True)
        with tracing.outside_dynamo(inputs) as examples:
            return _compile_locally(gm, examples, mode, options)
    except Exception as error:
        _log.warning("torchrelay: a graph stays eager: Inductor: %s: %s", type(error).__name__, error)
        return gm.forward


def _threads_start() -> bool:
    """Whether Inductor's thread pools work. They do not once Python has begun to end, as in an atexit handler."""
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(int)
    except RuntimeError:
        return False
    return True


class RelayBackend:
    """What one process uses to reach the service: settings, connection, sources of artifacts, counters."""

    def __init__(
        self, settings: ClientSettings, report: RunReport, gateway: GatewayClient | None = None
    ) -> None:
        self.settings = settings
        self.report = report
        self._gateway = gateway or GatewayClient(settings)
        self._lock = LockedTunings.of(settings)
        launch = load_launcher_info()
        self.source = ArtifactSource(settings, report, self._gateway, prefetch_with(settings), launch)
        if settings.report is not None:
            report.write_at_exit(settings.report)
        if settings.trace is not None:
            report.write_trace_at_exit(settings.trace)
        if settings.state_dir is not None:
            report.leave_at_exit(settings.state_dir, launch)

    def compile(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        mode: Mode,
        options: Mapping[str, Any],
        *,
        background: bool | None = None,
    ) -> Callable[..., Any]:
        """Capture, fetch, verify, load. background: run a graph that is still to be compiled eagerly meanwhile; None:
        as the settings say. Raises RelayError, of whatever kind the failure was."""
        if background is None:
            background = self.settings.background
        obtain = self.source.obtain_or_begin if background else self.source.obtain
        try:
            check_platform()
            compatibility.check("capture")
            self.report.add_seconds("trace", counters.trace_seconds())
            start = time.perf_counter()
            with self.report.timed("encode"):
                prepared = prepare(gm, example_inputs, mode=mode, options=options, lock=self._lock)
                captured = prepared.captured
                canonical = codec.encode_request(captured.request)
            with self.report.timed("key"):
                key = keys.key_of(captured.request, canonical)
            try:
                found = obtain(ArtifactRequest(captured, canonical, key, prepared.local.inputs))
            except SpecializeInputs as error:
                raise backend_interface.restart_analysis(
                    captured.floats[p] for p in error.positions
                ) from None
            except RelayError as error:
                error.key = key
                raise
        except RelayError:
            raise
        except Exception as error:  # a defect here, or a PyTorch it was not made for: training must go on
            if backend_interface.symbols_to_specialize(error) is not None:
                raise
            raise _unexpected(error) from error
        if isinstance(found, Pending):
            bound = prepared.without_inputs()
            return _BackgroundGraph(
                self, gm, found, bound, key, lambda inputs: _compile_outside_dynamo(gm, inputs, mode, options)
            ).call
        if prepared.is_plain and found.key == key:
            artifact = found.digest if captured.symints else ""
            recording.note_graph(found.compiled, key, canonical, artifact, captured.device_index)
        self.report.record(found.outcome, key=found.key, began=start, nodes=len(gm.graph.nodes))
        symbolic = bool(captured.request.symbols)
        return self.bound(
            gm,
            prepared,
            found,
            lambda inputs: _compile_outside_dynamo(gm, inputs, mode, options, symbolic=symbolic),
        )

    def bound(
        self,
        gm: torch.fx.GraphModule,
        prepared: PreparedGraph,
        found: LoadedArtifact,
        compile_locally: Callable[[Sequence[Any]], Callable[..., Any]],
    ) -> Callable[..., Any]:
        """What runs as `gm`. Its first call is compared with eager, if a setting says so; an artifact that differs is
        not used, and `compile_locally` of the inputs is."""
        compiled = prepared.bind(found.compiled)
        if not self.settings.check or secrets.randbelow(self.settings.check):
            return compiled
        from .artifacts.first_call_check import CheckedGraph

        def refuse(error: RelayError, inputs: Sequence[Any]) -> Callable[..., Any]:
            self.source.disk.remove(found.key)
            nodes = len(gm.graph.nodes)
            if self.settings.mode == "require":
                self.report.raised(error, nodes=nodes)
                raise error
            self.fell_back(error, seconds=0.0, nodes=nodes)
            return compile_locally(inputs)

        return CheckedGraph(gm, compiled, found.key, self.report, refuse).call

    def fell_back(self, error: RelayError, *, seconds: float, nodes: int) -> None:
        """Count a graph compiled locally, here and (if it answers at once) at the service."""
        self.report.fallback(error, key=error.key, seconds=seconds, nodes=nodes)
        self.count_fallback(error)

    def count_fallback(self, error: RelayError) -> None:
        """At the service."""
        if isinstance(error, GatewayUnreachable) or not self.settings.url:
            return
        with contextlib.suppress(RuntimeError):  # no thread can start: only a count is lost
            threading.Thread(target=self._report_fallback, args=(error.code,), daemon=True).start()

    def _report_fallback(self, code: str) -> None:
        try:
            self._gateway.report(code)
        except RelayError:
            return  # only a count is lost


class _BackgroundGraph:
    """A graph whose artifact is pending: what runs meanwhile, what takes over, and what the report says of it."""

    def __init__(
        self,
        relay: RelayBackend,
        gm: torch.fx.GraphModule,
        pending: PendingArtifact,
        prepared: PreparedGraph,
        key: str,
        compile_locally: Callable[[Sequence[Any]], Callable[..., Any]],
    ) -> None:
        """compile_locally: for the sizes of a call's inputs."""
        self._relay = relay
        self._gm = gm
        self._pending = pending
        self._prepared = prepared
        self._compile_locally = compile_locally
        self._start = time.perf_counter()
        nodes = len(gm.graph.nodes)
        self._record = relay.report.background(
            GraphRecord(key=key, outcome="background", seconds=0.0, nodes=nodes)
        )
        self._untuned: Callable[..., Any] | None = None
        self._refused = False
        takeovers = [Takeover(pending.is_due, self._take_over)]
        first: Callable[..., Any] = gm.forward
        if isinstance(pending.before, Pending):
            takeovers.insert(0, Takeover(pending.before.is_due, self._take_untuned))
        elif pending.before is not None:
            first = self._run_untuned(0, pending.before)
        self.call = ChangingGraph(first, takeovers).call

    def _take_untuned(self, calls: int, _: Sequence[Any]) -> Callable[..., Any] | None:
        assert isinstance(self._pending.before, Pending)
        try:
            return self._run_untuned(calls, self._pending.before.load())
        except Exception as error:  # the search goes on, and may end better
            _log.warning("torchrelay: a graph runs eagerly until its search has ended: %s", error)
            return None

    def _run_untuned(self, calls: int, found: LoadedArtifact) -> Callable[..., Any]:
        seconds = time.perf_counter() - self._start
        run = UntunedRun(key=found.key, outcome=found.outcome, seconds=seconds)
        listed = msgspec.structs.replace(self._record, eager_calls=calls, untuned=run)
        self._record = self._relay.report.background(listed, self._record)
        self._untuned = self._relay.bound(self._gm, self._prepared, found, self._compile_locally)
        return self._untuned

    def _take_over(self, calls: int, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            found = self._pending.load()
        except Exception as failure:
            error = failure if isinstance(failure, RelayError) else _unexpected(failure)
            error.key = self._record.key
            return self._without(error, calls, inputs)
        self._end(found.outcome, calls)
        return self._relay.bound(self._gm, self._prepared, found, self._compile_locally)

    def _without(self, error: RelayError, calls: int, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs from now on, since the artifact cannot be had. Says so once. Raises `error` in mode `require`."""
        first, self._refused = not self._refused, True
        if self._relay.settings.mode == "require":
            if first:
                self._end("raised", calls, error.code)
            raise error from None
        if self._untuned is None and isinstance(self._pending.before, Pending):
            self._take_untuned(calls, inputs)
        if self._untuned is not None:
            if first:
                self._end("untuned", calls, error.code)
                self._relay.report.warn_once(error, "a graph stays without its search")
            return self._untuned
        if first:
            self._end("fallback", calls, error.code)
            self._relay.report.warn_once(error)
            self._relay.count_fallback(error)
        return self._compile_locally(inputs)

    def _end(self, outcome: Outcome, calls: int, reason: str = "") -> None:
        record, run = self._record, self._record.untuned
        eager_calls = calls if run is None else record.eager_calls
        if run is not None and outcome != "untuned":
            run = msgspec.structs.replace(run, calls=calls - eager_calls)
        ended = msgspec.structs.replace(
            record,
            outcome=outcome,
            seconds=time.perf_counter() - self._start,
            reason=reason,
            eager_calls=eager_calls,
            untuned=run,
        )
        self._relay.report.end_background(record, ended)


@functools.cache
def process_backend() -> RelayBackend:
    """This process's back end, made at the first graph from the settings as they are then. Raises SettingsError."""
    return RelayBackend(load_settings(), process_report())


def compile(
    model: M,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> M:
    """`torch.compile(model, backend="torchrelay", ...)`, with the options checked now, not at the first call.

    options: Inductor's, and "torchrelay.background": a graph that is still to be compiled runs eagerly meanwhile.
    Raises RuntimeError for a mode or an option that is not known.
    """
    config.check_options(mode or "default", split_options(options)[1])
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

    Trainers name it: Accelerate, Hugging Face's Trainer, torchtitan. `Module.compile` is included, and Accelerate
    accepts "torchrelay" as a back end's name from here on. A function that was imported before by `from torch import
    compile` is reached only where it names no back end, from torch 2.13 on. A second call changes nothing.
    """
    replace_inductor()
    backend_interface.set_default_backend("torchrelay")
    start_early()


def disable() -> None:
    """Undo `enable`. What was compiled before keeps its back end. A second call changes nothing."""
    restore_inductor()
    if backend_interface.default_backend() == "torchrelay":
        backend_interface.set_default_backend(None)


def _start_programs() -> None:
    """Start functions without tracing, if a setting says so. This module is imported by the first torch.compile that
    names this back end: before its function is traced. Never raises."""
    if not wants_programs():
        return
    try:
        settings = load_settings()
        if settings.programs == "off" or settings.state_dir is None:
            return
        compatibility.check("programs")
        store = ProgramStore(settings.cache_dir, settings.state_dir)
        shares = settings.programs == "team" and settings.mode != "off"
        programs = ProcessPrograms(
            torchrelay,
            store,
            lambda: process_backend().source,
            shares=shares,
            check_one_in=1 if settings.check == 1 else settings.programs_check,
        )
        frames.install(programs)
    except Exception as error:  # settings that cannot be read are reported by the first graph
        process_report().traced("every function", str(error))


_start_programs()
