"""A frame made from a record, without tracing: its bytecode, and Dynamo's own guards on the live frame."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ....artifact.programs import digests
from ....artifact.programs.records import CodeReference, FrameProgram, NotPortable, ProgramGraph
from ...distributed import split_graphs
from .. import guard_building
from . import bytecode, generated_code, guards, operators, shapes
from .questions import asked, optimizers
from .sources import read


def from_records(
    variants: Iterable[FrameProgram],
    graph: Callable[[ProgramGraph], Callable[..., Any] | str],
    call: Mapping[str, Any],
    timed: Callable[[Any], AbstractContextManager[None]],
    uses: bool,
) -> tuple[Any, FrameProgram | None, str]:
    """What convert_frame._compile returns after tracing, the record it is of, and ''; or None, None and why the last of
    the records does not fit ('': there is none). call: the arguments of `_compile`, by name. timed:
    frames.Programs.timed. uses: the frame begins so; else it is traced. Raises whatever `variants` raises."""
    reason = ""
    if _at_limit(call):
        return None, None, ""
    live = guards.Frame(call["locals"], call["globals"])
    checked: set[str] = set()
    with digests.snapshot(), contextlib.ExitStack() as undo:
        begun = functools.cache(lambda: optimizers.Step(call).begun(undo))
        for variant in variants:
            try:
                with digests.meeting() as met:
                    digests.meet_module(call["globals"].get("__name__"))
                    with timed("digests"):
                        if variant.kernels not in checked:
                            operators.check_new(variant.kernels)
                            checked.add(variant.kernels)
                        _check(_changed(variant.traced))
                    made = _from_record(variant, graph, live, call, timed, met, begun)
                if uses:
                    undo.pop_all()
                return made, variant, ""
            except (NotPortable, _Differs) as error:
                reason = str(error)
            except Exception as error:  # a module that is not imported here, a record that is damaged
                reason = f"{type(error).__name__}: {error}"
    return None, None, reason


def guard_filter(call: Mapping[str, Any]) -> Any:
    """What the user has given as guard_filter_fn, or None."""
    return getattr(call["hooks"], "guard_filter_fn", None)


class _Differs(Exception):
    """A record does not fit; the text says why."""


def _check(reason: str | None) -> None:
    if reason:
        raise _Differs(reason)


def _from_record(
    variant: FrameProgram,
    graph: Callable[[ProgramGraph], Callable[..., Any] | str],
    live: guards.Frame,
    call: Mapping[str, Any],
    timed: Callable[[Any], AbstractContextManager[None]],
    met: digests.Met,
    begun: Callable[[], optimizers.Step],
) -> Any:
    """Raises _Differs, and other errors for what cannot be looked at."""
    scope = _Globals(variant, call)
    try:
        with timed("guards"):
            sources = read(variant.sources, scope.renamed)
            own: Sequence[torch.Tensor] = ()
            if variant.optimizer:
                if (step := begun()).described() != variant.optimizer:
                    raise _Differs("the optimizer is not what was traced")
                own, live.numbers = step.tensors, step.numbers
            _check(guards.differing([*variant.guards, *variant.compared], sources, live))
            _check(_sizes(variant, sources, live))
            _check(shapes.differing(variant.shapes, sources, live))
            _check(asked.differing(variant.asked, sources, live))
            codes = _codes(variant, call["globals"])
            _check(_registered(variant, met))
        with generated_code.known(variant.code):
            callables: dict[str, Any] = {
                each.name: _holding(graph(each), [own[at] for at in each.tensors]) for each in variant.graphs
            }
        _check(next((each for each in callables.values() if isinstance(each, str)), None))
        for split in variant.splits:
            callables[split.name] = split_graphs.build(split, callables)
        with timed("install"):
            return _guarded(variant, codes, sources, live, callables, scope, call)
    finally:
        scope.close()


def _holding(graph: Callable[..., Any] | str, tensors: Sequence[torch.Tensor]) -> Callable[..., Any] | str:
    """The graph with the tensors that it holds (CapturedGraph.bind)."""
    if isinstance(graph, str) or not tensors:
        return graph
    return lambda *args: graph(*args, *tensors)


class _Globals:
    """The global variables of a record, in a frame's module under names of this process, until `close`."""

    def __init__(self, variant: FrameProgram, call: Mapping[str, Any]) -> None:
        """Raises LookupError for a module that is not imported, or an alias that is another variable."""
        from torch._dynamo.bytecode_transformation import unique_id

        self.scope = scope = call["globals"]
        self.renamed = {name: unique_id(bytecode.GRAPH, with_uuid=True) for name in _called(variant)}
        self._hooks: list[Any] = []
        self._keeps = False
        for each in variant.globals:
            if each.name.startswith(bytecode.ALIAS):
                module = sys.modules[each.module]
                if scope.setdefault(each.name, module) is not module:
                    raise LookupError(f"a global variable {each.name}")
            else:
                prefixes = bytecode.FUNCTIONS if each.code else ()
                prefix = next(filter(each.name.startswith, prefixes), bytecode.VALUE)
                self.renamed[each.name] = unique_id(prefix)
                if each.function:
                    self.add(each.name, bytecode.global_of(each.module, each.function))
                elif each.module:
                    self.add(each.name, sys.modules[each.module])
                elif not each.code:
                    self.add(each.name, weakref.ref(call["locals"]["self"]))
        if variant.builtins:
            self.renamed[variant.builtins] = unique_id(bytecode.BUILTINS)
            found = scope["__builtins__"]
            self.add(variant.builtins, found if isinstance(found, dict) else vars(found))

    def add(self, name: str, value: Any) -> None:
        """Under the name that stands for `name` here."""
        from torch._dynamo.utils import CleanupHook

        self._hooks.append(CleanupHook.create(self.scope, self.renamed[name], value))

    def live_as_long_as(self, code: types.CodeType) -> None:
        from torch._dynamo.utils import CleanupManager

        CleanupManager.instance[code] = self._hooks
        self._keeps = True

    def close(self) -> None:
        """Takes the variables away again, unless bytecode needs them."""
        if not self._keeps:
            for hook in self._hooks:
                hook()


