"""Frames of Dynamo's: recorded after they were traced, and made again from a record without tracing.

`install` takes the place of two functions of torch._dynamo.convert_frame: `_compile`, which is called for a frame that
has no compiled code that fits, and `compile_frame`, which traces it. What `_compile` returns for a record is what it
returns after tracing: bytecode with guards. So Dynamo keeps it, checks it at each call, and counts recompiles as ever.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from msgspec import Struct

from ....artifact.programs import digests
from ....artifact.programs.records import FrameProgram, ProgramGraph
from ...distributed import process_groups, split_graphs
from .. import guard_building
from . import asked, recording, replay

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

    def made(self, frame: FrameName, key: str, program: FrameProgram) -> None:
        """A frame was traced, and this is its record."""

    def unfit(self, frame: FrameName, reason: str) -> None:
        """A frame was traced and has no record, or has records that do not fit."""

    def used(self, frame: FrameName) -> None:
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


def install(programs: Programs) -> Callable[[], None]:
    """Begin to record frames and to make them from records; returns what ends it."""
    from torch._dynamo import convert_frame

    compile_frame, compile_ = convert_frame.compile_frame, convert_frame._compile
    parameters = inspect.signature(compile_)

    @functools.wraps(compile_frame)
    def traced(*args: Any, **kwargs: Any) -> Any:
        output = compile_frame(*args, **kwargs)
        if recording.active():
            recording.write(output)
        return output

    @functools.wraps(compile_)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        compiler, splits = split_graphs.backend_inside(_innermost(given["compiler_fn"]))
        compiler = _innermost(compiler)
        if given["export"] or given.get("package") is not None or not programs.wants(compiler):
            return compile_(*args, **kwargs)
        frame = FrameName(
            str(given["globals"].get("__name__")),
            given["code"].co_qualname,
            digests.frame_digest(given["code"], given["globals"]),
            bool(given["one_graph"]),
            compiler,
            splits,
        )
        with programs.starting(frame):
            return started(frame, given, args, kwargs)

    def started(
        frame: FrameName, given: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        reason = ""
        if process_groups.trace_together():
            programs.unfit(frame, "Dynamo's ranks trace together, because of enable_compiler_collectives")
            return compile_(*args, **kwargs)
        try:
            key = programs.key(frame)
        except Exception as error:  # a process group that ends meanwhile
            programs.unfit(frame, f"its records have no key: {type(error).__name__}: {error}")
            return compile_(*args, **kwargs)
        try:
            with programs.uninterrupted():
                found, reason = replay.from_records(
                    programs.find(key), functools.partial(programs.graph, frame), given, programs.timed
                )
            if found is not None:
                programs.used(frame)
                return found
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason:
            programs.unfit(frame, reason)
        with recording.recorded(given) as made:
            returned = compile_(*args, **kwargs)
        if returned.guarded_code is not None and made.program is not None:
            programs.made(frame, key, made.program)
        elif made.reason:
            programs.unfit(frame, made.reason)
        return returned

    convert_frame.compile_frame, convert_frame._compile = traced, compiled
    make_guards_as_before = guard_building.install()
    ask_no_more = asked.observe(recording.note_asked)

    def uninstall() -> None:
        ask_no_more()
        make_guards_as_before()
        if convert_frame._compile is compiled:
            convert_frame._compile = compile_
        if convert_frame.compile_frame is traced:
            convert_frame.compile_frame = compile_frame

    return uninstall


def _innermost(compiler: Any) -> Any:
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    return compiler
