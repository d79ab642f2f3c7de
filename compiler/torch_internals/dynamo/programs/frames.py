"""Frames of Dynamo's: recorded after they were traced, and made again from a record without tracing.

`install` takes the place of torch._dynamo.convert_frame._compile, which is called for a frame that has no compiled code
that fits. What it returns for a record is what it returns after tracing: bytecode with guards. So Dynamo keeps it,
checks it at each call, and counts recompiles as ever. What only a trace needs is imported at the first one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from msgspec import Struct

from ....artifact.programs import digests
from ....artifact.programs.records import FrameProgram, ProgramGraph
from ...distributed import process_groups, split_graphs
from ...patching import replace
from .. import guard_building
from . import replay, shapes, values

if TYPE_CHECKING:
    from . import recording

_log = logging.getLogger(__name__)
_MODULES = 256
"""So many of a frame's modules, outer ones first, name its records."""
Part = Literal["digests", "guards", "install"]
"""What is done with a record: functions that were traced, and values with guards, are compared; guards are made."""


class Programs(Protocol):
    """Where programs are kept. Only `key` may raise."""

    def wants(self, compiler: Any) -> bool:
        """Whether frames of this back end are recorded and made from records."""

    def starting(self, frame: FrameName) -> AbstractContextManager[None]:
        """Around all that is done with a frame."""

    def uninterrupted(self) -> AbstractContextManager[None]:
        """Around all that is done to make a frame from a record; tracing is not."""

    def timed(self, part: Part) -> AbstractContextManager[None]:
        """Around a part of that."""

    def key(self, frame: FrameName) -> str:
        """What a frame's records are kept under. Asked for before it is traced, for a trace may change what the key
        depends on. Raises whatever it meets there."""

    def find(self, key: str) -> Iterable[FrameProgram]:
        """The records of a frame, the likeliest first; each may be fetched when it is asked for."""

    def graph(self, frame: FrameName, record: ProgramGraph) -> Callable[..., Any] | str:
        """What runs as the graph; or why it cannot be had, or would be another one in this process now."""

    def checks(self) -> bool:
        """Whether a record that would be used is compared with a new trace instead."""

    def changed(self, frame: FrameName, record: ProgramGraph) -> str:
        """Why a graph would be another one in this process now, or ''."""

    def checked(self, frame: FrameName, key: str, record: FrameProgram, difference: str) -> None:
        """A record that would have been used was compared with a trace: how they differ, in words, or ''. May raise a
        warning that the user has made an error."""

    def made(
        self, frame: FrameName, key: str, program: FrameProgram, instead: FrameProgram | None = None
    ) -> None:
        """A frame was traced, and this is its record. instead: one that was found to be stale."""

    def unfit(self, frame: FrameName, reason: str) -> None:
        """A frame was traced and has no record, or has records that do not fit."""

    def used(self, frame: FrameName, key: str, record: FrameProgram) -> None:
        """A frame was made from a record."""


class FrameName(Struct, frozen=True):
    """What identifies a function and how it is compiled. compiler: the innermost back end. splits: how Dynamo's
    DDPOptimizer makes several graphs of one before they come to it, in words; '' where it does not."""

    module: str
    name: str
    code: str
    one_graph: bool
    compiler: Any
    splits: str = ""
    guard_filter: Any = None
    """The user's, which decides which guards the function has."""
    modules: str = ""
    """A digest of the modules that it is given."""


def install(programs: Programs) -> Callable[[], None]:
    """Begin to record frames and to make them from records; returns what ends it."""
    from torch._dynamo import convert_frame

    compile_ = convert_frame._compile
    parameters = inspect.signature(compile_)
    undo = contextlib.ExitStack()

    @functools.wraps(compile_)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        around = contextlib.ExitStack()
        try:
            begun = _attempt(begin, around, args, kwargs)
            if isinstance(begun, _Started):
                return begun.code
            returned = compile_(*args, **kwargs)
            if begun is not None and (checked := _attempt(_traced, programs, begun, returned)) is not None:
                programs.checked(*checked)
            return returned
        finally:
            _attempt(around.close)

    def begin(around: contextlib.ExitStack, args: Any, kwargs: Any) -> _Started | _Tracing | None:
        """Begin with a frame: it starts from a record, is recorded, or only traced. around: left when it is ready."""
        call = parameters.bind(*args, **kwargs).arguments
        compiler, splits = back_end(call)
        if call["export"] or call.get("package") is not None or not programs.wants(compiler):
            return None
        frame = FrameName(
            str(call["globals"].get("__name__")),
            call["code"].co_qualname,
            digests.frame_digest(call["code"], call["globals"]),
            bool(call["one_graph"]),
            compiler,
            splits,
            replay.guard_filter(call),
            modules_digest(call["locals"]),
        )
        around.enter_context(programs.starting(frame))
        try:
            return started(around, frame, call)
        except Exception as error:
            programs.unfit(frame, f"{type(error).__name__}: {error}")
            return None

    def started(
        around: contextlib.ExitStack, frame: FrameName, call: Mapping[str, Any]
    ) -> _Started | _Tracing | None:
        if process_groups.trace_together():
            programs.unfit(frame, "Dynamo's ranks trace together, because of enable_compiler_collectives")
            return None
        try:
            key = programs.key(frame)
        except Exception as error:  # a process group that ends meanwhile
            programs.unfit(frame, f"its records have no key: {type(error).__name__}: {error}")
            return None
        reason = ""
        tried: FrameProgram | None = None
        try:
            checks = programs.checks()
            graph = (
                functools.partial(_unchanged, programs, frame)
                if checks
                else functools.partial(programs.graph, frame)
            )
            with programs.uninterrupted():
                found, fitting, reason = replay.from_records(
                    programs.find(key), graph, call, programs.timed, not checks
                )
            if fitting is not None and (not checks or _has_symbols(fitting)):
                shapes.remember(fitting.automatic, call)
            if found is not None and fitting is not None and not checks:
                programs.used(frame, key, fitting)
                return _Started(found)
            tried = fitting
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason:
            programs.unfit(frame, reason)
        from . import recording

        try:
            recording.observe()
        except Exception as error:  # a PyTorch that has not all that is observed
            programs.unfit(frame, f"it cannot be recorded: {type(error).__name__}: {error}")
            return None
        return _Tracing(frame, key, tried, around.enter_context(recording.recorded(call)))

    undo.callback(replace(convert_frame, "_compile", compiled))
    undo.callback(guard_building.install())
    return undo.close