def _at_limit(call: Mapping[str, Any]) -> bool:
    from torch._dynamo.cache_size import exceeds_recompile_limit

    return bool(exceeds_recompile_limit(call["cache_size"], call["compile_id"])[0])


def _changed(traced: Sequence[CodeReference]) -> str:
    for each in traced:
        digests.meet_module(each.module)
        try:
            same = digests.function_digest(digests.resolve(each.module, each.name)) == each.digest
        except (LookupError, ValueError):
            same = False
        if not same:
            return f"the function {each.module}.{each.name} is not what was traced"
    return ""


def _registered(variant: FrameProgram, met: digests.Met) -> str | None:
    now = met.registered()
    for each in [*now, *variant.registered]:
        if each not in now or each not in variant.registered:
            return f"what is registered with {each[0]} is not what was traced"
    return None


def _sizes(variant: FrameProgram, sources: Sequence[Any], live: guards.Frame) -> str | None:
    for record in variant.sizes:
        try:
            value = live.value(sources[record.source])
        except Exception as error:
            return f"{sources[record.source].name}: {type(error).__name__}: {error}"
        if isinstance(value, torch.Tensor) and guards.sizes_differ(record, value):
            return f"{sources[record.source].name} has other sizes than what was traced"
    return None


def _codes(variant: FrameProgram, scope: Mapping[str, Any]) -> dict[str, types.CodeType]:
    """The bytecode of the function under '', those of functions after graph breaks under their names."""
    resumed = {
        each.name: bytecode.read(each.code, each.constants, scope) for each in variant.globals if each.code
    }
    return {"": bytecode.read(variant.bytecode, variant.constants, scope), **resumed}


def _guarded(
    variant: FrameProgram,
    codes: Mapping[str, types.CodeType],
    sources: Sequence[Any],
    live: guards.Frame,
    callables: Mapping[str, Any],
    scope: _Globals,
    call: Mapping[str, Any],
) -> Any:
    from torch._dynamo import convert_frame
    from torch._dynamo.types import GuardedCode, wrap_guarded_code

    code, compile_id = call["code"], call["compile_id"]
    compiled = _renamed(codes[""], scope.renamed).replace(co_filename=code.co_filename)
    _check_shape(code, compiled)
    manager = _check_function(variant, sources, live, scope, call)
    disable: Any = torch._dynamo.disable
    for name in _called(variant):
        scope.add(name, disable(callables[name], reason="a compiled graph"))
    for each in variant.globals:
        if each.code:
            resumed = _shared(code, _renamed(codes[each.name], scope.renamed))
            _skip_comprehensions(resumed)
            scope.add(each.name, _function(resumed, scope.scope, scope.renamed[each.name]))
    _skip_comprehensions(compiled)
    internals: Any = convert_frame
    internals.orig_code_map[compiled] = code
    internals.output_codes.add(compiled)
    scope.live_as_long_as(compiled)
    return wrap_guarded_code(
        GuardedCode(compiled, manager, compile_id, f"Torch-Compiled Region: {compile_id}")
    )


def _shared(parent: types.CodeType, code: types.CodeType) -> types.CodeType:
    """The code of a function after a graph break, one for all variants of `parent`, as tracing makes it: they share
    what it is compiled to, and Dynamo's limit of recompiles."""
    from torch._dynamo.resume_execution import ContinueExecutionCache

    cache: Any = ContinueExecutionCache.cache
    if parent not in cache:
        cache[parent] = {}
    try:
        return cache[parent].setdefault(("torchrelay", code), code)  # type: ignore[no-any-return]
    except TypeError:  # a constant without a hash, as the frame's global variables
        return code


