"""The record of a frame that was just traced, made before it runs: its values are still those that were traced."""

from __future__ import annotations

import builtins
import contextlib
import functools
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from ....artifact.programs import digests
from ....artifact.programs.records import (
    CodeReference,
    FrameProgram,
    GlobalRecord,
    NotPortable,
    ProgramGraph,
    SplitGraph,
)
from ...distributed import split_graphs
from . import bytecode, generated_code, guards, operators, shapes
from .questions import answers, asked, lookups, optimizers
from .questions.hooks import Hooks
from .sources import SourceWriter

_log = logging.getLogger(__name__)


_UNSEEN = frozenset(
    {
        *("__annotations__", "annotation", "get_annotations", "get_type_hints", "return_annotation"),
        *("co_filename", "co_firstlineno", "co_lines", "co_positions", "currentframe", "getsource"),
        *("__doc__", "dir", "getmembers"),
    }
)
"""Names by which a program reads what Dynamo has no guards on in each version, and digests do not cover."""


class _WithoutArtifact(NotPortable):
    """A graph was compiled locally."""


class Recording:
    """The recording of one frame. program: its record, once it is traced; or the reason why there is none."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        self.call = call
        self.kernels = operators.kernels()
        self.graphs: dict[int, tuple[Callable[..., Any], ProgramGraph, Iterable[torch.Tensor]]] = {}
        """Graphs by the function's id, with the function, so that no other one gets that id; and the tensors that they
        hold."""
        self.questions: list[tuple[Any, asked.Asked]] = []
        """Questions with the tracing context: Dynamo may trace a frame several times."""
        self.code: Mapping[str, types.CodeType] = {}
        """Code of the graphs' artifacts (generated_code.collecting)."""
        self.program: FrameProgram | None = None
        self.reason = ""
        self.without_artifact = False
        """Whether the reason is that a graph was not served: this says nothing of the program."""


class _Current(threading.local):
    recording: Recording | None = None


_current = _Current()


def active() -> bool:
    """Whether this thread traces a frame that is recorded."""
    return _current.recording is not None


@contextlib.contextmanager
def recorded(call: Mapping[str, Any]) -> Iterator[Recording]:
    """Record the frame that is traced in the block. call: the arguments of convert_frame._compile, by name."""
    before, _current.recording = _current.recording, Recording(call)
    try:
        with generated_code.collecting() as _current.recording.code:
            yield _current.recording
    finally:
        _current.recording = before


def note_graph(
    compiled: Callable[..., Any], record: ProgramGraph, tensors: Iterable[torch.Tensor] = ()
) -> None:
    """The back end answers with this function, of an artifact, for a graph of the frame that is being traced. record:
    yet without a name. tensors: what the artifact is given after the graph's inputs."""
    if _current.recording is not None:
        _current.recording.graphs[id(compiled)] = compiled, record, tensors


def note_asked(question: asked.Asked) -> None:
    """Tracing asks what no guard asks again."""
    if _current.recording is not None:
        _current.recording.questions.append((torch._guards.TracingContext.try_get(), question))


@functools.cache
def observe() -> None:
    """Begin to see what Dynamo traces (convert_frame.compile_frame) and what it asks, once for this process: what is
    seen twice would be noted twice, and nothing is seen while no frame is recorded."""
    from torch._dynamo import convert_frame

    with contextlib.ExitStack() as undo:
        hooks = Hooks(undo, note_asked, active)
        hooks.observe(convert_frame, "compile_frame", after=_write)
        lookups.observe(hooks)
        answers.observe(hooks)
        undo.pop_all()


def _write(output: Any, *_: Any, **__: Any) -> None:
    """Make the record. output: what convert_frame.compile_frame returned."""
    recording = _current.recording
    if recording is None:
        return
    try:
        with digests.snapshot(), digests.meeting() as met:
            recording.program, recording.reason = _program(recording, output, met), ""
    except NotPortable as error:
        recording.reason, recording.without_artifact = str(error), isinstance(error, _WithoutArtifact)
    except Exception as error:  # a value that cannot be looked at
        recording.reason = f"{type(error).__name__}: {error}"
        _log.debug("torchrelay: no program", exc_info=True)


