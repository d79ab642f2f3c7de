"""The only file that touches private PyTorch APIs: one function for each, with its upstream home.

Written against torch 2.11 to 2.13. A function that stops working on a new version is mended here and nowhere
else. `torch` is imported at the top: a module that must not import torch must not import this one.
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import pickle
import re
import resource
import secrets
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import sympy
import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from . import triton_store, tuning
from .ahead import Copy
from .candidates import Building
from .configurations import Configuration, configuration_of, slowest_first
from .descents import Descents, PutOff
from .errors import Unsupported
from .kernel_store import Exchange
from .triton_store import Winner

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "ShapeEnv",
]
"""Types that other modules name; everything else here is used by its module's name."""

LOG_API_USAGE: Any = torch._C._log_api_usage_once
"""Counts API usage and computes nothing; some libraries' graphs hold calls of it."""

AOT_SERIALIZABLE: dict[str, Any] = {
    "strict_autograd_cache": True,
    "bundled_autograd_cache": True,
    "force_non_lazy_backward_lowering": True,
    "bypass_autograd_cache_key": True,
    "enable_autograd_cache": True,
}
"""torch._functorch.config under which compile_fx returns a callable that can be serialized, backward included
(as torch/_dynamo/aot_compile.py sets them; the cache key is ours, so theirs may be a nonce)."""

STATIC_USER_KERNELS: dict[str, Any] = {"static_launch_user_defined_triton_kernels": True}
"""torch._inductor.config under which user-written Triton kernels are saved with their binaries, as its own are."""


# --- compile side ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def tracing(fake_mode: Any) -> Iterator[Any]:
    """torch._guards: a TracingContext and a CompileContext, as Dynamo has them around a back end."""
    from torch._guards import CompileContext, CompileId, TracingContext, compile_context
    from torch._guards import tracing as upstream

    context = TracingContext(fake_mode)
    compile_id = CompileId(frame_id=0, frame_compile_id=0)
    with compile_context(CompileContext(compile_id)), upstream(context):
        yield context


def python_dispatcher() -> contextlib.AbstractContextManager[Any]:
    """torch._dispatch.python.enable_python_dispatcher, under which Dynamo runs nodes on fake tensors: operators whose
    C++ takes no symbolic sizes are decomposed in Python."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def sym_expr(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> sympy.Expr:
    """The expression that a symbolic value is (SymNode.expr)."""
    expression: sympy.Expr = value.node.expr
    return expression


def sym_symbol(value: Any) -> sympy.Symbol | None:
    """The symbol that a symbolic integer was made for (SymNode._expr), before replacements; else None."""
    symbol = value.node._expr if isinstance(value, torch.SymInt) else None
    return symbol if isinstance(symbol, sympy.Symbol) else None


def sym_env(value: torch.SymInt) -> ShapeEnv:
    """The shape environment a symbolic integer belongs to (SymNode.shape_env)."""
    env: ShapeEnv = value.node.shape_env
    return env


def sym_hint(value: torch.SymFloat) -> float:
    """The example value of a symbolic float (SymNode.hint)."""
    return float(value.node.hint)


def aot_config(patches: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Set torch._functorch.config entries inside a block."""
    manager: contextlib.AbstractContextManager[Any] = torch._functorch.config.patch(dict(patches))
    return manager


def changes_its_inputs(target: Any) -> bool:
    """Whether an operator's schema says that it writes to an argument."""
    return isinstance(target, OpOverload) and bool(target._schema.is_mutable)


def user_kernel(index: int) -> Any:
    """A user-written Triton kernel of this process, by what a call of it in a graph says
    (torch._higher_order_ops.triton_kernel_wrap.kernel_side_table)."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.get_kernel(index)


def user_kernel_constants(index: int) -> dict[str, Any]:
    """The constant arguments of such a call (kernel_side_table.get_constant_args)."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return dict(kernel_side_table.get_constant_args(index))


def register_user_kernel(kernel: Any) -> int:
    """Make a Triton kernel one that graphs of this process may call; the same one twice is one
    (kernel_side_table.add_kernel)."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.add_kernel(kernel)


def register_user_kernel_constants(constants: Mapping[str, Any]) -> int:
    """kernel_side_table.add_constant_args."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.add_constant_args(dict(constants))


@contextlib.contextmanager
def _without_user_kernels() -> Iterator[None]:
    """Generated code holds user-written kernels as source, so what is saved need not hold (module, name) of each."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    with _replaced(kernel_side_table, "id_to_kernel", {}), _replaced(kernel_side_table, "constant_args", {}):
        yield


def describe_as_dynamo(
    gm: torch.fx.GraphModule, placeholders: Sequence[tuple[torch.fx.Node, Any, str]]
) -> None:
    """Attach what Dynamo attaches to a graph and AOTAutograd looks for: a source for each placeholder
    (node, example value, static-address mark), a compile id, and names of parameters (none)."""
    from torch._dynamo.source import LocalSource
    from torch._guards import CompileId

    for position, (node, value, static_address) in enumerate(placeholders):
        node._dynamo_source = LocalSource(f"input_{position}")
        node.meta["example_value"] = value
        if static_address:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": static_address}
    gm.meta["dynamo_compile_id"] = CompileId(frame_id=0, frame_compile_id=0)
    gm._param_name_to_source = {}  # type: ignore[assignment]


def new_shape_env() -> ShapeEnv:
    """torch.fx.experimental.symbolic_shapes.ShapeEnv without duck shaping: the client did it already."""
    return ShapeEnv(duck_shape=False)


def new_symint(env: ShapeEnv, name: str, hint: int, lower: int, upper: int | None) -> torch.SymInt:
    """A backed symbolic integer of `env` with that hint and range (ShapeEnv.create_symbol, create_symintnode)."""
    from torch._dynamo.source import LocalSource
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    source = LocalSource(name)
    symbol = env.create_symbol(
        hint,
        source,
        dynamic_dim=DimDynamic.DYNAMIC,
        positive=True if lower > 0 else None,
        do_not_specialize_zero_one=True,
    )
    if isinstance(symbol, sympy.Symbol):
        env.var_to_range[symbol] = ValueRanges(lower, int_oo if upper is None else upper)
    node = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(node, torch.SymInt)
    return node


def new_symfloat(env: ShapeEnv, name: str, hint: float) -> torch.SymFloat:
    """A backed symbolic float (ShapeEnv.create_unspecified_symbol, create_symfloatnode)."""
    from torch._dynamo.source import LocalSource

    source = LocalSource(name)
    symbol = env.create_unspecified_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    node = env.create_symfloatnode(symbol, hint=hint, source=source)
    assert isinstance(node, torch.SymFloat)
    return node


def symfloat_name(value: torch.SymFloat) -> str | None:
    """The symbol a symbolic float is, by name; None for an expression."""
    symbol = value.node._expr
    return symbol.name if isinstance(symbol, sympy.Symbol) else None


def item_memo(tensor: torch.Tensor) -> Any:
    """FakeTensor.item_memo: a symbolic float, for a tensor that stands for a Python number; else None."""
    return getattr(tensor, "item_memo", None)


def must_specialize(error: BaseException) -> frozenset[str] | None:
    """Names of the symbolic floats that cannot stay symbolic, if that is what `error` says; else None.

    torch._dynamo.exc.TensorifyScalarRestartAnalysis and torch._dynamo.symbolic_convert.TensorifyState.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    if not isinstance(error, TensorifyScalarRestartAnalysis):
        return None
    return frozenset(TensorifyState.force_specializations)


def cpp_compiler_output(error: BaseException) -> str | None:
    """What the C++ compiler printed, if `error` says that it failed; else None. torch._inductor.exc.CppCompileError."""
    from torch._inductor.exc import CppCompileError

    return str(error.output) if isinstance(error, CppCompileError) else None


def trace_again(specialized: Iterable[str]) -> BaseException:
    """The exception that makes Dynamo trace its frame again, with these symbolic floats as constants."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    for name in specialized:
        TensorifyState.specialize(name)
    return TensorifyScalarRestartAnalysis()


def symint_of(env: ShapeEnv, symbol: sympy.Symbol) -> torch.SymInt:
    """The symbolic integer that stands for a symbol `env` already has (ShapeEnv.create_symintnode)."""
    node = env.create_symintnode(symbol, hint=symbol_hint(env, symbol))
    assert isinstance(node, torch.SymInt)
    return node


def symbol_hint(env: ShapeEnv, symbol: sympy.Symbol) -> int | None:
    """The example value of a backed symbol, None for an unbacked one (ShapeEnv.backed_var_to_val, var_to_val)."""
    table = getattr(env, "backed_var_to_val", None)
    if table is None:
        table = env.var_to_val
    value = table.get(symbol)
    return None if value is None else int(value)


def symbol_range(env: ShapeEnv, symbol: sympy.Symbol) -> tuple[int, int | None]:
    """(lower, upper) of a symbol; upper None means unbounded (ShapeEnv.var_to_range)."""
    bounds = env.var_to_range[symbol]
    limit = 1 << 62
    lower = int(bounds.lower) if bounds.lower.is_finite and abs(bounds.lower) < limit else -limit
    upper = int(bounds.upper) if bounds.upper.is_finite and bounds.upper < limit else None
    return lower, upper


def guard_expressions(env: ShapeEnv) -> list[sympy.Expr]:
    """What a shape environment has assumed so far, in order (ShapeEnv.guards)."""
    return [guard.expr for guard in env.guards]


def has_symbols(mode: FakeTensorMode) -> bool:
    """Whether a mode's shape environment has any symbol (ShapeEnv.var_to_range), made from data or given."""
    return mode.shape_env is not None and bool(mode.shape_env.var_to_range)


def set_item_memo(tensor: torch.Tensor, value: Any) -> None:
    """FakeTensor.item_memo: what `.item()` of a fake scalar answers."""
    tensor.item_memo = value  # type: ignore[attr-defined]