def _skip_comprehensions(code: types.CodeType) -> None:
    from torch._dynamo.eval_frame import skip_code

    for each in digests.nested(code):
        if each.co_name.startswith(bytecode.COMPREHENSION):
            skip_code(each)


def _called(variant: FrameProgram) -> list[str]:
    """Names of the graphs that the bytecode calls: not of those that split graphs call."""
    parts = {step.graph for split in variant.splits for step in split.steps}
    found = [each.name for each in variant.graphs] + [each.name for each in variant.splits]
    return [name for name in found if name not in parts]


def _function(code: types.CodeType, scope: dict[str, Any], name: str) -> Any:
    """A function after a graph break; or, if it has a closure, what makes it of its cells."""
    from torch._dynamo.eval_frame import skip_code

    if not code.co_freevars:
        return types.FunctionType(code, scope, name)

    def made(closure: tuple[types.CellType, ...]) -> types.FunctionType:
        return types.FunctionType(code, scope, name, None, closure)

    skip_code(made.__code__)  # only what it makes is the program's
    return made


def _renamed(code: types.CodeType, renamed: Mapping[str, str]) -> types.CodeType:
    return code.replace(co_names=tuple(renamed.get(name, name) for name in code.co_names))


def _check_shape(code: types.CodeType, compiled: types.CodeType) -> None:
    """Raises ValueError unless `compiled` takes the arguments and variables of the frame's own code."""
    flags = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    count = code.co_argcount + code.co_kwonlyargcount + (code.co_flags & flags).bit_count()
    for one, other in (
        (code.co_varnames[:count], compiled.co_varnames[:count]),
        (code.co_freevars, compiled.co_freevars),
        (code.co_cellvars, compiled.co_cellvars),
    ):
        if one != other:
            raise ValueError("bytecode of another function")


def _check_function(
    variant: FrameProgram,
    sources: Sequence[Any],
    live: guards.Frame,
    scope: _Globals,
    call: Mapping[str, Any],
) -> Any:
    """Dynamo's own guards on the live frame. Raises AssertionError if they do not hold for it."""
    from torch import _guards
    from torch._C._dynamo.guards import GlobalStateGuard
    from torch._dynamo.guards import CheckFunctionManager, ShapeCodeParts
    from torch._dynamo.output_graph import OutputGraphGuardsState
    from torch._dynamo.utils import chromium_event_timed, get_metrics_context
    from torch.utils import _device

    # Each once, as recorded. A GuardsSet would hash each of them, and note where it was made.
    kept: Any = list(guards.make(variant.guards, sources, live))
    state = OutputGraphGuardsState(
        local_scope=dict(call["locals"]),
        global_scope=call["globals"],
        torch_function_mode_stack=[],
        guard_on_key_order={sources[position] for position in variant.key_order},
        input_source_to_sizes_strides={
            sources[each.source]: {"size": tuple(each.size), "stride": tuple(each.stride)}
            for each in variant.sizes
        },
        dual_level=-1,
        functorch_layers=[],
        current_device=_device.CURRENT_DEVICE,
        global_state_guard=GlobalStateGuard(),
        _guards=kept,
        _aotautograd_guards=[
            *(_guards.DuplicateInputs(sources[one], sources[other]) for one, other in variant.same_inputs),
            *(
                _guards.StorageOverlap([sources[each] for each in some], [sources[each] for each in others])
                for some, others in variant.overlaps
            ),
        ],
        name_of_builtins_dict_key_in_fglobals=scope.renamed.get(variant.builtins),
    )
    hooks = call["hooks"]
    parts: Any = ShapeCodeParts
    sizes = _Sizes(shapes.code(variant.shapes, sources))
    conditions = parts(
        python_code_parts=sizes,
        verbose_code_parts=sizes,
        cpp_code_parts=None,
        python_fallback=True,
        shape_env_sources=[],
    )
    check: Any = CheckFunctionManager
    entries = call.get("cache_entries", call.get("cache_entry"))
    with (
        _guards.compile_context(_guards.CompileContext(call["compile_id"])),
        chromium_event_timed("dynamo", reset_event_log_on_exit=True),
        get_metrics_context(),
        guard_building.values_from(live.value),
    ):
        manager = check(
            call["code"],
            state,
            entries,
            hooks.guard_fail_fn if hooks else None,
            guard_filter(call),
            shape_code_parts=conditions,
        )
    return manager.guard_manager


class _Sizes:
    """Dynamo's _ShapeGuardsHelper: conditions on symbolic sizes, in Python."""

    def __init__(self, exprs: list[str]) -> None:
        self.exprs = exprs