def _program(recording: Recording, output: Any, met: digests.Met) -> FrameProgram:
    """The record of a frame that was traced just now and has not run yet. Raises NotPortable."""
    graph = output.tracer_output.output_graph
    if graph.torch_function_mode_stack or graph.functorch_layers or graph.dual_level >= 0:
        raise NotPortable("a transform or mode that is active around the call")
    from torch._dynamo.source import is_from_optimizer_source

    call = recording.call
    modules = _modules_by_file()
    for code in graph.traced_code:
        named = digests.names_in(code) & _UNSEEN
        if named and not _is_library(modules.get(code.co_filename, code.co_filename)):
            raise NotPortable(f"a function that reads {', '.join(sorted(named))}")
    operators.check_all()
    scope = call["globals"]
    digests.meet_module(scope.get("__name__"))
    sources = SourceWriter()
    live = guards.Frame(call["locals"], scope)
    optimizer: list[Any] = []
    if any(name.startswith(bytecode.OPTIMIZER) for name in graph.installed_globals):
        step = optimizers.Step(call)
        optimizer, live.numbers = step.described(), step.numbers
    ordered = sorted(graph.guards, key=type(next(iter(graph.guards))).sort_key)
    heard = [question for context, question in recording.questions if context is graph.tracing_context]
    if optimizer:  # its parts are described
        of = (getattr(getattr(each, "source", None), "base", None) for each in heard)
        heard = [each for each, base in zip(heard, of, strict=True) if not is_from_optimizer_source(base)]
    written = guards.write([*ordered, *asked.dropped(heard)], live, sources)
    records, compared = written[: len(ordered)], written[len(ordered) :]
    compiled, constants = bytecode.write(output.bytecode, scope)
    graphs, splits = _graphs(recording, graph, scope, live)
    traced = [each for each in graph.traced_code if each is not call["code"]]
    references = _references(traced, modules, live, ordered)
    questions = asked.write(heard, live, sources)
    same_inputs, overlaps = _aliases(graph.aotautograd_guards, sources)
    return FrameProgram(
        bytecode=compiled,
        constants=constants,
        key_order=[sources.add(source) for source in graph.guard_on_key_order],
        sizes=guards.write_sizes(graph.input_source_to_sizes_strides, sources),
        shapes=shapes.write(graph, sources),
        automatic=shapes.remembered(call),
        optimizer=optimizer,
        same_inputs=same_inputs,
        overlaps=overlaps,
        builtins=graph.name_of_builtins_dict_key_in_fglobals or "",
        globals=_globals(graph, call, references),
        graphs=graphs,
        splits=splits,
        code=generated_code.write(recording.code),
        traced=references,
        guards=records,
        compared=compared,
        asked=questions,
        registered=met.registered(),
        kernels=recording.kernels,
        sources=sources.records,
    )


def _aliases(
    guards: Sequence[Any], sources: SourceWriter
) -> tuple[list[tuple[int, int]], list[tuple[list[int], list[int]]]]:
    """FrameProgram.same_inputs and .overlaps."""
    same, overlaps = [], []
    for guard in guards:
        match type(guard).__name__:
            case "DuplicateInputs":
                same.append((sources.add(guard.input_source_a), sources.add(guard.input_source_b)))
            case "StorageOverlap":
                overlaps.append(
                    (
                        [sources.add(source) for source in guard.overlapping_sources],
                        [sources.add(source) for source in guard.non_overlapping_sources],
                    )
                )
            case name:
                raise NotPortable(f"an assumption of AOTAutograd, {name}")
    return same, overlaps


def _graphs(
    recording: Recording, graph: Any, scope: Mapping[str, Any], live: guards.Frame
) -> tuple[list[ProgramGraph], list[SplitGraph]]:
    found: list[ProgramGraph] = []
    splits: list[SplitGraph] = []

    def add(answer: Any, name: str) -> str:
        noted = recording.graphs.get(id(answer))
        if noted is None:
            raise _WithoutArtifact("a graph that has no artifact")
        tensors = [live.number(each) for each in noted[2]]
        found.append(msgspec.structs.replace(noted[1], name=name, tensors=tensors))
        return name

    for name in sorted(name for name in graph.installed_globals if name.startswith(bytecode.GRAPH)):
        answer = torch._dynamo.eval_frame.innermost_fn(scope[name])
        split = split_graphs.split_graph(answer)
        if split is None:
            add(answer, name)
        else:
            splits.append(split_graphs.write(name, split, lambda part: add(part, f"{name}/{len(found)}")))  # noqa: B023
    return found, splits