def _has_symbols(program: FrameProgram) -> bool:
    """Whether sizes or numbers in it vary: of these numbers Dynamo guards the type, and not the value. Constant ones
    are traced without what Dynamo remembers of others."""
    types = [each.expected[0] for each in program.guards if each.kind == "TYPE_MATCH"]
    return bool(program.shapes) or any(values.type_of(number) in types for number in (1, 1.0))


class _Started(NamedTuple):
    """A frame that was made from a record. code: what Dynamo gets in place of a trace."""

    code: Any


class _Tracing(NamedTuple):
    """A frame that is traced and recorded. tried: the record that would have been used, and is compared instead."""

    frame: FrameName
    key: str
    tried: FrameProgram | None
    record: recording.Recording


def _traced(
    programs: Programs, tracing: _Tracing, returned: Any
) -> tuple[FrameName, str, FrameProgram, str] | None:
    """What is done with a frame that was traced; returns what `checked` is told, if a record was compared."""
    frame, key, tried, made = tracing
    difference = None
    if tried is not None:
        difference = _difference(tried, made, compiled=returned.guarded_code is not None)
    if difference != "" and returned.guarded_code is not None and made.program is not None:
        programs.made(frame, key, made.program, tried if difference else None)
    elif made.reason:
        programs.unfit(frame, made.reason)
    return None if tried is None or difference is None else (frame, key, tried, difference)


T = TypeVar("T")


def _attempt(function: Callable[..., T], *args: Any) -> T | None:
    """None after an error: it must not end the user's call."""
    try:
        return function(*args)
    except Exception:
        _log.warning("torchrelay: a program could not be looked at", exc_info=True)
        return None


def modules_digest(values: Mapping[str, Any]) -> str:
    """What names the modules among a frame's values: classes, and sizes of parameters and buffers, of the first of
    them. Frames of PyTorch's own code, as that of an nn.Sequential, are of one function for all modules, and no record
    of one fits another. '' for modules that cannot be described; they share a place."""
    try:
        found = _described_modules(values)
    except Exception:  # a module or a tensor of a kind of its own must not end the user's call
        return ""
    return hashlib.sha256(repr(found).encode()).hexdigest() if found else ""


def _described_modules(values: Mapping[str, Any]) -> list[Any]:
    waiting = [each for each in reversed(list(values.values())) if issubclass(type(each), torch.nn.Module)]
    found: list[Any] = []
    with torch._C.DisableTorchFunctionSubclass():
        while waiting and len(found) < _MODULES:
            module = waiting.pop()
            kinds = vars(module)
            tensors = [*kinds.get("_parameters", {}).values(), *kinds.get("_buffers", {}).values()]
            sizes = [(each.dtype, *each.size()) for each in tensors if isinstance(each, torch.Tensor)]
            found.append((type(module).__module__, type(module).__qualname__, sizes))
            waiting += reversed([each for each in kinds.get("_modules", {}).values() if each is not None])
    return found


def _unchanged(programs: Programs, frame: FrameName, record: ProgramGraph) -> Callable[..., Any] | str:
    """Stands for a graph that is not called."""
    return programs.changed(frame, record) or _not_called


def _not_called(*args: Any) -> Any:
    raise AssertionError("a graph of a record that is only checked")


def _difference(record: FrameProgram, made: recording.Recording, *, compiled: bool) -> str | None:
    """How a new trace differs from the record, in words; '' if it does not, None if that cannot be known."""
    if not compiled:
        return "Dynamo compiles nothing of the function now"
    if made.program is None:
        return None if made.without_artifact else f"a new trace has no record: {made.reason}"
    from . import comparison

    try:
        return comparison.differing(record, made.program)
    except Exception:
        _log.warning("torchrelay: a program could not be checked", exc_info=True)
        return None


def back_end(call: Mapping[str, Any]) -> tuple[Any, str]:
    """The innermost back end of a frame (arguments of convert_frame._compile), and FrameName.splits."""
    compiler, splits = split_graphs.backend_inside(_innermost(call["compiler_fn"]))
    return _innermost(compiler), splits


def _innermost(compiler: Any) -> Any:
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    return compiler