def inductor_compile(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    *,
    on_lowering: Callable[[bool], None] | None = None,
    kept: dict[int, torch.fx.GraphModule] | None = None,
    ahead: Ahead | None = None,
    scout: Scout | None = None,
) -> Callable[..., Any]:
    """torch._inductor.compile_fx.compile_fx: AOTAutograd, lowering and code generation.

    on_lowering(is_backward) is called as each half leaves AOTAutograd and enters Inductor. kept: receives a copy of
    each half as it was then, by the id of its compiled form (see `replaying`). ahead: lower the backward in a copy of
    this process while this one lowers the forward. Raises Scouted in place of an answer if `scout` says so.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if on_lowering is None:
        compiled = compile_fx(gm, list(inputs), config_patches=dict(patches))
        assert callable(compiled)
        return compiled
    with contextlib.ExitStack() as stack:
        lower = (
            compile_fx_inner
            if ahead is None
            else stack.enter_context(_BackwardAhead(compile_fx_inner, ahead))
        )
        if scout is not None:
            lower = stack.enter_context(_lowering_only(lower, scout))

        @functools.wraps(compile_fx_inner)
        def inner(*args: Any, **kwargs: Any) -> Any:
            if getattr(lower, "inside_copy", False):
                return lower(*args, **kwargs)
            on_lowering(bool(kwargs.get("is_backward")))
            before = None if kept is None else _graph_copy(args[0])
            lowered = lower(*args, **kwargs)
            if kept is not None and before is not None:
                before.meta[_GENERATED] = getattr(lowered, "source_code", "")
                kept[id(lowered)] = before
            return lowered

        compiled = compile_fx(gm, list(inputs), inner_compile=inner, config_patches=dict(patches))
    if scout is not None and scout.scouting:
        raise Scouted
    assert callable(compiled)
    return compiled


class Scout(Protocol):
    """Says of a compile whether it only finds out what must be searched."""

    @property
    def scouting(self) -> bool: ...

    def tell(self) -> None:
        """The forward was lowered, and the backward will be."""


class Ahead(Protocol):
    """What chooses while a graph is lowered, where half of that is done in a copy of this process."""

    def answer(self, question: bytes) -> bytes:
        """What `ask` gives in the copy; in a thread of this process. Raises nothing."""

    def leave(self, ask: Callable[[bytes], bytes]) -> None:
        """This is the copy now; it can tell nobody anything but through `ask`, and ends by Scouted."""

    def taken_along(self) -> Any:
        """In the copy: what it has found out, as pickle has it."""

    def take_over(self, found: Any) -> None:
        """In this process: what the copy took was taken."""


class Scouted(BaseException):
    """A graph was lowered and no code generated. No Exception, so that nobody takes it for a failure."""


class _LoweredOnly(BaseException):
    """What was lowered (GraphLowering), where its code would have been generated."""

    def __init__(self, lowering: Any) -> None:
        self.lowering = lowering


@contextlib.contextmanager
def _lowering_only(lower: Callable[..., Any], scout: Scout) -> Iterator[Callable[..., Any]]:
    """compile_fx_inner that stops before torch._inductor.graph.GraphLowering.compile_to_module if `scout` is scouting
    by then. A forward's place is taken by what cannot run; its outputs' strides decide the backward's inputs."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import set_tracing_context_output_strides

    original = GraphLowering.compile_to_module

    def compile_to_module(self: Any) -> Any:
        if scout.scouting:
            raise _LoweredOnly(self)
        return original(self)

    @functools.wraps(lower)
    def lower_only(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        try:
            return lower(gm, inputs, **kwargs)
        except _LoweredOnly as stopped:
            if kwargs.get("is_backward") or kwargs.get("is_inference"):
                raise Scouted from None
            scout.tell()
            strides: Any = types.SimpleNamespace(output_strides=_output_strides(stopped.lowering))
            set_tracing_context_output_strides(inputs, strides)
            return _forward_elsewhere

    with _replaced(GraphLowering, "compile_to_module", compile_to_module):
        yield lower_only


def _output_strides(lowering: Any) -> list[tuple[str, ...] | None]:
    """Of a graph's outputs, as codegen_and_compile in torch._inductor.compile_fx writes them down."""
    from torch._inductor.ir import IRNode
    from torch.fx.experimental.symbolic_shapes import SymExprPrinter, free_unbacked_symbols

    printer = SymExprPrinter()
    return [
        tuple(printer.doprint(stride) for stride in out.get_layout().stride)
        if isinstance(out, IRNode) and out.has_tensor_output() and not free_unbacked_symbols(out.get_stride())
        else None
        for out in lowering.graph_outputs or ()
    ]


_GENERATED = "torchrelay_generated"


def generated_code(gm: torch.fx.GraphModule) -> str:
    """What Inductor generated for a graph that `inductor_compile` kept (CompiledFxGraph.source_code)."""
    code: str = gm.meta.get(_GENERATED, "")
    return code


def argument(node: torch.fx.Node, name: str) -> Any:
    """An operator call's argument by its name in the schema, its default where the call has none."""
    for position, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            return node.args[position] if position < len(node.args) else declared.default_value
    return None


LARGEST_COPIED = 2 << 30
"""Bytes up to which a job copies itself: whoever watches its memory counts what the two share twice."""


class _BackwardAhead:
    """torch._inductor.compile_fx.compile_fx_inner, with the backward lowered while the forward is.

    A copy of this process is told that the forward is done; AOTAutograd then hands it the backward, which it lowers
    (fx_codegen_and_compile) without building anything. This process takes that as Inductor takes a graph from its own
    cache (CompiledFxGraph.after_deserialization), if it comes to the very same backward: the strides of what the
    forward saves, which only its lowering decides, were a guess. Otherwise it lowers the backward itself.
    """

    def __init__(self, lower: Callable[..., Any], ahead: Ahead) -> None:
        self._lower = lower
        self._ahead = ahead
        self._copy: Copy | None = None

    def __enter__(self) -> _BackwardAhead:
        return self

    def __exit__(self, *error: object) -> None:
        if self._copy is not None:
            self._copy.close()

    @property
    def inside_copy(self) -> bool:
        return self._copy is not None and self._copy.inside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor import compile_fx

        if kwargs.get("is_backward"):
            with _replaced(compile_fx, "fx_codegen_and_compile", self._codegen(compile_fx)):
                return self._lower(*args, **kwargs)
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        if not kwargs.get("is_inference") and held <= LARGEST_COPIED:
            with contextlib.suppress(OSError):
                self._copy = Copy(self._ahead.answer)
            if self._copy is not None and self._copy.inside:
                self._ahead.leave(self._copy.ask)
                torch.set_num_threads(1)  # a pool of threads does not survive a fork
                if (box := kwargs.get("cudagraphs")) is not None:
                    box.value = False  # as lowering a forward for a CPU leaves it
                return _forward_elsewhere
        return self._lower(*args, **kwargs)

    def _codegen(self, compile_fx: Any) -> Callable[..., Any]:
        original = compile_fx.fx_codegen_and_compile

        @functools.wraps(original)
        def fx_codegen_and_compile(gm: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._copy is None:
                return original(gm, inputs, *args, **kwargs)
            task = _task(gm, inputs, args, kwargs)
            if self._copy.inside:
                with building_nothing():
                    lowered = original(gm, inputs, *args, **kwargs)
                lowered.prepare_for_serialization()
                self._copy.answer(pickle.dumps((task, lowered, self._ahead.taken_along())))
            data = self._copy.result()
            self._copy = None
            done, lowered, found = pickle.loads(data) if data else ((), None, None)
            if lowered is None or done != task:
                return original(gm, inputs, *args, **kwargs)
            self._ahead.take_over(found)
            lowered.after_deserialization(compile_fx.CompiledFxGraphConstantsWithGm(gm))
            return lowered

        return fx_codegen_and_compile


@contextlib.contextmanager
def without_fake_gpus() -> Iterator[None]:
    """Inside the block, FakeTensorMode leaves a CUDA build on a machine without a GPU as it is.

    FakeTensorMode.__enter__ calls torch._C._ensureCUDADeviceGuardSet, whose guard says that there are eight devices;
    autograd's engine starts a thread for each at its first backward, and no child that is forked after that can run
    a backward (Engine::initialize_device_threads_pool).
    """
    with _replaced(torch._C, "_ensureCUDADeviceGuardSet", lambda: None):
        yield


@contextlib.contextmanager
def numbering_afresh() -> Iterator[None]:
    """After the block, graphs are numbered as if it had not been (AOT_COUNTER, _graph_counter and their like)."""
    import torch._functorch.aot_autograd as aot_autograd
    from torch._inductor import compile_fx, graph, scheduler

    counters = (
        (aot_autograd, "AOT_COUNTER"),
        (compile_fx, "_graph_counter"),
        (graph, "_post_grad_graph_counter"),
        (scheduler, "_post_grad_graph_counter"),  # until 2.12
    )
    with contextlib.ExitStack() as stack:
        for owner, name in counters:
            if hasattr(owner, name):
                stack.enter_context(_replaced(owner, name, itertools.count()))
        yield


def _forward_elsewhere(inputs: Any) -> Any:
    """What a copy that lowers the backward has in the forward's place."""
    raise AssertionError("the forward was not compiled in this process")


_forward_elsewhere._boxed_call = True  # type: ignore[attr-defined]


def _task(gm: torch.fx.GraphModule, inputs: Sequence[Any], args: Any, kwargs: Mapping[str, Any]) -> list[str]:
    """All that a lowering is given, as text."""
    given = [
        f"{x.dtype} {x.device} {tuple(x.shape)} {x.stride()} {x.storage_offset()}"
        if isinstance(x, torch.Tensor)
        else repr(x)
        for x in inputs
    ]
    settings = {name: getattr(value, "value", value) for name, value in kwargs.items()}
    return [str(gm.graph), *given, repr(args), repr(sorted(settings.items()))]


@contextlib.contextmanager
def building_nothing() -> Iterator[None]:
    """Inside the block, generated code loads without its C++ kernels (AsyncCompile.cpp_pybinding)."""
    from torch._inductor.async_compile import AsyncCompile

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        return _forward_elsewhere

    with _replaced(AsyncCompile, "cpp_pybinding", cpp_pybinding):
        yield


def _graph_copy(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy to be interpreted: _LazyGraphModule makes no Python of it unless asked."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(gm.graph, {}))
    return _LazyGraphModule(gm, copied)


@contextlib.contextmanager
def replaying(
    kept: Mapping[int, torch.fx.GraphModule],
    replay: Callable[[torch.fx.GraphModule, list[Any], Callable[[list[Any]], Any]], Any],
) -> Iterator[None]:
    """Inside the block, run each compiled graph of `kept` through replay(graph, inputs, run).

    Wraps torch._inductor.output_code.CompiledFxGraph.__call__.
    """
    from torch._inductor.output_code import CompiledFxGraph
    from torch.utils._python_dispatch import _disable_current_modes

    original = CompiledFxGraph.__call__

    def call(self: Any, inputs: Any) -> Any:
        gm = kept.get(id(self))
        if gm is None:
            return original(self, inputs)
        with _disable_current_modes():  # AOTAutograd's watch on custom operators costs the reference a fifth
            return replay(gm, inputs, lambda given: original(self, given))

    with _replaced(CompiledFxGraph, "__call__", call):
        yield


def mode_options(mode: str, dynamic: bool | None = None) -> dict[str, Any]:
    """torch._inductor.list_mode_options: what a `mode=` stands for, as Inductor options."""
    from torch._inductor import list_mode_options

    return {} if mode == "default" else dict(list_mode_options(mode, dynamic))


def check_options(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse unknown modes and options as Inductor does (torch._TorchCompileInductorWrapper); the merged options."""
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options), None)  # type: ignore[no-untyped-call]
    return dict(wrapper.config)


def serialize(compiled: Any) -> bytes:
    """Pickle of a compiled callable (BundledAOTAutogradSerializableCallable); TypeError if it cannot be."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Serializable

    if getattr(compiled, "serialize", None) is None:
        raise TypeError("the compiled graph has no serialized form")
    with _without_user_kernels():
        return Serializable.serialize_compile_artifacts(Serializable(compiled))


@contextlib.contextmanager
def cpu_target(vector_sets: Collection[str], flags: Sequence[str], avx512_bf16: bool) -> Iterator[None]:
    """Make Inductor generate C++ for a given CPU instead of this one.

    Replaces torch._inductor.cpu_vec_isa.valid_vec_isa_list, the test builds by which Inductor finds out what this
    CPU can do (VecISA.check_build: three runs of g++, 2.5 s, in every job), and the -march part of
    torch._inductor.cpp_builder._get_optimization_cflags.
    """
    from torch._inductor import cpp_builder, cpu_vec_isa

    chosen = []
    for isa in cpu_vec_isa.supported_vec_isa_list:
        if str(isa).split() and set(str(isa).split()) <= set(vector_sets):
            if isinstance(isa, cpu_vec_isa.VecAVX512):
                isa._is_avx512_bf16_supported = avx512_bf16
            chosen.append(isa)
    original = cpp_builder._get_optimization_cflags

    @functools.wraps(original)
    def optimization_flags(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        cflags, ldflags = original(*args, **kwargs)
        kept = [flag for flag in cflags if not flag.startswith(("march=", "mcpu="))]
        return kept + list(flags), ldflags

    with (
        _replaced(cpu_vec_isa, "valid_vec_isa_list", lambda: chosen),
        _replaced(cpu_vec_isa.VecISA, "check_build", lambda self, code: True),
        _replaced(cpp_builder, "_get_optimization_cflags", optimization_flags),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    # of a class as it lies there: a static method that is asked for is a function
    original = inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def lean_lowering() -> Iterator[None]:
    """Spare what Inductor works out again and again for a large graph, and what only its logs would show.

    For each of ten thousand small graphs, torch.fx.interpreter makes a progress bar that it does not show
    (torch.fx.config.disable_progress), and torch._inductor.dtype_propagation fills its one handler again from tables
    that stay the same. For each kernel, CppVecOverrides wraps all of its methods anew, and has no state. Where there
    are no symbols, get_scheduler_node_symbol_uses looks for them all the same. stride_at_vec_range simplifies each
    index, though that of a sum of integers times symbols can be read off. Graphs are printed, and turned into scripts
    with the worker's environment (print_readable, save_graph_repro), which made up half of an artifact. A key for a
    cache that is always empty digests every source file of PyTorch (autograd_cache_key); a nonce finds nothing in any.
    Each time that a C++ template is rendered, Jinja compiles its parts anew (KernelTemplate._template_from_string), and
    sympy its indices (parse_expr_with_index_symbols), which are a few texts.
    """
    from torch._dynamo.repro import after_aot
    from torch._functorch._aot_autograd import autograd_cache
    from torch._inductor import scheduler
    from torch._inductor.codegen import common, cpp, cpp_template_kernel
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._inductor.virtualized import V
    from torch.fx import interpreter

    fill = DtypePropagationOpsHandler.__init__
    sizes: tuple[int, ...] = ()

    @functools.wraps(fill)
    def fill_once(self: Any) -> None:
        nonlocal sizes
        tables = torch._inductor.utils.op_dtype_propagation_rules, common.pointwise_overrides_data
        if sizes != (now := (len(tables[0]), len(tables[1]))):
            fill(self)
            sizes = now

    wrap: Any = cpp.CppVecOverrides.__new__
    wrapped: dict[type, Any] = {}

    def wrap_once(cls: type) -> Any:
        if cls not in wrapped:
            wrapped[cls] = wrap(cls)
        return wrapped[cls]

    uses = scheduler.get_scheduler_node_symbol_uses

    def symbol_uses(node: Any) -> Any:
        return (
            uses(node) if V.graph.sizevars.shape_env.var_to_range else torch.utils._ordered_set.OrderedSet()
        )

    template = functools.cache(common.KernelTemplate._template_from_string)
    parse_anew: Callable[[Any], Any] = cpp_template_kernel.parse_expr_with_index_symbols
    parse_text = functools.cache(parse_anew)

    def parse(given: Any) -> Any:
        if isinstance(given, (list, tuple)):
            return [parse(each) for each in given]
        return parse_anew(given) if isinstance(given, sympy.Expr) else parse_text(str(given))

    stride = vars(cpp)["stride_at_vec_range"]  # defined there until 2.12, in sizevars from 2.13 on

    @functools.cache
    def stride_at_vec_range(index: Any, var: Any, vec_length: int | None = None) -> Any:
        found = linear_stride(index, var)
        return stride(index, var, vec_length) if found is None else found

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (DtypePropagationOpsHandler, "__init__", fill_once),
            (cpp.CppVecOverrides, "__new__", wrap_once),
            (scheduler, "get_scheduler_node_symbol_uses", symbol_uses),
            (cpp, "stride_at_vec_range", stride_at_vec_range),
            (common.KernelTemplate, "_template_from_string", staticmethod(template)),
            (cpp_template_kernel, "parse_expr_with_index_symbols", parse),
            (torch.fx.GraphModule, "print_readable", lambda self, *args, **kwargs: ""),
            (after_aot, "save_graph_repro", lambda *args, **kwargs: None),
            (autograd_cache, "autograd_cache_key", lambda *args, **kwargs: (secrets.token_hex(16), [])),
        ):
            stack.enter_context(_replaced(owner, name, value))
        if torch.fx.config.disable_progress:
            stack.enter_context(_replaced(interpreter, "tqdm", _NoProgress))
        yield


def linear_stride(index: sympy.Expr, var: sympy.Symbol) -> sympy.Integer | None:
    """How far a sum of integers times symbols moves with `var`; None of any other expression."""
    stride = 0
    for term in sympy.Add.make_args(index):
        factor, symbol = term.as_coeff_Mul()
        if not (factor.is_Integer and (symbol.is_Symbol or symbol is sympy.S.One)):
            return None
        stride += int(factor) if symbol == var else 0
    return sympy.Integer(stride)


class _NoProgress:
    def __init__(self, **kwargs: Any) -> None: ...

    def update(self, count: int) -> None: ...

    def close(self) -> None: ...


NAME_LENGTH = 100
"""Longest fused part of a kernel's name. Triton cuts its cache's file names at 150 characters; the static launcher
looks for the whole name, does not find the binary, and the kernel would be compiled and measured again on every
client."""


@contextlib.contextmanager
def steady_kernel_names() -> Iterator[None]:
    """Name Triton kernels by what they are and not by where in a graph they stand: Triton's key has the name in it.

    Caps torch._inductor.utils.get_fused_kernel_name wherever it was imported. In
    torch._inductor.codegen.triton.TritonScheduling.define_kernel, the number at a name's end becomes a digest of the
    source; of two sources with one digest, the second keeps its number.
    """
    from torch._inductor import utils
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.virtualized import V

    fused_name = utils.get_fused_kernel_name
    define: Callable[..., Any] = TritonScheduling.define_kernel
    sources: dict[str, str] = {}

    @functools.wraps(fused_name)
    def get_fused_kernel_name(*args: Any, **kwargs: Any) -> str:
        return fused_name(*args, **kwargs)[:NAME_LENGTH].rstrip("_")

    @functools.wraps(define)
    def define_kernel(self: Any, src_code: str, *args: Any, **kwargs: Any) -> Any:
        digest = hashlib.sha256(src_code.encode()).hexdigest()[:8]
        if sources.setdefault(digest, src_code) != src_code:
            return define(self, src_code, *args, **kwargs)
        with _replaced(V.graph.wrapper_code, "next_kernel_suffix", lambda: digest):
            return define(self, src_code, *args, **kwargs)

    holders = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torch._inductor") and vars(module).get("get_fused_kernel_name") is fused_name
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(TritonScheduling, "define_kernel", define_kernel))
        for module in holders:
            stack.enter_context(_replaced(module, "get_fused_kernel_name", get_fused_kernel_name))
        yield


class Libraries:
    """The C++ kernel libraries of a compile. `waited`: seconds that it had to wait for g++ so far."""

    def __init__(self) -> None:
        self.waited = 0.0
        self._kernels: dict[tuple[tuple[str, ...], str], Callable[[], Any]] = {}

    def files(self) -> list[tuple[list[str], str, Path]]:
        """(argument types, source, file) of each, all of them built. Raises what the build of one raised."""
        return [
            (list(argtypes), source, Path(kernel().__self__.__file__))
            for (argtypes, source), kernel in self._kernels.items()
        ]

    def settle(self) -> None:
        """Wait until nothing is being built, so that something can be measured; errors come with `files`."""
        waited = self.waited
        for kernel in self._kernels.values():
            with contextlib.suppress(Exception):
                kernel()
        self.waited = waited

    def later(self, argtypes: Sequence[str], source: str, kernel: Any) -> Any:
        """The kernel, or in place of its future a callable whose first call waits for it."""
        if not hasattr(kernel, "result"):
            self._kernels[tuple(argtypes), source] = lambda: kernel
            return kernel

        def built() -> Any:
            start = time.perf_counter()
            try:
                return kernel.result()
            finally:
                self.waited += time.perf_counter() - start

        self._kernels[tuple(argtypes), source] = built
        return lambda *args: built()(*args)


@contextlib.contextmanager
def recording_libraries() -> Iterator[Libraries]:
    """Record every C++ kernel library built inside the block.

    Wraps torch._inductor.async_compile.AsyncCompile.cpp_pybinding, whose futures AsyncCompile.wait waits for at the
    end of each graph: here the backward is lowered, and the forward's reference run, while g++ works. Its errors come
    when the library is asked for.
    """
    from torch._inductor.async_compile import AsyncCompile

    libraries = Libraries()
    original = AsyncCompile.cpp_pybinding

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        return libraries.later(argtypes, source_code, original(self, argtypes, source_code))

    with _replaced(AsyncCompile, "cpp_pybinding", cpp_pybinding):
        yield libraries


@dataclasses.dataclass
class Builds:
    """How many C++ libraries a compile built, and how many it found built."""

    built: int = 0
    reused: int = 0


@contextlib.contextmanager
def without_tuning_caches() -> Iterator[None]:
    """Inside the block no kernel looks for its winner in a file or leaves it in one (torch._inductor.runtime.
    autotune_cache.AutotuneCache): winners go into the artifact, and into a node's store. Files would be read and
    written for each of a graph's kernels."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    with _replaced(AutotuneCache, "create", staticmethod(lambda *args, **kwargs: None)):
        yield


@contextlib.contextmanager
def sharing_libraries(exchange: Exchange | None) -> Iterator[Builds]:
    """Take C++ libraries from earlier compiles instead of building them, and offer those that are built.

    Wraps torch._inductor.codecache._worker_compile_cpp, which is given builders whose last target is the library.
    """
    from torch._inductor import codecache

    builds, lock = Builds(), threading.Lock()
    original = codecache._worker_compile_cpp

    @functools.wraps(original)
    def worker_compile_cpp(lock_path: str, cpp_builders: Sequence[Any]) -> None:
        target = Path(cpp_builders[-1].get_target_file_path())
        if target.suffix != ".so" or target.exists():  # a precompiled header, or done by another thread
            original(lock_path, cpp_builders)
            return
        found = exchange is not None and exchange.borrow(target.name, target)
        if not found:
            original(lock_path, cpp_builders)
            if exchange is not None:
                exchange.offer(target)
        if _on_trial.get():
            return
        with lock:
            builds.reused += found
            builds.built += not found

    with _replaced(codecache, "_worker_compile_cpp", worker_compile_cpp):
        yield builds


@contextlib.contextmanager
def headers_in(folder: Path) -> Iterator[None]:
    """Inside the block, precompiled headers lie in `folder` (torch._inductor.codecache._HEADER_DIR)."""
    from torch._inductor import codecache

    with (
        _replaced(codecache, "_HEADER_DIR", str(folder)),
        _replaced(codecache, "_HEADER_LOCK_DIR", str(folder / "locks")),
    ):
        yield


def precompile_header(options: Mapping[str, Any]) -> Path:
    """Have the header that C++ kernels include precompiled, as their first one would have it; returns its file.

    Enters torch._inductor.codecache.CppPythonBindingsCodeCache.load_pybinding_async, which builds no kernel until what
    it returns is called.
    """
    from torch._inductor import codecache, config

    used: list[Path] = []
    original = codecache._precompile_header

    def recorded(*args: Any, **kwargs: Any) -> str:
        path: str = original(*args, **kwargs)
        used.append(Path(path + ".gch"))
        return path

    with _replaced(codecache, "_precompile_header", recorded), config.patch(dict(options)):
        source = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* x) {}\n'
        codecache.CppPythonBindingsCodeCache.load_pybinding_async(["float*"], source)
    return used[0]


def preload_compiler() -> None:
    """Import everything that a compile needs, without creating Inductor's process pool or touching a GPU."""
    with environment(TORCH_WARM_POOL="0"):
        import torch._inductor.async_compile
        import torch._inductor.codegen.cpp
        import torch._inductor.codegen.cpp_wrapper_cpu
        import torch._inductor.codegen.wrapper
        import torch._inductor.compile_fx
        import torch._inductor.fx_passes.joint_graph
        import torch._inductor.fx_passes.post_grad
        import torch._inductor.fx_passes.pre_grad
        import torch._inductor.kernel.conv
        import torch._inductor.kernel.mm
        import torch._inductor.lowering
        import torch._inductor.scheduler
        import torch.utils.cpp_extension
        import torch.utils.file_baton  # noqa: F401

    from torch._inductor.decomposition import select_decomp_table

    select_decomp_table()
    from torch._inductor.runtime import triton_compat
    from torch.utils._triton import has_triton_package

    if has_triton_package():
        triton_compat.triton_key()  # a digest of all of Triton's files, that each compiler process would make anew


MOST_COMPILERS = 24


def start_kernel_processes(count: int) -> None:
    """Fork Inductor's pool of Triton compilers now, before this process touches a GPU (AsyncCompile.warm_pool).

    They take the ptxas that torch brings, where it brings one, and this process must take the same: Triton's cache goes
    by it (torch._inductor.runtime.compile_tasks). At most MOST_COMPILERS: each makes pages of its own of what this
    process has imported, some 300 MB, and they count as the job's memory."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    _set_triton_ptxas_path()
    for name, value in STATIC_USER_KERNELS.items():  # what is set later does not reach the pool
        setattr(config, name, value)
    config.compile_threads = min(count, MOST_COMPILERS)
    config.worker_start_method = "fork"
    AsyncCompile.process_pool.cache_clear()
    AsyncCompile.warm_pool()
    AsyncCompile.wait_pool_ready()


def stop_kernel_processes() -> None:
    """torch._inductor.async_compile.shutdown_compile_workers."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables that PyTorch reads at import, and put back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class TritonKernels:
    """The Triton kernels that a compile made: live autotuners by bundle key, late candidates, timings.

    modules: C extensions that Triton built or used on the way (its driver's, launchers'), by triton_module_id.
    reused: kernels whose binaries all came from earlier compiles, once the winners are kept.
    """

    def __init__(self) -> None:
        self.modules: dict[str, Path] = {}
        self.reused = 0
        self.live: dict[str, Any] = {}
        """Bundle key -> CachingAutotuner."""
        self.sources: dict[str, str] = {}
        """By bundle key."""
        self.descents: Descents | None = None
        """While coordinate descents take turns."""
        self.late: dict[int, list[Any]] = {}
        self.timings: dict[int, Winner] = {}

    def undecided(self) -> bool:
        """Whether any kernel has several candidates left, or its descent before it: it has not run yet."""
        return any(
            len(kernel.launchers) > 1 or (kernel.launchers and _descends(kernel, kernel.launchers[0].config))
            for kernel in self.live.values()
        )

    def descending(self) -> bool:
        """Whether any kernel's coordinate descent is still to come."""
        return any(
            kernel.launchers and _descends(kernel, kernel.launchers[0].config)
            for kernel in self.live.values()
        )

    @contextlib.contextmanager
    def descending_together(self) -> Iterator[Descents | None]:
        """Inside the block coordinate descents take turns (descents.py); None: there are none, or nobody who builds."""
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.runtime.runtime_utils import triton_config_to_hashable

        compilers: Any = AsyncCompile
        if not self.descending() or not compilers.use_process_pool():
            yield None
            return
        pool = compilers.process_pool()
        caches = {name: os.environ[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}

        def build(key: str, config: Any) -> Future[Any]:
            name = self.live[key].fn.__name__
            return pool.submit(_build_configuration, name, self.sources[key], config, caches)  # type: ignore[no-any-return]

        self.descents = Descents(build, triton_config_to_hashable)
        try:
            yield self.descents
        finally:
            self.descents = None


def _build_configuration(name: str, source: str, config: Any, caches: Mapping[str, str]) -> None:
    """In a process of Inductor's pool: into Triton's cache (torch._inductor.runtime.compile_tasks)."""
    from torch._inductor.codecache import PyCodeCache

    os.environ.update(caches)
    kernel = getattr(PyCodeCache.load(source), name)
    if kernel.fn.fn is None:  # it was sent away from here (prepare_for_pickle)
        PyCodeCache.cache_clear()
        kernel = getattr(PyCodeCache.load(source), name)
    kernel._precompile_config(config)


def _descends(kernel: Any, config: Any) -> bool:
    """Whether a CachingAutotuner would begin a coordinate descent when it runs with this configuration."""
    wanted = kernel.inductor_meta.get("coordinate_descent_tuning", False)
    return bool(wanted) and not getattr(config, "found_by_coordesc", False)


def kernel_key(source: str) -> str:
    """What a bundle calls a Triton kernel: a digest of its source. Upstream's own (CompiledTritonKernels.key) also
    digests every source file of PyTorch, 0.3 s at each start, for what the artifact's toolchain says already."""
    return hashlib.sha256(source.encode()).hexdigest()


@contextlib.contextmanager
def recording_kernels(exchange: Exchange | None = None) -> Iterator[TritonKernels]:
    """Record every statically launchable Triton kernel compiled inside the block; those that an earlier compile
    measured are not measured again.

    Wraps torch._inductor.triton_bundler.TritonBundler.put_static_autotuner, and CachingAutotuner's
    _precompile_config (candidates added after the bundle was made: scaled reductions, coordinate descent),
    benchmark_all_configs and _coordinate_descent_tuning, which ends where it ended the last time.
    """
    from torch._inductor.async_compile import CompiledTritonKernels
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.triton_bundler import TritonBundler

    kernels = TritonKernels()
    keys: dict[int, str] = {}
    put = TritonBundler.put_static_autotuner
    precompile = CachingAutotuner._precompile_config
    benchmark = CachingAutotuner.benchmark_all_configs

    def key_of(source: str) -> str:
        key = kernel_key(source)
        kernels.sources[key] = source
        return key

    def put_static_autotuner(cls: Any, key: str, kernel: Any) -> None:
        kernels.live[key] = kernel
        keys[id(kernel)] = key
        put(key, kernel)

    def precompile_config(self: Any, cfg: Any) -> Any:
        result = precompile(self, cfg)
        kernels.late.setdefault(id(self), []).append(_copied(result))
        return result

    def benchmark_all_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = keys.get(id(self))
        problem = None if source is None else _problem(source, self.launchers, args)
        known = None if problem is None else triton_store.find_winner(exchange, problem)
        for launcher in self.launchers:
            if known is not None and str(launcher.config) == known.configuration:
                kernels.timings[id(self)] = known
                return {launcher: known.milliseconds}
        timings = benchmark(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        best = min(timings, key=timings.get)
        winner = triton_store.Winner(str(best.config), float(timings[best]), len(timings))
        kernels.timings[id(self)] = winner
        if problem is not None and math.isfinite(winner.milliseconds):
            triton_store.keep_winner(exchange, problem, winner)
        return timings

    descend: Any = CachingAutotuner._coordinate_descent_tuning

    def coordinate_descent_tuning(self: Any, launcher: Any, *args: Any, **kwargs: Any) -> Any:
        source = keys.get(id(self))
        if source is None:
            return descend(self, launcher, *args, **kwargs)
        problem = _problem(source, [launcher], args, "coordinate descent")
        known = triton_store.find_winner(exchange, problem)
        config = None if known is None else _moved(launcher.config, known.configuration)
        if config is not None:
            with _replaced(self.coordesc_tuner, "autotune", lambda *given, **named: config):
                return descend(self, launcher, *args, **kwargs)
        if kernels.descents is None:
            winner = descend(self, launcher, *args, **kwargs)
        else:
            tune = kernels.descents.of(source, self.coordesc_tuner.autotune)
            try:
                with _replaced(self.coordesc_tuner, "autotune", tune):
                    winner = descend(self, launcher, *args, **kwargs)
            except PutOff:
                return launcher
        timed = kernels.timings.get(id(self))
        triton_store.keep_winner(
            exchange,
            problem,
            triton_store.Winner(_where(winner.config), 0.0 if timed is None else timed.milliseconds, 1),
        )
        return winner

    with (
        _recording_modules(kernels.modules),
        _replaced(CachingAutotuner, "_coordinate_descent_tuning", coordinate_descent_tuning),
        _replaced(CompiledTritonKernels, "key", staticmethod(key_of)),
        _replaced(TritonBundler, "put_static_autotuner", classmethod(put_static_autotuner)),
        _replaced(CachingAutotuner, "_precompile_config", precompile_config),
        _replaced(CachingAutotuner, "benchmark_all_configs", benchmark_all_configs),
    ):
        yield kernels


def _where(config: Any) -> str:
    """Where a coordinate descent has ended (triton.Config)."""
    return json.dumps([config.kwargs, config.num_warps, config.num_stages], sort_keys=True)


def _moved(config: Any, where: str) -> Any:
    """The configuration that `_where` tells, from the one that the descent began with; None: it is none of its."""
    try:
        kwargs, warps, stages = json.loads(where)
        numbers = [*kwargs.values(), warps, stages]
    except (ValueError, TypeError, AttributeError):
        return None
    known = config.kwargs
    if kwargs.keys() != known.keys() or not all(type(number) in (int, bool) for number in numbers):
        return None
    moved = copy.deepcopy(config)
    moved.kwargs.update(kwargs)
    moved.num_warps, moved.num_stages = warps, stages
    return moved


def _problem(source: str, launchers: Sequence[Any], args: Sequence[Any], *about: str) -> bytes:
    """What a measurement of a kernel's candidates is good for."""
    import triton

    made_by = [torch.cuda.get_device_name(), str(torch.__version__), triton.__version__]
    sizes = [value for value in args if isinstance(value, int)]
    return triton_store.winner_key(
        source, sizes, [*(str(each.config) for each in launchers), *about], made_by
    )


@contextlib.contextmanager
def _recording_modules(found: dict[str, Path]) -> Iterator[None]:
    """Record the C extensions that Triton builds or finds (triton.runtime.build.compile_module_from_src)."""
    owners = _triton_builders()
    if not owners:
        yield
        return
    original = owners[0].compile_module_from_src

    @functools.wraps(original)
    def compile_module_from_src(src: str, name: str, *args: Any, **kwargs: Any) -> Any:
        module = original(src, name, *args, **kwargs)
        found[triton_module_id(src, name)] = Path(module.__file__)
        return module

    with contextlib.ExitStack() as stack:
        for owner in owners:
            stack.enter_context(_replaced(owner, "compile_module_from_src", compile_module_from_src))
        yield


def _triton_builders() -> list[Any]:
    """The modules that hold `compile_module_from_src`; none where Triton is not installed (CPU builds)."""
    try:
        import triton.backends.nvidia.driver
        import triton.runtime.build
    except ImportError:
        return []
    return [triton.runtime.build, triton.backends.nvidia.driver]


def triton_module_id(source: str, name: str) -> str:
    """What names a C extension of Triton's in an artifact. Its own cache key will not do: that one depends on
    whether the machine has the `file` command."""
    return f"{name}-{hashlib.sha256(source.encode()).hexdigest()}"


def _copied(result: Any) -> Any:
    """A compile result as it was before it is loaded into the device (StaticTritonCompileResult)."""
    if not hasattr(getattr(result, "kernel", None), "cubin_raw"):
        return result
    copied = copy.copy(result)
    copied.kernel = copy.copy(result.kernel)
    return copied


def keep_winners(bundle: bytes, kernels: TritonKernels) -> bytes:
    """Rewrite a bundle so that each kernel that ran keeps its winner alone, binary inside.

    UNPICKLES `bundle`: only the process that made it calls this (TritonBundle.static_autotuners).
    """
    entry, side_table, constant_args = pickle.loads(bundle)
    for part in (entry.compiled_fw, entry.compiled_bw):
        graph = getattr(part, "result", None)
        triton_bundle = getattr(graph, "_triton_bundle", None)
        if graph is None or triton_bundle is None:
            continue
        inside: set[str] = set()
        for static in triton_bundle.static_autotuners:
            live = kernels.live.get(static.cache_key)
            kernels.reused += all(
                triton_store.was_reused(_binaries(result)) for result in static.kernel.compile_results
            )
            _keep_winner(static.kernel, live, kernels.late.get(id(live), []))
            inside |= _embed_binaries(static.kernel)
        rest = [a for a in triton_bundle.kernel_artifacts if a.kernel_hash not in inside]
        graph._triton_bundle = dataclasses.replace(triton_bundle, kernel_artifacts=rest)
    return pickle.dumps((entry, side_table, constant_args))


def _keep_winner(stored: Any, live: Any, late: Sequence[Any]) -> None:
    from torch._inductor.runtime.runtime_utils import triton_config_to_hashable

    if live is None or len(live.launchers) != 1:
        return
    winner = triton_config_to_hashable(live.launchers[0].config)
    for result in (*stored.compile_results, *late):
        if triton_config_to_hashable(result.config) == winner:
            result.config = live.launchers[0].config
            stored.compile_results = [result]
            stored.inductor_meta["dynamic_scale_rblock"] = False
            # Config.found_by_coordesc does not survive a pickle (triton.Config.__setstate__): whoever loads the
            # kernel would descend once more, with a compiler.
            stored.inductor_meta["coordinate_descent_tuning"] = False
            return


def _embed_binaries(stored: Any) -> set[str]:
    """Put each candidate's binary into the pickle itself; the Triton hashes (as paths) that are now inside."""
    inside: set[str] = set()
    for result in stored.compile_results:
        folder = _binaries(result)
        result.kernel.cubin_raw = (folder / f"{result.kernel.name}.cubin").read_bytes()
        result.kernel.cubin_path = None
        result.kernel.function = None
        inside.add(folder.name)
    return inside


def _binaries(result: Any) -> Path:
    """Where Triton's cache holds a compile result."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    folder = triton_cache_dir(result.compile_meta.get("device", 0) or 0)
    return Path(folder) / triton_hash_to_path_key(result.kernel.hash)


def measurements(kernels: TritonKernels) -> list[tuple[str, Winner]]:
    """(kernel, winner) of each kernel that was measured, in this compile or an earlier one."""
    return [
        (str(live.inductor_meta.get("kernel_name", "")), kernels.timings[id(live)])
        for live in kernels.live.values()
        if id(live) in kernels.timings
    ]


# --- choosing among an operator's candidates ---------------------------------------------------------------


class Selection:
    """An operator that Inductor has several implementations for, and these candidates.

    Made from what torch._inductor.select_algorithm.AlgorithmSelectorCache.__call__ is given. device: `cpu` or `cuda`.
    candidates: the text of each, in Inductor's order; the same in every process, no two alike. aten: those that are
    PyTorch's own kernels.
    """

    def __init__(self, cache: Any, given: Mapping[str, Any], problem: tuning.Problem | None = None) -> None:
        from torch._inductor.select_algorithm import ExternKernelCaller
        from torch._inductor.virtualized import V

        self._cache = cache
        self._given = given
        self._choices = list(given["choices"])
        self._graph = V.graph
        self._arguments: Any = None
        self._places: dict[int, Any] = {}
        """The same arguments in other memory."""
        self.device: str = given["layout"].device.type
        self.candidates = _distinct([_candidate_text(choice) for choice in self._choices])
        self.aten = [i for i, choice in enumerate(self._choices) if isinstance(choice, ExternKernelCaller)]
        self.problem = self._problem() if problem is None else problem

    def _problem(self) -> tuning.Problem:
        from torch._inductor import ir

        name, nodes = self._given["name"], list(self._given["input_nodes"])
        keys = [self._cache.key_of(node) for node in nodes]
        result = self._cache.key_of(ir.Buffer(name="result", layout=self._given["layout"]))
        settings = {option: str(value) for option, value in changed_options(SPACES).items()}
        settings |= _precisions(name, self.device, {key[1] for key in keys})
        if self.aten:
            own = self._choices[self.aten[0]]
            settings |= {f"arg.{k}": repr(v) for k, v in own.kwargs.items()}
            for i, (node, key) in enumerate(zip(own.input_nodes, keys, strict=False)):
                if (given := self._cache.key_of(node)) != key:  # a bias that only the templates take expanded
                    settings[f"given.{i}"] = _operand(given).text()
        if dynamic := [f"{i}.{dim}" for i, node in enumerate(nodes) for dim in _symbolic(node)]:
            settings["dynamic"] = " ".join(dynamic)
        if any(key[-1] for key in keys):
            settings["offsets"] = " ".join(str(key[-1]) for key in keys)
        if fixed := [str(i) for i, node in enumerate(nodes) if node.get_name() in self._graph.constants]:
            settings["constants"] = " ".join(fixed)
        if name not in _TOLD_BY_OPERANDS or not self.aten or self._given.get("input_gen_fns"):
            sources = sorted(
                str(getattr(bmreq, "module_cache_key", "") or getattr(bmreq, "hash_key", ""))
                for bmreq in map(_benchmark_request, self._choices)
            )
            settings["sources"] = hashlib.sha256("\n".join(sources).encode()).hexdigest()[:16]
        return tuning.Problem(
            name, tuple(map(_operand, keys)), _operand(result), tuple(sorted(settings.items()))
        )

    def thin(self, most: int) -> None:
        """Keep PyTorch's own kernels and as many others, the same ones each time."""
        drawn = sorted(
            (i for i in range(len(self._choices)) if i not in self.aten),
            key=lambda i: hashlib.sha256(self.candidates[i].encode()).digest(),
        )
        kept = sorted({*self.aten, *drawn[:most]})
        self._choices = [self._choices[i] for i in kept]
        self.candidates = [self.candidates[i] for i in kept]
        self.aten = [position for position, i in enumerate(kept) if i in self.aten]

    def begin_building(self) -> Building:
        """Have the candidates compiled, as many at once as Inductor may."""
        from torch._inductor import config

        if self.device == "cuda":
            return self._building_templates()
        pool = ThreadPoolExecutor(config.compile_threads or 1)
        built = {
            i: pool.submit(_for_a_trial().run, choice.precompile)
            for i, choice in enumerate(self._choices)
            if hasattr(choice, "precompile")
        }
        pool.shutdown(wait=False)
        return Building(
            list(built.values()),
            lambda: {i: str(e) for i, done in built.items() if (e := done.exception()) is not None},
        )

    def _building_templates(self) -> Building:
        """Triton's candidates in Inductor's processes, as AsyncCompile.triton has them; what comes from there is then
        what the candidates run. Inductor itself has each loaded and compiled again when it is measured, which costs
        seconds where it turns out then that the device has not the shared memory for it.
        """
        from torch._guards import CompileContext
        from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels
        from torch._inductor.codecache import PyCodeCache
        from torch._inductor.select_algorithm import TritonTemplateCaller
        from torch._inductor.virtualized import V

        compilers: Any = AsyncCompile()
        parallel = compilers.use_process_pool()
        begun: dict[int, tuple[str, Any]] = {}
        rest: list[int] = []
        with V.set_graph_handler(self._graph):
            for i in slowest_first(self.candidates):
                choice = self._choices[i]
                if parallel and isinstance(choice, TritonTemplateCaller):
                    source = Path(choice.bmreq.module_path).read_text()
                    begun[i] = source, compilers.triton(choice.bmreq.kernel_name, source).future
                elif hasattr(choice, "precompile"):
                    rest.append(i)
        compile_id = CompileContext.current_compile_id()

        def finish(i: int) -> None:
            if i not in begun:
                with V.set_graph_handler(self._graph):
                    self._choices[i].precompile()
                return
            source, future = begun[i]
            request = self._choices[i].bmreq
            try:
                kernel, _ = future.result()
            finally:
                CompiledTritonKernels.remove_future(source)
            module = PyCodeCache.load_by_key_path(request.module_cache_key, request.module_path)
            if not kernel.launchers:
                kernel.set_compile_info(compile_id, False)
                kernel.restore_after_unpickle(old_values=None)
                kernel.precompile(
                    warm_cache_only=False, reload_kernel=lambda: getattr(module, request.kernel_name)
                )
            setattr(module, request.kernel_name, kernel)

        def wait() -> dict[int, str]:
            failed: dict[int, str] = {}
            for i in (*begun, *rest):
                try:
                    finish(i)
                except Exception as error:
                    failed[i] = str(error) or type(error).__name__
            return failed

        return Building([future for _, future in begun.values()], wait)

    def prepare(self, seed: int) -> None:
        """Make the example inputs: random, or as the operator wants them (`input_gen_fns`)."""
        from torch._dynamo.utils import counters
        from torch._inductor.virtualized import V

        counters["inductor"]["select_algorithm_autotune"] += 1
        devices = [0] if self.device == "cuda" else []
        with torch.random.fork_rng(devices=devices), V.set_graph_handler(self._graph):
            torch.manual_seed(seed)
            self._arguments = self._cache.get_inputs(
                self._choices,
                self._given["input_nodes"],
                self._given["layout"],
                self._given.get("input_gen_fns"),
            )
        self._places = {0: self._arguments}

    def move(self, place: int) -> bool:
        """See Candidates.move: copies of torch._inductor.select_algorithm.AutotuneArgs."""
        if place not in self._places:
            self._places[place] = _elsewhere(self._places[0])
        self._arguments = self._places[place]
        return True

    def reference(self) -> torch.Tensor | None:
        """What PyTorch's own kernel makes of the inputs in float64; None where it cannot."""
        if not self.aten:
            return None
        inputs = [x.double() if x.is_floating_point() else x for x in self._arguments.extern.input_tensors]
        try:
            result = self._choices[self.aten[0]].to_callable()(*inputs)
        except Exception:  # no such kernel for float64, or none that takes it
            return None
        return result if isinstance(result, torch.Tensor) and result.dtype == torch.float64 else None

    def run(self, index: int, body: Callable[[Callable[[], Any]], None]) -> torch.Tensor:
        """Have a candidate get ready on the inputs and call body(once), where once() runs it; what it computed last.

        Replaces what times a candidate (torch._inductor.runtime.benchmarking.benchmarker) in its `benchmark`.
        """
        from torch._inductor.runtime.benchmarking import benchmarker
        from torch._inductor.virtualized import V

        choice = self._choices[index]
        inputs, out = self._arguments.get_benchmark_tensors(self._cache._is_extern(choice)).unpack()
        # what is not written must show, and another candidate's result must not stand in for it
        out.fill_(math.nan if out.is_floating_point() and out.element_size() > 1 else 0)
        returned: Any = None

        def benchmark(
            function: Any, args: Any = None, kwargs: Any = None, *rest: Any, **settings: Any
        ) -> float:
            def once() -> None:
                nonlocal returned
                returned = function(*(args or ()), **(kwargs or {}))

            body(once)
            return 0.0

        def device_benchmark(function: Any, *rest: Any, **settings: Any) -> float:
            return benchmark(function)

        with (
            _replaced(benchmarker, "benchmark", benchmark),
            _replaced(benchmarker, "benchmark_cpu", device_benchmark),
            _replaced(benchmarker, "benchmark_gpu", device_benchmark),
            V.set_graph_handler(self._graph),
        ):
            choice.benchmark(*inputs, out=out)
        if isinstance(returned, list | tuple) and returned:
            returned = returned[0]
        return returned if isinstance(returned, torch.Tensor) else out

    def close(self) -> None:
        """Let go of inputs and of what was loaded to run candidates (BenchmarkRequest.cleanup_run_fn)."""
        self._arguments, self._places = None, {}
        for choice in self._choices:
            clean: Any = getattr(_benchmark_request(choice), "cleanup_run_fn", None)
            if clean is not None:
                clean()


def _elsewhere(arguments: Any) -> Any:
    """AutotuneArgs in other memory; tensors that share theirs share it again."""
    memory: dict[int, Any] = {}
    new_storage: Any = torch.UntypedStorage

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if (copied := memory.get(storage.data_ptr())) is None:
            copied = new_storage(storage.nbytes(), device=storage.device)
            memory[storage.data_ptr()] = copied.copy_(storage)
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(copied, tensor.storage_offset(), tensor.size(), tensor.stride())

    def copies(tensors: Any) -> Any:
        return type(tensors)([copy(tensor) for tensor in tensors.input_tensors], copy(tensors.output_tensor))

    return type(arguments)(triton=copies(arguments.triton), extern=copies(arguments.extern))


def _precisions(name: str, device: str, dtypes: Collection[str]) -> dict[str, str]:
    """What else decides how an operator on these dtypes (`torch.float32`) is computed."""
    settings: dict[str, str] = {}
    if "torch.float32" in dtypes:
        settings["precision"] = torch.get_float32_matmul_precision()
        if device == "cuda" and name == "convolution":
            settings["cudnn.allow_tf32"] = str(torch.backends.cudnn.allow_tf32)
    if device == "cuda" and not {"torch.float16", "torch.bfloat16"}.isdisjoint(dtypes):
        matmul = torch.backends.cuda.matmul
        reduced = {
            "fp16": matmul.allow_fp16_reduced_precision_reduction,
            "bf16": matmul.allow_bf16_reduced_precision_reduction,
        }
        if limited := [f"{name}={allowed}" for name, allowed in reduced.items() if allowed is not True]:
            settings["reduced_precision"] = " ".join(limited)
    return settings


SPACES = frozenset(
    {
        "max_autotune_conv_backends",
        "max_autotune_flex_search_space",
        "max_autotune_gemm_backends",
        "max_autotune_gemm_search_space",
    }
)
"""Options that say which candidates there are."""

_TOLD_BY_OPERANDS = frozenset(
    {"addmm", "baddbmm", "bmm", "convolution", "int_mm", "mm", "mm_plus_mm", "scaled_mm"}
)
"""Operators that operands and the arguments of PyTorch's own kernel say all about."""


_on_trial: contextvars.ContextVar[bool] = contextvars.ContextVar("torchrelay_on_trial", default=False)


def _benchmark_request(choice: Any) -> Any:
    """ChoiceCaller.bmreq, if it has one; a subgraph's refuses to tell unless it is measured elsewhere."""
    try:
        return choice.bmreq
    except (AttributeError, AssertionError):
        return None


def _for_a_trial() -> contextvars.Context:
    """This thread's context, options included, for a thread that builds a candidate: no kernel of the artifact yet."""
    context = contextvars.copy_context()
    context.run(_on_trial.set, True)
    return context


def _operand(key: Sequence[Any]) -> tuning.Operand:
    """What AlgorithmSelectorCache.key_of tells: device, dtype, sizes, strides, offset."""
    lengths = [int(length) for length in key[2:-1]]
    half = len(lengths) // 2
    return tuning.Operand(key[1].removeprefix("torch."), tuple(lengths[:half]), tuple(lengths[half:]))


def _symbolic(node: Any) -> list[int]:
    return [i for i, size in enumerate(node.get_size()) if getattr(size, "free_symbols", None)]


def _candidate_text(choice: Any) -> str:
    """`aten mm`; `cpp_bmm`; `triton_mm ACC_TYPE='tl.float32', BLOCK_K=32, ...`. Without the number of its making."""
    from torch._inductor.select_algorithm import ExternKernelCaller

    if isinstance(choice, ExternKernelCaller):
        return f"aten {choice.name}"
    text = f"{re.sub(r'_[0-9]+$', '', choice.name)} {choice.description}".strip()
    return text if len(text) <= 4000 else f"{text[:3900]} {hashlib.sha256(text.encode()).hexdigest()}"


def _distinct(texts: Sequence[str]) -> list[str]:
    """The second of two that are alike is `text #2`."""
    seen: dict[str, int] = {}
    numbered = []
    for text in texts:
        seen[text] = seen.get(text, 0) + 1
        numbered.append(text if seen[text] == 1 else f"{text} #{seen[text]}")
    return numbered


class Guide(Protocol):
    """What `choosing` asks before it renders templates, which takes 5 to 20 ms each."""

    def expects(self, problem: tuning.Problem, device: str) -> str | None:
        """The candidate that will be taken, by its text; ATEN: PyTorch's own kernel; None: not known, render all."""

    def more(self, problem: tuning.Problem) -> Sequence[Configuration]:
        """Configurations that are to be candidates too, though Inductor does not offer them."""

    @property
    def only_more(self) -> bool:
        """Whether these are to be the only ones, beside PyTorch's own kernels."""


ATEN = "aten"


@contextlib.contextmanager
def choosing(
    choose: Callable[[Selection], int], *, least: int = 2, guide: Guide | None = None
) -> Iterator[None]:
    """Inside the block, `choose` says which candidate implements an operator; Inductor measures none. least: so many
    candidates make a choice. With a guide, only candidates that may be taken are rendered, and there can be more.

    Wraps torch._inductor.select_algorithm.AlgorithmSelectorCache.__call__, which takes a single choice as it is and
    puts off nothing (no MultiTemplateBuffer): what a choice was made for does not show in the code. Left to Inductor:
    operators that all ranks must measure together, CUTLASS (it finds out its workspace while it measures), and whatever
    is to be decided otherwise than by time.
    """
    from torch._inductor import config
    from torch._inductor.codegen.common import KernelTemplate
    from torch._inductor.select_algorithm import AlgorithmSelectorCache
    from torch._inductor.virtualized import V

    original = AlgorithmSelectorCache.__call__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        ours = not config.deterministic and not _left_to_inductor(given)
        problem = None
        if guide is not None and ours:
            given["choices"], problem = _narrowed(self, given, guide)
        given["choices"] = [choice for made in given["choices"] if (choice := _rendered(made)) is not None]
        for preprocess in self.preprocessing_fns:
            given["choices"] = preprocess(given["choices"])
        if len(given["choices"]) >= least and ours:
            given["choices"] = [given["choices"][choose(Selection(self, given, problem))]]
        del given["self"]
        return original(self, **given)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(AlgorithmSelectorCache, "__call__", call))
        if guide is not None:
            stack.enter_context(V.set_choices_handler(_putting_off()))
            append = _putting_off_cpp(KernelTemplate.maybe_append_choice)
            stack.enter_context(_replaced(KernelTemplate, "maybe_append_choice", append))
        yield


def _putting_off_cpp(append: Callable[..., Any]) -> Callable[..., Any]:
    """torch._inductor.codegen.common.KernelTemplate.maybe_append_choice, that renders no C++ template yet."""
    from torch._inductor.codegen.cpp_template import CppTemplate

    @functools.wraps(append)
    def maybe_append_choice(self: Any, choices: list[Any], **kwargs: Any) -> Any:
        if not isinstance(getattr(self, "_wrapped", self), CppTemplate):
            return append(self, choices, **kwargs)
        choices.append(_PutOff(lambda: self.generate(**kwargs)))
        return None

    return maybe_append_choice


@functools.cache
def _putting_off() -> Any:
    """A choices handler (torch._inductor.choices.InductorChoices) whose templates' candidates are Unrendered."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.select_algorithm import ExternKernelChoice

    class PuttingOff(InductorChoices):
        def _finalize_template_configs(
            self,
            template_choices: Any,
            kernel_inputs: Any,
            templates: Any,
            op_name: str,
            kwarg_overrides: Any = None,
        ) -> list[Any]:
            made = super()._finalize_template_configs(
                template_choices, kernel_inputs, templates, op_name, kwarg_overrides
            )

            def others(template: Any, configurations: Sequence[Configuration]) -> list[Any]:
                return _with_configurations(
                    configurations,
                    lambda: self.get_ktc(
                        kernel_inputs, template, op_name, (kwarg_overrides or {}).get(template.uid, {})
                    ),
                    (template.uid, kernel_inputs.device_type, op_name),
                )

            return [
                choice if isinstance(choice.template, ExternKernelChoice) else _Unrendered(choice, others)
                for choice in made
            ]

    return PuttingOff()


class _PutOff:
    """Stands in for a C++ template's candidate, which takes Jinja as long as the rest of lowering its operator."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: list[Any] = []

    def may_be(self, text: str) -> bool:
        return not text.startswith(("aten ", "triton_"))

    def rendered(self) -> Any:
        """None: the template cannot do this after all."""
        if not self._made:
            try:
                self._made = [self._make()]
            except NotImplementedError:
                self._made = [None]
        return self._made[0]


class _Unrendered(_PutOff):
    """A torch._inductor.kernel_template_choice.KernelTemplateChoice that stands in for its own candidate."""

    def __init__(self, made: Any, others: Callable[[Any, Sequence[Configuration]], list[Any]]) -> None:
        super().__init__(lambda: made.choice)
        self.made = made
        self._others = others
        self.template = made.template
        self.inputs = made.inputs

    @property
    def choice(self) -> _Unrendered:
        return self

    @property
    def layout(self) -> Any:
        return self.made.layout

    @layout.setter
    def layout(self, layout: Any) -> None:
        self.made.layout = layout

    def may_be(self, text: str) -> bool:
        """Whether this could be the candidate: all that its text says of what it is made with is so."""
        if not re.match(rf"triton_{re.escape(self.template.name)} ", text):
            return False
        told = dict(re.findall(r"\b([A-Za-z_]+)=([^,]+)", text))
        parameters = self.made.params.to_kwargs()
        return all(repr(value) == told[name] for name, value in parameters.items() if name in told)

    def others(self, configurations: Sequence[Configuration]) -> list[_Unrendered]:
        """The same template in other configurations."""
        found = self._others(self.template, [c for c in configurations if c.template == self.template.name])
        for made in found:
            made.layout = self.layout
        return [_Unrendered(made, self._others) for made in found]


def _rendered(choice: Any) -> Any:
    return choice.rendered() if isinstance(choice, _PutOff) else choice


def _with_configurations(
    configurations: Sequence[Configuration], make: Callable[[], Iterable[Any]], heuristic_key: tuple[str, ...]
) -> list[Any]:
    """What `make` gives when a template's heuristic (BaseConfigHeuristic.mm_configs) has these configurations."""
    from torch._inductor.template_heuristics.registry import get_template_heuristic
    from torch._inductor.template_heuristics.triton import GemmConfig

    heuristic: Any = get_template_heuristic(*heuristic_key)
    if not configurations or not all(type(c) is GemmConfig for c in getattr(heuristic, "mm_configs", [None])):
        return []
    wanted = [
        GemmConfig(c.block_m, c.block_n, c.block_k, c.stages, c.warps, group_m=c.group_m)
        for c in configurations
    ]
    with _replaced(heuristic, "mm_configs", wanted), _replaced(heuristic, "should_scale_configs", False):
        return list(make())


def _narrowed(cache: Any, given: Mapping[str, Any], guide: Guide) -> tuple[list[Any], tuning.Problem | None]:
    """An operator's candidates without those that will not be taken, and with the guide's own; and the problem, if it
    can be told before any is rendered. To render a template fixes its operands' strides, often to others."""
    choices = list(given["choices"])
    templates = [choice for choice in choices if isinstance(choice, _PutOff)]
    ready = [choice for choice in choices if not isinstance(choice, _PutOff)]
    if not templates or given["name"] not in _TOLD_BY_OPERANDS or given.get("input_gen_fns"):
        return choices, None
    selection = Selection(cache, {**given, "choices": ready})
    if not selection.aten:
        return choices, None
    expected = guide.expects(selection.problem, selection.device)
    tunable = [template for template in templates if isinstance(template, _Unrendered)]
    if expected is None:
        tried = {str(template.made.params.to_kwargs()) for template in tunable}
        first = {template.template.uid: template for template in tunable}
        more = [
            other for template in first.values() for other in template.others(guide.more(selection.problem))
        ]
        if guide.only_more:
            return [*ready, *more], selection.problem
        return [
            *choices,
            *(other for other in more if str(other.made.params.to_kwargs()) not in tried),
        ], selection.problem
    if expected == ATEN or expected in selection.candidates:
        return ready, selection.problem
    configuration = configuration_of(expected)
    offered = [template for template in templates if template.may_be(expected)]
    if not offered and configuration is not None:
        first = {template.template.uid: template for template in tunable}
        offered = [other for template in first.values() for other in template.others([configuration])]
    for template in offered:
        rendered = _rendered(template)
        if rendered is not None and _candidate_text(rendered) == expected:
            return [*ready, template], selection.problem
    return choices, selection.problem


def _left_to_inductor(given: Mapping[str, Any]) -> bool:
    from torch._inductor import ir

    return (
        bool(given.get("is_collective"))
        or given.get("best_config_future") is not None
        or given.get("min_speedup_threshold", 1.0) != 1.0
        or bool(given.get("benchmark_with_cudagraphs"))
        or not isinstance(given["layout"], ir.Layout)
        or given["layout"].device.type not in ("cpu", "cuda")
        or any(
            type(choice).__name__.startswith("CUTLASS") or getattr(choice, "hint_override", None) is not None
            for choice in given["choices"]
        )
    )


def mm_plus_mm(a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sum of two products as one operator: of what is lowered, torch._inductor.kernel.mm_plus_mm's."""
    if isinstance(a, torch.Tensor):
        return torch.mm(a, b) + torch.mm(c, d)
    from torch._inductor.kernel.mm_plus_mm import tuned_mm_plus_mm

    lower: Any = tuned_mm_plus_mm
    return lower(a, b, c, d)


mm_plus_mm._inductor_lowering_function = True  # type: ignore[attr-defined]


def select_alone(
    target: Callable[..., Any],
    call: Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]],
    operands: Sequence[tuning.Operand],
    offsets: Sequence[int],
    constants: Collection[int],
    device: torch.device,
    *,
    channels_last: bool | None,
    guide: Guide | None = None,
) -> list[Selection]:
    """What Inductor chooses from when it lowers a graph of one operator (torch._inductor.graph.GraphLowering).

    call(operands): the operator's arguments. offsets: where each operand begins in its storage, in elements.
    constants: operands that are constants of the graph. channels_last: as in a graph where Inductor prefers it; None:
    Inductor decides. guide: says which candidates there are.
    """
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = FakeTensorMode(allow_non_fake_inputs=True)  # constants
    graph, root = torch.fx.Graph(), torch.nn.Module()
    nodes: list[Any] = []
    inputs: list[Any] = []
    for i, (operand, offset) in enumerate(zip(operands, offsets, strict=True)):
        dtype = getattr(torch, operand.dtype)
        if i in constants:
            held = torch.empty_strided(operand.size, operand.stride, dtype=dtype, device=device)
            root.register_buffer(f"constant_{i}", held.zero_())
            nodes.append(graph.get_attr(f"constant_{i}"))
            continue
        with mode:
            if offset:
                steps = zip(operand.size, operand.stride, strict=True)
                length = offset + 1 + sum((size - 1) * stride for size, stride in steps)
                inputs.append(torch.empty(length, dtype=dtype, device=device))
            else:
                inputs.append(torch.empty_strided(operand.size, operand.stride, dtype=dtype, device=device))
        node = graph.placeholder(f"operand_{i}")
        if offset:
            view = (node, list(operand.size), list(operand.stride), offset)
            node = graph.call_function(torch.ops.aten.as_strided.default, view)
        nodes.append(node)
    arguments, named = call(nodes)
    graph.output((graph.call_function(target, arguments, named),))
    gm = torch.fx.GraphModule(root, graph)
    FakeTensorProp(gm, mode).propagate(*inputs)
    found: list[Selection] = []

    def record(selection: Selection) -> int:
        found.append(selection)
        return selection.aten[0] if selection.aten else 0

    with (
        tracing(mode),
        V.set_fake_mode(mode),
        choosing(record, least=1, guide=guide),
        torch.no_grad(),
    ):
        lowering = GraphLowering(gm, example_inputs=inputs, is_inference=True, layout_opt=channels_last)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
    return found


PADDING = "pad_mm."
"""Begins the names of problems that ask whether a product's operands are padded."""


class Padding:
    """Whether a product's operands are padded to sizes that the device likes better, as candidates.

    `mm`, `addmm` or `bmm` of tensors, fake ones as a rule. excluded: those of mat1 and mat2 whose padding costs
    nothing in their graph. From torch._inductor.fx_passes.pad_mm, which measures each anew and takes its padding if it
    is a tenth faster.
    """

    aten: list[int]

    def __init__(self, op: str, tensors: Sequence[torch.Tensor], excluded: Collection[str]) -> None:
        *bias, mat1, mat2 = tensors
        self._op = op
        self._tensors = mat1, mat2, *bias
        self._excluded = frozenset(excluded)
        self._functions: list[Callable[[], Any]] = []
        self.device: str = mat1.device.type
        self.candidates = [f"aten {op}", f"aten padded {op}"]
        self.aten = [0]
        operands = tuple(_operand_of(tensor) for tensor in tensors)
        size = (*mat1.shape[:-1], mat2.shape[-1])
        settings = _precisions(op, self.device, {str(tensor.dtype) for tensor in tensors})
        if excluded:
            settings["excluded"] = " ".join(sorted(excluded))
        result = tuning.Operand(operands[-1].dtype, size, tuning.contiguous(size))
        self.problem = tuning.Problem(PADDING + op, operands, result, tuple(sorted(settings.items())))

    def begin_building(self) -> Building:
        return Building()

    def prepare(self, seed: int) -> None:
        """Have pad_mm make the inputs and both functions, which it hands to what measures them."""
        from torch._inductor.fx_passes import pad_mm

        functions: list[Callable[[], Any]] = []

        def measured(function: Callable[[], Any]) -> float:
            functions.append(function)
            return 1.0

        with contextlib.ExitStack() as stack:
            for name, value in (
                ("should_exclude_padding_time", lambda match, name: name in self._excluded),
                ("get_cached_should_pad", lambda key: None),
                ("set_cached_should_pad", lambda key, value: None),
                ("get_cached_base_mm_benchmark_time", lambda key: None),
                ("set_cached_base_mm_benchmark_time", lambda key, value: None),
                ("get_do_bench", lambda: measured),
            ):
                stack.enter_context(_replaced(pad_mm, name, value))
            stack.enter_context(torch.random.fork_rng(devices=[0] if self.device == "cuda" else []))
            torch.manual_seed(seed)
            packet = getattr(torch.ops.aten, self._op)
            mat1, mat2, *bias = self._tensors
            inspect.unwrap(pad_mm._should_pad)(None, mat1, mat2, packet, *bias)
        if len(functions) != len(self.candidates):
            raise RuntimeError(f"{self.problem.text()} is not decided by measuring")
        self._functions = functions

    def move(self, place: int) -> bool:
        return False

    def reference(self) -> None:
        """Both are PyTorch's own product of the same numbers."""

    def run(self, index: int, body: Callable[[Callable[[], Any]], None]) -> torch.Tensor:
        body(self._functions[index])
        return torch.empty(())

    def close(self) -> None:
        self._functions = []


def fake_tensors(operands: Sequence[tuning.Operand], device: str) -> list[torch.Tensor]:
    """Tensors without data (torch._subclasses.FakeTensorMode)."""
    with FakeTensorMode():
        return [
            torch.empty_strided(x.size, x.stride, dtype=getattr(torch, x.dtype), device=device)
            for x in operands
        ]


def _operand_of(tensor: torch.Tensor) -> tuning.Operand:
    return tuning.Operand(
        str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride())
    )


@contextlib.contextmanager
def deciding_padding(choose: Callable[[Padding], int]) -> Iterator[None]:
    """Inside the block, `choose` says whether operands are padded where Inductor tunes and would measure that.

    Wraps torch._inductor.fx_passes.pad_mm._should_pad. Sizes that vary are left to Inductor.
    """
    from torch._inductor import config
    from torch._inductor.fx_passes import pad_mm

    remembering: Any = pad_mm._should_pad
    should_pad: Any = inspect.unwrap(remembering)

    @functools.wraps(should_pad)  # which Padding finds beneath
    def decided(match: Any, mat1: Any, mat2: Any, op: Any, input: Any = None) -> bool:
        tensors = [mat1, mat2] if input is None else [input, mat1, mat2]
        vary = any(isinstance(n, torch.SymInt) for x in tensors for n in (*x.shape, *x.stride()))
        if vary or not (config.max_autotune or config.max_autotune_gemm):
            return bool(remembering(match, mat1, mat2, op, input))

        def known(key: str) -> bool:
            excluded = [name for name in ("mat1", "mat2") if pad_mm.should_exclude_padding_time(match, name)]
            return choose(Padding(op.__name__, tensors, excluded)) == 1

        with _replaced(pad_mm, "get_cached_should_pad", known):
            return bool(should_pad(match, mat1, mat2, op, input))

    with _replaced(pad_mm, "_should_pad", decided):
        yield


def options_in_force(options: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Set torch._inductor.config entries inside a block."""
    from torch._inductor import config

    manager: contextlib.AbstractContextManager[Any] = config.patch(dict(options))
    return manager


class _OnlyLowering:
    """A Scout that scouts from the beginning."""

    scouting = True

    def tell(self) -> None: ...


def select_in(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Selection]:
    """What Inductor chooses from when it lowers a graph that Dynamo has traced; nothing is compiled."""
    found: list[Selection] = []

    def record(selection: Selection) -> int:
        found.append(selection)
        return selection.aten[0] if selection.aten else 0

    with choosing(record, least=1), torch.no_grad(), contextlib.suppress(Scouted):
        inductor_compile(gm, inputs, {}, on_lowering=lambda backward: None, scout=_OnlyLowering())
    return found


def keep_gpu_busy(seconds: float) -> None:
    """Have the current stream wait for about so long before what comes next (torch.cuda._sleep, in clock cycles)."""
    sleep: Any = torch.cuda._sleep
    sleep(int(seconds * 1.5e9))


# --- load side -------------------------------------------------------------------------------------------


class _Libraries(threading.local):
    """The prebuilt C++ libraries of the artifact that this thread is loading."""

    table: Mapping[tuple[tuple[str, ...], str], Path] | None = None


_loading = _Libraries()


def _install_library_lookup() -> None:
    """For the thread that loads an artifact, and else as before: AsyncCompile.cpp_pybinding asks the artifact
    first, CompiledTritonKernels.key names its kernels as the worker did, use_process_pool starts no processes
    (there is nothing to compile), autotune_cache's inductor_meta_from_config says that there are no tuning
    caches to consult (winners are in the artifact), rather than digest every source file of Triton, and AutotuneCache
    has none, rather than digest every source file of PyTorch."""
    from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.runtime import autotune_cache

    original = AsyncCompile.cpp_pybinding
    if getattr(original, "_torchrelay", False):
        return

    @functools.wraps(original)
    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        path = (_loading.table or {}).get((tuple(argtypes), source_code))
        if path is None:
            return original(self, argtypes, source_code)
        module = CppPythonBindingsCodeCache._load_library(str(path), path.stem)
        return getattr(module, CppPythonBindingsCodeCache.entry_function)

    cpp_pybinding._torchrelay = True  # type: ignore[attr-defined]
    AsyncCompile.cpp_pybinding = cpp_pybinding  # type: ignore[method-assign]
    upstream_key = CompiledTritonKernels.key

    def key(kernel_src: str) -> str:
        return upstream_key(kernel_src) if _loading.table is None else kernel_key(kernel_src)

    CompiledTritonKernels.key = staticmethod(key)  # type: ignore[method-assign]
    upstream_pool: Callable[[], bool] = AsyncCompile.use_process_pool

    def use_process_pool(cls: Any) -> bool:
        return _loading.table is None and upstream_pool()

    AsyncCompile.use_process_pool = classmethod(use_process_pool)  # type: ignore[method-assign,assignment]
    upstream_meta = autotune_cache.inductor_meta_from_config

    def inductor_meta_from_config() -> dict[str, object]:
        return upstream_meta() if _loading.table is None else {"autotune_local_cache": False}

    autotune_cache.inductor_meta_from_config = inductor_meta_from_config
    upstream_cache = autotune_cache.AutotuneCache.create

    def create(*args: Any, **kwargs: Any) -> Any:
        return upstream_cache(*args, **kwargs) if _loading.table is None else None

    autotune_cache.AutotuneCache.create = staticmethod(create)  # type: ignore[method-assign]


def deserialize(
    bundle: bytes,
    libraries: Mapping[tuple[tuple[str, ...], str], Path],
    triton_modules: Mapping[str, Path],
    inputs: Sequence[Any],
    *,
    cudagraphs: bool,
    device_index: int = 0,
    groups: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """A serialized callable back into one that runs, forward and backward.

    UNPICKLES `bundle`: call it only with bytes whose signature holds. Follows
    torch/_functorch/_aot_autograd/aot_autograd_result.py: deserialize_bundled_cache_entry, but gives the real
    inputs and the caller's CUDA-graph choice, and leaves guards to the caller.

    libraries: C++ kernels, by what generated code asks for. triton_modules: Triton's own C extensions, by
    triton_module_id. inputs: the example inputs Dynamo gave. device_index: the GPU to run on (artifacts are
    compiled for GPU 0). groups: what generated code calls a process group, and its name here.
    """
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool

    preload_loader()  # running the code needs all of it, whether a download imported it meanwhile or not
    entry, kernels, constant_args = pickle.loads(bundle)
    if kernels or constant_args:
        raise TypeError("the artifact refers to user-written Triton kernels")
    entry.guards_expr = None
    graphs: list[Any] = [
        part.result
        for part in (entry.compiled_fw, entry.compiled_bw)
        if getattr(part, "result", None) is not None
    ]
    without_lowering = not cudagraphs and all(_needs_no_lowering(graph.source_code) for graph in graphs)
    for graph in graphs:
        if without_lowering:
            graph.source_code = graph.source_code.replace(_HEAVY_IMPORT, _LIGHT_IMPORT)
        if device_index:
            _move_to_device(graph, device_index)
        if groups:
            _rename_groups(graph, groups)
    if triton_modules:
        _triton_modules.add(triton_modules)
    _install_library_lookup()
    _loading.table = libraries
    light = contextlib.ExitStack()
    try:
        if without_lowering:
            light.enter_context(_without_lowering())
        compiled = entry.wrap_post_compile(
            list(inputs),
            entry.sanitized_aot_config,
            {"cudagraphs": BoxedBool(cudagraphs), "boxed_forward_device_index": BoxedDeviceIndex(None)},
        )
    finally:
        light.close()
        _loading.table = None

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        return compiled(list(args))

    return call


@contextlib.contextmanager
def _without_lowering() -> Iterator[None]:
    """Answer FxGraphCache.cache_hit_post_compile's `from .graph import GraphLowering` without importing all of
    Inductor's lowering: it only looks whether a test asked to see the generated code."""
    if _LOWERING in sys.modules:
        yield
        return
    import torch._inductor as package

    stub = _LoweringStub(_LOWERING)
    sys.modules[_LOWERING] = stub
    package.graph = stub
    try:
        yield
    finally:
        if sys.modules.get(_LOWERING) is stub:
            del sys.modules[_LOWERING]
        if getattr(package, "graph", None) is stub:
            del package.graph


_LOWERING = "torch._inductor.graph"


class _LoweringStub(ModuleType):
    """Stands for torch._inductor.graph while an artifact loads. Only codecache is answered by the stub itself:
    whoever else asks meanwhile, in any thread, gets the real module's attribute."""

    def __getattr__(self, name: str) -> Any:
        asker = sys._getframe(1).f_globals.get("__name__")
        if name == "GraphLowering" and asker == "torch._inductor.codecache":
            return _NoLowering
        if name.startswith("__"):  # the import system's own questions
            raise AttributeError(name)
        if sys.modules.get(_LOWERING) is self:
            del sys.modules[_LOWERING]
        return getattr(importlib.import_module(_LOWERING), name)


class _NoLowering:
    save_output_code = None


class _ExternKernels:
    """torch._inductor.select_algorithm.extern_kernels for generated code that runs where nothing is compiled.

    That module imports all of Inductor's lowering, 0.4 s of every start, to hold what are mostly torch's own
    functions: those are answered directly, and the module is imported when another one is asked for.
    """

    def __getattr__(self, name: str) -> Any:
        if name in _TORCH_KERNELS and hasattr(torch, name):
            value = getattr(torch, name)
        else:
            from torch._inductor.select_algorithm import extern_kernels as upstream

            value = getattr(upstream, name)
        setattr(self, name, value)
        return value


_TORCH_KERNELS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "convolution", "_int_mm", "_scaled_mm", "_grouped_mm"}
)
_OPERATOR = re.compile(
    r"extern_kernels\.(?P<kernel>\w+)|torch\.ops\.(?P<space>\w+)\b(?P<rest>(?:\.\w+)*)|inductor_ops\.(?P<inductor>\w+)"
)


def _needs_no_lowering(source: str) -> bool:
    """Whether generated Python calls nothing that Inductor's lowering modules define when they are imported."""
    for found in _OPERATOR.finditer(source):
        name = found["kernel"] or found["inductor"] or f"{found['space']}{found['rest']}"
        plain = (
            name in _TORCH_KERNELS
            if found["kernel"]
            else found["space"] in ("aten", "prims", "_quantized")
            or name in ("inductor", "inductor._alloc_from_pool")
        )
        if not plain:
            return False
    return True


_HEAVY_IMPORT = "from torch._inductor.select_algorithm import extern_kernels\n"
_LIGHT_IMPORT = f"from {__name__} import extern_kernels\n"

extern_kernels = _ExternKernels()


class _TritonModules:
    """Prebuilt C extensions of Triton's that verified artifacts brought, by triton_module_id."""

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        self.installed = False

    def add(self, files: Mapping[str, Path]) -> None:
        """Have Triton use these instead of calling a C compiler, from now on."""
        self.files.update(files)
        if not self.installed:
            self.installed = True
            self._install()

    def _install(self) -> None:
        for owner in _triton_builders():
            original = owner.compile_module_from_src

            @functools.wraps(original)
            def compile_module_from_src(
                src: str, name: str, *args: Any, original: Any = original, **kwargs: Any
            ) -> Any:
                path = self.files.get(triton_module_id(src, name))
                return original(src, name, *args, **kwargs) if path is None else _extension(name, path)

            owner.compile_module_from_src = compile_module_from_src


_triton_modules = _TritonModules()


def _extension(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_DEVICE_SPELLINGS = (
    (re.compile(r"(_DeviceGuard\()0\)"), r"\g<1>{})"),
    (re.compile(r"(set_device\()0\)"), r"\g<1>{})"),
    (re.compile(r"(get_raw_stream\()0\)"), r"\g<1>{})"),
    (re.compile(r"(type='cuda', index=)0\b"), r"\g<1>{}"),
    (re.compile(r"(cuda:)0\b"), r"\g<1>{}"),
)
"""How Inductor's generated Python spells GPU 0."""


def _move_to_device(graph: Any, index: int) -> None:
    """Rewrite a CompiledFxGraph compiled for GPU 0 so that it runs on GPU `index`.

    The Triton kernels' own sources are part of the text: their cached binaries are found by the new text's key.
    """
    before = graph.source_code
    graph.source_code = _for_device(before, index)
    graph.device_idxs = type(graph.device_idxs)(index if i == 0 else i for i in graph.device_idxs)
    graph.cache_key = f"{graph.cache_key}_{index}"
    bundle = graph._triton_bundle
    if bundle is None:
        return
    renamed = {
        kernel_key(source): kernel_key(_for_device(source, index)) for source in _kernel_sources(before)
    }
    moved = []
    for static in bundle.static_autotuners:
        static.kernel.triton_meta["device"] = index
        static.kernel.device_props = static.kernel.device_props._replace(index=index)
        for result in static.kernel.compile_results:
            result.compile_meta["device"] = index
        moved.append(dataclasses.replace(static, cache_key=renamed.get(static.cache_key, static.cache_key)))
    graph._triton_bundle = dataclasses.replace(bundle, static_autotuners=moved)


def _rename_groups(graph: Any, groups: Mapping[str, str]) -> None:
    """Have a CompiledFxGraph's collectives use process groups of these names."""
    for name, here in groups.items():
        graph.source_code = graph.source_code.replace(repr(name), repr(here))
    graph.cache_key = f"{graph.cache_key}_{'_'.join(groups.values())}"


def _for_device(source: str, index: int) -> str:
    for pattern, replacement in _DEVICE_SPELLINGS:
        source = pattern.sub(replacement.format(index), source)
    return source


def _kernel_sources(generated: str) -> Iterator[str]:
    """The Triton sources that generated Python passes to `async_compile.triton(name, source, ...)`."""
    for node in ast.walk(ast.parse(generated)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "triton":
            for argument in node.args[1:2]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def preload_loader() -> None:
    """Import what loading an artifact needs, without creating Inductor's process pool."""
    with environment(TORCH_WARM_POOL="0"):
        import torch._dynamo.aot_compile_types
        import torch._functorch._aot_autograd.aot_autograd_result
        import torch._functorch.aot_autograd
        import torch._inductor.async_compile
        import torch._inductor.codecache
        import torch._inductor.codegen.memory_planning
        import torch._inductor.debug
        import torch._inductor.output_code  # noqa: F401


def preload_training() -> None:
    """Import what the first step of a script imports that trains a compiled model on several ranks, as far as it is the
    same for nearly all of them; without creating Inductor's process pool or initialising CUDA."""
    with environment(TORCH_WARM_POOL="0"), _asking_nvml():
        preload_loader()
        import torch._dynamo.backends.registry
        import torch._dynamo.convert_frame
        import torch._inductor.decomposition
        import torch.distributed.checkpoint.state_dict
        import torch.distributed.fsdp
        import torch.distributed.tensor.experimental
        import torch.distributed.tensor.parallel
        import torch.export._trace
        import torch.fx.experimental.validator
        import torch.nn.attention.flex_attention
        import torch.profiler

        torch._dynamo.backends.registry.list_backends()


def _asking_nvml() -> contextlib.AbstractContextManager[None]:
    """Whether there is a GPU NVML says: torch 2.11 asks as it imports torch._inductor.runtime.benchmarking, and CUDA's
    own answer would keep forks from CUDA. NVML is asked in a fork, for it starts a thread that goes on."""
    return _replaced(torch.cuda, "is_available", _nvml_sees_a_gpu)


@functools.cache
def _nvml_sees_a_gpu() -> bool:
    child = os.fork()
    if child == 0:
        seen = False
        try:
            seen = torch.cuda._device_count_nvml() > 0
        finally:
            os._exit(0 if seen else 1)
    return os.waitpid(child, 0)[1] == 0


_NO_ERROR, _NO_DEVICE = 0, 100
"""Of cuInit."""


def cuda_starts() -> bool:
    """Whether CUDA can be initialised in this process, a fork, as in one that was started: not if it was before.
    Initialises the driver, and takes no memory of a GPU. True where there is no CUDA."""
    if torch.version.cuda is None:
        return True
    if torch.cuda._is_in_bad_fork():
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return driver.cuInit(0) in (_NO_ERROR, _NO_DEVICE)


# --- Dynamo side -----------------------------------------------------------------------------------------


def static_input_type(node: torch.fx.Node) -> str:
    """Dynamo's mark on a placeholder whose address does not change: '', 'guarded' or 'unguarded'."""
    return str(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type", "") or "")


def trace_seconds() -> float:
    """Seconds since Dynamo began on the frame whose graph this thread compiles; 0 outside of one
    (torch._dynamo.utils.get_metrics_context; its start is private)."""
    from torch._dynamo.utils import get_metrics_context

    context = get_metrics_context()
    return (time.time_ns() - context._start_time_ns) / 1e9 if context.in_progress() else 0.0


def job_store(endpoint: tuple[str, int] | None, timeout: timedelta) -> Any:
    """The c10d store that the processes of this job share; None where there is none (yet).

    A connection of our own to the store at `endpoint`, else to the one behind the default process group
    (torch.distributed.distributed_c10d._get_default_store): waiting on it holds up nobody's collectives. Of a group
    whose store is not TCP, that store itself. Raises RuntimeError where it does not answer.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return None
    from torch._C import _distributed_c10d as c10d

    if endpoint is None:
        if not dist.is_initialized():
            return None
        from torch.distributed.distributed_c10d import _get_default_store

        store: Any = _get_default_store()
        while isinstance(store, c10d.PrefixStore):
            store = store.underlying_store
        if not isinstance(store, c10d.TCPStore):
            return store
        endpoint = store.host, store.port
    return c10d.TCPStore(*endpoint, None, False, timeout, wait_for_workers=False)


def kernels_measured() -> int:
    """How often this process chose between a Triton kernel's candidates by running them
    (torch._dynamo.utils.compilation_time_metrics of two methods of CachingAutotuner)."""
    from torch._dynamo.utils import compilation_time_metrics

    methods = ("benchmark_all_configs", "coordinate_descent_tuning")
    return sum(len(compilation_time_metrics.get(f"CachingAutotuner.{method}", ())) for method in methods)


def benchmarks_run() -> int:
    """How often Inductor timed something in this process (torch._inductor.runtime.benchmarking.time_and_count)."""
    from torch._dynamo.utils import counters

    return sum(
        count
        for name, count in counters["inductor"].items()
        if name.startswith("benchmarking.") and name.endswith((".benchmark_cpu", ".benchmark_gpu"))
    )


def set_default_backend(name: str | None) -> None:
    """torch.compiler.set_default_backend, from torch 2.13 on. Raises Unsupported before."""
    if not hasattr(torch.compiler, "set_default_backend"):
        raise Unsupported(
            f"torch {torch.__version__} has no default back end to set",
            hint='Name it: torch.compile(model, backend="torchrelay")',
        )
    torch.compiler.set_default_backend(name)


def codegen_threads() -> int:
    """Threads that Inductor compiles CPU kernels for (torch._inductor.codegen.cpp_utils.parallel_num_threads)."""
    from torch._inductor import config

    return config.cpp.threads if config.cpp.threads > 0 else torch.get_num_threads()


def current_options() -> dict[str, Any]:
    """torch._inductor.config as it is now, however it came to be so."""
    from torch._inductor import config

    return dict(config.get_config_copy())


def current_aot_options() -> dict[str, Any]:
    """torch._functorch.config as it is now."""
    from torch._functorch import config

    return dict(config.get_config_copy())


def changed_options(among: Collection[str] | None = None) -> dict[str, Any]:
    """Entries of torch._inductor.config that this process set to something else: all, or of those named."""
    import torch._inductor.config

    config: Any = torch._inductor.config

    # By value, not by "was it set": Inductor itself sets some entries to what they are.
    entries = config._config
    values = config.get_config_copy() if among is None else {name: getattr(config, name) for name in among}
    return {
        name: value for name, value in values.items() if name in entries and value != entries[name].default
    }


def option_reaches_code(name: str) -> bool:
    """Whether an Inductor option outside the closed table can change the compiled code.

    Those that only say where and how to compile, cache or log do not.
    """
    return not name.startswith(_LOCAL_OPTIONS)


_LOCAL_OPTIONS = (
    "compile_threads",
    "worker_",
    "fx_graph_",
    "autotune_local_cache",
    "autotune_remote_cache",
    "bundled_autotune",
    "bundle_triton",
    "force_disable_caches",
    "trace.",
    "verbose_progress",
    "debug",
    "profile",
    "cpp_cache",
    "quiesce",
    "autotune_in_subproc",
    "use_static_",
    "strict_static_",
    "cpp.threads",
    "is_nightly",
    "unsafe_skip_cache",
)


def user_error(error: Exception) -> Exception:
    """The same error, made so that Dynamo hands it to the user as it is (torch._dynamo.exc.ShortenTraceback).

    The result is an instance of the error's own class, so `except` clauses see the typed error.
    """
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    both = type(kind.__name__, (kind, ShortenTraceback), {"__module__": kind.__module__})
    result: Exception = both.__new__(both)  # type: ignore[call-overload]
    result.args = error.args
    result.__dict__.update(error.__dict__)
    result.first_useful_frame = None  # type: ignore[attr-defined]
    return result