def _globals(graph: Any, call: Mapping[str, Any], traced: Sequence[CodeReference]) -> list[GlobalRecord]:
    scope = call["globals"]
    found = [GlobalRecord(alias, module) for alias, module in sorted(graph.import_sources.items())]
    for name in sorted(graph.installed_globals):
        value: Any = scope.get(name)
        if name.startswith(bytecode.GRAPH):
            continue
        if name == graph.name_of_builtins_dict_key_in_fglobals:
            continue
        if isinstance(value, types.ModuleType):
            found.append(GlobalRecord(name, value.__name__))
        elif name.startswith(bytecode.OPTIMIZER) and value() is call["locals"]["self"]:
            found.append(GlobalRecord(name))
        elif isinstance(value, types.FunctionType | types.CodeType) and name.startswith(bytecode.FUNCTIONS):
            found.append(GlobalRecord(name, "", *bytecode.write(_resumed(value, scope), scope)))
        elif (function := getattr(value, "__name__", "")) and vars(builtins).get(function) is value:
            found.append(GlobalRecord(name, builtins.__name__, function=function))
        elif owner := next((e for e in traced if bytecode.scope_of(e.module, e.name) is value), None):
            found.append(GlobalRecord(name, owner.module, function=owner.name))  # of a named tuple's __new__
        else:
            raise NotPortable(f"a global of Dynamo's that is a {type(value).__name__}")
    return found


def _resumed(value: types.FunctionType | types.CodeType, scope: Mapping[str, Any]) -> types.CodeType:
    """The code of a function after a graph break. One with a closure is made by another function of its cells
    (OutputGraph.install_resume_function_global); before PyTorch 2.15 by the bytecode, which has its code."""
    if isinstance(value, types.CodeType):
        return value
    code: Any = value.__code__
    globals_: Any = value.__globals__
    if value.__closure__:
        cells = dict(zip(code.co_freevars, (cell.cell_contents for cell in value.__closure__), strict=True))
        code, globals_ = cells.get("code"), cells.get("f_globals")
    if not isinstance(code, types.CodeType) or globals_ is not scope:
        raise NotPortable("a function after a graph break that is in another module")
    return code


def _references(
    traced: Sequence[types.CodeType], modules: Mapping[str, str], live: guards.Frame, ordered: Sequence[Any]
) -> list[CodeReference]:
    """Where each function that was traced is found. Raises NotPortable for one that is found nowhere."""
    found: dict[tuple[str, str], CodeReference] = {}
    classes: list[type] | None = None
    for code in {id(each): each for each in traced}.values():  # equal code may be of functions in two places
        name = code.co_qualname.partition(".<locals>")[0]
        module = modules.get(code.co_filename, "")
        if code.co_filename.startswith("<frozen "):
            module = code.co_filename.removeprefix("<frozen ").rstrip(">")
        reference = _reference(module, name, code)
        if (
            reference is None
        ):  # made by exec, as dataclasses and named tuples do: of a class that a guard names
            classes = _classes(live, ordered) if classes is None else classes
            methods = (code.co_name, "__new__")  # that of a named tuple is a lambda
            places = (
                (kind.__module__, f"{kind.__qualname__}.{each}") for kind in classes for each in methods
            )
            made = (_reference(module, name, code) for module, name in places)
            reference = next((each for each in made if each is not None), None)
        if reference is None and _is_library(module):
            continue  # deleted after its use; it is that of the version, which is in the key
        if reference is None:
            raise NotPortable(f"a function that its name does not find, {module or code.co_filename}.{name}")
        found[reference.module, reference.name] = reference
    return list(found.values())


def _reference(module: str, name: str, code: types.CodeType) -> CodeReference | None:
    try:
        place = digests.resolve(module, name)
        functions = list(digests.reached_functions(place))
        every = [each for function in functions for each in digests.nested(function.__code__)]
        # Dynamo takes code inside a function from the first of equal functions that it has seen.
        if not any(code is each or (code == each and not code.co_filename.startswith("<")) for each in every):
            return None
        digests.meet_module(module)
        return CodeReference(module, name, digests.function_digest(place))
    except (LookupError, ValueError):
        return None


def _is_library(module: str) -> bool:
    return module.removeprefix("<frozen ").rstrip(">").partition(".")[0] in digests.LIBRARIES


def _modules_by_file() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            found.setdefault(file, name)
    return found


def _classes(live: guards.Frame, ordered: Sequence[Any]) -> list[type]:
    found: dict[type, None] = {}
    for guard in ordered:
        with contextlib.suppress(Exception):
            value = live.value(guard.originating_source)
            found[value if isinstance(value, type) else type(value)] = None
    return list(found)
