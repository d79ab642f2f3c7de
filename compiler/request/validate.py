"""Stage 2, at the gate: a request from anyone in; nothing out, or the RelayError that says what is wrong.

Torch-free. Run by the gateway before a worker sees the graph, and again by the worker. The work is linear
in the request's size: each node is visited once, each distinct expression parsed once, and nesting is
bounded. It also holds the request to its canonical form (tables sorted, constants and subgraphs numbered by
first use, nothing unused), so that one computation has one key.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from ..errors import BadOption, ForbiddenTarget, LimitExceeded, MalformedRequest, SchemaMismatch
from ..tuning import records
from . import allowed_names, codec, meshes, schema, size_expr, tuning_pins
from .operator_table import table

MAX_DIMENSIONS = 64
MAX_EXPRESSION_TEXT = 1 << 18
"""Characters of all distinct expressions together."""
MAX_CONFIGS = 1024
"""The most configurations of one user-written kernel."""

MAX_LOCKED = 10_000
"""Entries of a request's tuning lock."""

_INT64 = range(-(1 << 63), 1 << 63)
_BIG_INT = re.compile(r"-?[1-9][0-9]{0,99}", re.ASCII)
_OVERLOAD = re.compile(r"torch\.ops\.\w+\.\w+\.\w+", re.ASCII)
_VERSION = re.compile(r"[A-Za-z0-9_.+\-]{0,64}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_.+\-/()\[\] ]{0,128}", re.ASCII)
_CAPABILITY = re.compile(r"[0-9]{1,2}\.[0-9]{1,2}[a-z]?", re.ASCII)


def check_request(request: schema.GraphRequest, limits: codec.Limits) -> None:
    """Raise the RelayError that names what is wrong with `request`; return if nothing is.

    SchemaMismatch, LimitExceeded, ForbiddenTarget, BadExpression, BadOption, Unsupported (no table for this
    torch), or MalformedRequest for whatever breaks the form.
    """
    if request.schema != schema.SCHEMA:
        raise SchemaMismatch(f"request has schema {request.schema}, this side speaks {schema.SCHEMA}")
    _toolchain(request.toolchain)
    _target(request.target)
    ops = table.load(request.toolchain.torch)
    _RequestCheck(request, limits, ops).run()


class _RequestCheck:
    """One request's check: what its parts share (symbols, expressions seen, nodes counted) is kept here."""

    def __init__(self, request: schema.GraphRequest, limits: codec.Limits, ops: table.OperatorTable) -> None:
        self._request = request
        self._limits = limits
        self._ops = ops
        self._symbols = {f"s{index}" for index in range(len(request.symbols))}
        self._devices = {"cpu", "meta", request.target.kind}
        self._expressions: set[str] = set()
        self._expression_text = 0
        self._nodes = 0
        self._constants_used = 0
        self._kernels_used = 0
        self._meshes_used = 0
        self._seen_values = 0

    def run(self) -> None:
        request, limits = self._request, self._limits
        if len(request.inputs) > limits.inputs:
            raise LimitExceeded(f"{len(request.inputs)} inputs, {limits.inputs} allowed")
        if len(request.symbols) + len(request.relations) > limits.inputs:
            raise LimitExceeded(f"more than {limits.inputs} symbols and relations")
        if request.exact_sizes and not request.symbols:
            raise MalformedRequest("exact sizes in a request without symbols")
        for index, symbol in enumerate(request.symbols):
            self._symbol(index, symbol)
        for relation in request.relations:
            self._expression(relation)
        for index, item in enumerate(request.inputs):
            self._input(f"input {index}", item)
        self._bases(request.bases)
        self._constants(request.constants)
        self._kernels(request.kernels)
        meshes.check(request.meshes)
        self._graph(request.graph, 1)
        _libraries(request)
        if self._kernels_used != len(request.kernels):
            raise MalformedRequest(f"{len(request.kernels) - self._kernels_used} kernels are not used")
        if self._meshes_used != len(request.meshes):
            raise MalformedRequest(f"{len(request.meshes) - self._meshes_used} meshes are not used")
        if self._constants_used != len(request.constants):
            raise MalformedRequest(f"{len(request.constants) - self._constants_used} constants are not used")
        placeholders = sum(node.op == "placeholder" for node in request.graph.nodes)
        if placeholders != len(request.inputs):
            raise MalformedRequest(
                f"the graph takes {placeholders} inputs, {len(request.inputs)} are described"
            )
        self._eager(request.eager)
        if any(one >= other for one, other in pairwise(request.levels)):
            raise MalformedRequest("levels are not sorted, or one is named twice")
        self._unbacked(request.unbacked)
        self._ambient(request.ambient)
        _options(request.options, self._ops.options, "option")
        _options(request.aot_options, self._ops.aot_options, "AOT option")
        _tuning_lock(request)

    def _eager(self, paths: list[list[int]]) -> None:
        if len(paths) > self._nodes:
            raise LimitExceeded(f"{len(paths)} eager nodes in a graph of {self._nodes}")
        if any(one >= other for one, other in pairwise(paths)):
            raise MalformedRequest("eager nodes are not sorted, or one is named twice")
        for path in paths:
            graph = self._request.graph
            for index in path[:-1]:
                if not 0 <= index < len(graph.subgraphs):
                    raise MalformedRequest(f"eager node {path[:8]} is in a subgraph that is not there")
                graph = graph.subgraphs[index]
            if not path or not 0 <= path[-1] < len(graph.nodes):
                raise MalformedRequest(f"eager node {path[:8]} is not there")

    def _unbacked(self, sizes: list[schema.Unbacked]) -> None:
        if len(sizes) > self._limits.inputs:
            raise LimitExceeded(f"{len(sizes)} sizes that depend on data, {self._limits.inputs} allowed")
        if any(one.node > other.node for one, other in pairwise(sizes)):
            raise MalformedRequest("sizes that depend on data are not sorted")
        for size in sizes:
            if not 0 <= size.node < len(self._request.graph.nodes):
                raise MalformedRequest(f"node {size.node}, whose size depends on data, is not there")
            if not allowed_names.UNBACKED_PATH.fullmatch(size.path):
                raise MalformedRequest(f"no size is at {size.path[:40]!r} of a value")
            if not size.lower <= (math.inf if size.upper is None else size.upper):
                raise MalformedRequest(f"the size at node {size.node} has an empty range")

    # --- expressions, symbols, inputs ---------------------------------------------------------------------

    def _expression(self, text: str) -> None:
        if text in self._expressions:
            return
        self._expression_text += len(text)
        if self._expression_text > MAX_EXPRESSION_TEXT:
            raise LimitExceeded(f"expressions of more than {MAX_EXPRESSION_TEXT} characters together")
        size_expr.check(text, self._symbols)
        self._expressions.add(text)

    def _size(self, value: schema.Size) -> None:
        if isinstance(value, str):
            self._expression(value)
        elif not 0 <= value < 1 << 62:
            raise MalformedRequest(f"size {value} is out of range")

    def _symbol(self, index: int, symbol: schema.Symbol) -> None:
        if symbol.name != f"s{index}":
            raise MalformedRequest(f"symbol {index} is named {symbol.name[:40]!r}, not 's{index}'")
        upper = math.inf if symbol.upper is None else symbol.upper
        if not symbol.lower <= (symbol.lower if symbol.hint is None else symbol.hint) <= upper:
            raise MalformedRequest(f"symbol {symbol.name} has hint {symbol.hint} outside its range")

    def _input(self, where: str, item: schema.Input) -> None:
        match item:
            case schema.SymIntInput(expr=text):
                self._expression(text)
            case schema.TensorInput():
                _dtype(item.dtype)
                self._device(item.device)
                rank = len(item.shape)
                if rank > MAX_DIMENSIONS or len(item.stride) != rank:
                    raise MalformedRequest(f"{where} has {rank} sizes and {len(item.stride)} strides")
                for size in (*item.shape, *item.stride, item.offset, item.storage_bytes):
                    self._size(size)
                if item.number is not None and (rank or item.dtype != "float64" or item.device != "cpu"):
                    raise MalformedRequest(f"{where} cannot stand for a Python number")
                if not -1 <= item.storage < len(self._request.inputs):
                    raise MalformedRequest(f"{where} shares storage {item.storage}, out of range")
                if item.requires_grad and item.dtype not in allowed_names.DIFFERENTIABLE:
                    raise MalformedRequest(f"{where} of {item.dtype} cannot require gradients")

    def _bases(self, bases: list[schema.Base]) -> None:
        inputs = self._request.inputs
        viewed: set[int] = set()
        for number, base in enumerate(bases):
            where = f"base {number}"
            if any(one >= other for one, other in pairwise(base.views)) or not base.views:
                raise MalformedRequest(f"{where} has no views, or they are not sorted")
            positions = [*base.views, *([base.tensor] if isinstance(base.tensor, int) else [])]
            if not all(0 <= position < len(inputs) for position in positions):
                raise MalformedRequest(f"{where} names an input that is not there")
            if viewed & set(base.views) or len(set(positions)) != len(positions):
                raise MalformedRequest(f"{where} has a view twice")
            viewed |= set(base.views)
            if isinstance(base.tensor, schema.TensorInput):
                self._input(where, base.tensor)
            tensors = [base.tensor if isinstance(base.tensor, schema.TensorInput) else inputs[base.tensor]]
            tensors += [inputs[position] for position in base.views]
            storages = {each.storage if isinstance(each, schema.TensorInput) else -1 for each in tensors}
            if len(storages) != 1 or -1 in storages:
                raise MalformedRequest(f"{where} does not share one memory with its views")
            if any(isinstance(each, schema.TensorInput) and each.is_parameter for each in tensors[1:]):
                raise MalformedRequest(f"{where} has a parameter as a view")
        if any(base.tensor in viewed for base in bases if isinstance(base.tensor, int)):
            raise MalformedRequest("a base is a view itself")

    def _device(self, kind: str) -> None:
        if kind not in allowed_names.DEVICES:
            raise MalformedRequest(f"device {kind[:40]!r} is not known")
        if kind not in self._devices:
            raise MalformedRequest(f"the graph uses {kind}, the target is {self._request.target.kind}")

    # --- constants ----------------------------------------------------------------------------------------

    def _constants(self, constants: list[schema.Constant]) -> None:
        total = 0
        for index, constant in enumerate(constants):
            _dtype(constant.dtype)
            self._device(constant.device)
            if constant.device == "meta":
                raise MalformedRequest(f"constant {index} is on the meta device")
            if len(constant.shape) > MAX_DIMENSIONS or any(
                not 0 <= size < 1 << 40 for size in constant.shape
            ):
                raise MalformedRequest(f"constant {index} has a shape out of range")
            expected = math.prod(constant.shape) * allowed_names.DTYPE_BYTES[constant.dtype]
            if expected != len(constant.data):
                raise MalformedRequest(
                    f"constant {index} has {len(constant.data)} bytes, its shape needs {expected}"
                )
            if constant.requires_grad and constant.dtype not in allowed_names.DIFFERENTIABLE:
                raise MalformedRequest(f"constant {index} of {constant.dtype} cannot require gradients")
            total += len(constant.data)
            if total > self._limits.constant_bytes:
                raise LimitExceeded(f"constants of more than {self._limits.constant_bytes} bytes")

    # --- user-written kernels ------------------------------------------------------------------------------

    def _kernels(self, kernels: list[schema.KernelSource]) -> None:
        """Their sources are only counted here: who reads source is the process that may run it."""
        if len(kernels) > self._limits.kernels:
            raise LimitExceeded(f"{len(kernels)} user-written kernels, {self._limits.kernels} allowed")
        if kernels and self._request.target.kind != "cuda":
            raise MalformedRequest("user-written kernels are for a GPU")
        size = 0
        for index, kernel in enumerate(kernels):
            where = f"kernel {index}"
            size += len(kernel.source.encode())
            if size > self._limits.source_bytes:
                raise LimitExceeded(f"source of more than {self._limits.source_bytes} bytes")
            _identifier(kernel.name, where)
            if kernel in kernels[:index]:
                raise MalformedRequest(f"{where} is given twice")
            if len(kernel.configs) > MAX_CONFIGS:
                raise LimitExceeded(
                    f"{where} has {len(kernel.configs)} configurations, {MAX_CONFIGS} allowed"
                )
            for config in kernel.configs:
                settings = (config.num_warps, config.num_stages, config.num_ctas, config.maxnreg or 1)
                if not all(0 <= value <= 1024 for value in settings):
                    raise MalformedRequest(f"{where} has a configuration out of range")
                self._kernel_constants(list(config.kwargs), where)

    def _kernel_call(self, node: schema.Node, position: int, modules: set[int]) -> None:
        where = f"node {position} (a user-written kernel)"
        match node.args, dict(node.kwargs):
            case (
                [],
                {
                    "constant_args": schema.DictArg(constants),
                    "grid": schema.ListArg(grid),
                    "kernel": schema.UserKernel(index),
                    "kwargs": schema.DictArg(given),
                    **rest,
                },
            ) if not rest and len(node.kwargs) == 4:
                pass
            case _:
                raise MalformedRequest(f"{where} has other arguments than a call of a kernel")
        if not 0 <= index <= self._kernels_used or index >= len(self._request.kernels):
            raise MalformedRequest(f"{where} holds no kernel, or kernels are out of order")
        self._kernels_used = max(self._kernels_used, index + 1)
        configs = self._request.kernels[index].configs
        if len(grid) != max(1, len(configs)):
            raise MalformedRequest(f"{where} has {len(grid)} grids for {len(configs)} configurations")
        for triple in grid:
            if not isinstance(triple, schema.TupleArg) or len(triple.items) != 3:
                raise MalformedRequest(f"{where} has a grid that is no triple")
            for size in triple.items:
                if type(size) is not int and not isinstance(size, schema.Ref | schema.Sym):
                    raise MalformedRequest(f"{where} has a grid of something else than sizes")
        self._kernel_constants(constants, where)
        names_given = [name for name, _ in (*constants, *given)]
        if len(set(map(str, names_given))) != len(names_given):
            raise MalformedRequest(f"{where} gives a parameter twice")
        for name, value in given:
            _identifier(name, where)
            if not isinstance(value, schema.Ref | schema.Sym):
                raise MalformedRequest(f"{where} gives {str(name)[:40]!r} something else than a node's value")
        values = [value for _, value in given]
        self._values([*values, schema.ListArg(grid)], where, position, modules, False)

    def _count_values(self, count: int) -> None:
        self._seen_values += count
        if self._seen_values > (most := self._limits.values):
            raise LimitExceeded(
                f"arguments of more than {most} values", hint="A graph of this size on the wire has fewer"
            )

    def _kernel_constants(self, constants: list[tuple[Any, Any]], where: str) -> None:
        self._count_values(len(constants))
        for name, value in constants:
            _identifier(name, where)
            match value:
                case None | bool() | int() | float():
                    pass
                case str():
                    _text(value, where, True)
                case schema.TritonDType(dtype):
                    _member(dtype, allowed_names.TRITON_DTYPES, "Triton dtype")
                case _:
                    raise MalformedRequest(f"{where} gives {name[:40]!r} something else than a constant")

    # --- graphs -------------------------------------------------------------------------------------------

    def _graph(self, graph: schema.Graph, depth: int) -> None:
        if depth > self._limits.depth:
            raise LimitExceeded(f"subgraphs are nested deeper than {self._limits.depth}")
        self._nodes += len(graph.nodes)
        if self._nodes > self._limits.nodes:
            raise LimitExceeded(f"more than {self._limits.nodes} nodes")
        if not graph.nodes or graph.nodes[-1].op != "output":
            raise MalformedRequest("a graph does not end with its output")
        modules: set[int] = set()  # positions of nodes whose value is a subgraph
        seen = 0
        for position, node in enumerate(graph.nodes):
            if node.op == "output" and position != len(graph.nodes) - 1:
                raise MalformedRequest("a graph has two outputs")
            if node.op != "get_attr":
                self._node(node, position, modules)
                continue
            if node.target or node.kwargs or len(node.args) != 1:
                raise MalformedRequest(f"node {position} (get_attr) must hold one constant or subgraph")
            match node.args[0]:
                case schema.Subgraph(index) if 0 <= index <= seen and index < len(graph.subgraphs):
                    if index == seen:
                        seen += 1
                        self._graph(graph.subgraphs[index], depth + 1)
                    modules.add(position)
                case schema.Const(index) if 0 <= index <= self._constants_used and index < len(
                    self._request.constants
                ):
                    self._constants_used = max(self._constants_used, index + 1)
                case _:
                    raise MalformedRequest(f"node {position} (get_attr) holds nothing known, or out of order")
        if seen != len(graph.subgraphs):
            raise MalformedRequest(f"{len(graph.subgraphs) - seen} subgraphs are not used")

    def _node(self, node: schema.Node, position: int, modules: set[int]) -> None:
        where = f"node {position} ({node.op})"
        higher_order = False
        match node.op:
            case "placeholder":
                if node.target or node.args or node.kwargs:
                    raise MalformedRequest(f"{where} must be empty")
                return
            case "output":
                if node.target or node.kwargs or len(node.args) != 1:
                    raise MalformedRequest(f"{where} must hold one value")
            case "call_function" if node.target == allowed_names.TRITON_CALL and self._request.kernels:
                self._kernel_call(node, position, modules)
            case "call_function" if node.target in allowed_names.DTENSOR_CALLS and self._request.meshes:
                self._meshes_used = meshes.check_call(node, where, self._request.meshes, self._meshes_used)
            case "call_function":
                higher_order = node.target in self._ops.hops
                known = node.target in self._ops.functions or table.library_of(node.target) is not None
                if not higher_order and not known:
                    raise ForbiddenTarget(
                        f"operator {node.target[:200]!r} is not in the table for torch {self._ops.torch}"
                    )
                if node.target in allowed_names.TEXT_ARGUMENTS:
                    _look_up(node, where)
            case "call_method":
                if node.target not in self._ops.methods:
                    raise ForbiddenTarget(
                        f"method {node.target[:200]!r} is not in the table for torch {self._ops.torch}"
                    )
                if not node.args or not isinstance(node.args[0], schema.Ref):
                    raise MalformedRequest(f"{where} must be called on a node's value")
        if [name for name, _ in node.kwargs] != sorted({name for name, _ in node.kwargs}):
            raise MalformedRequest(f"{where} has keyword arguments twice or out of order")
        for name, _ in node.kwargs:
            if not allowed_names.IDENTIFIER.fullmatch(name) or keyword.iskeyword(name):
                raise MalformedRequest(f"{where} has keyword {name[:40]!r}")
        if node.op != "call_function" or node.target != allowed_names.TRITON_CALL:
            values = [*node.args, *(value for _, value in node.kwargs)]
            self._values(values, where, position, modules, higher_order)

    def _values(
        self, values: list[schema.Arg], where: str, position: int, modules: set[int], higher_order: bool
    ) -> None:
        todo: list[tuple[schema.Arg, int]] = [(value, 1) for value in values]
        while todo:
            value, depth = todo.pop()
            self._count_values(1)
            if depth > self._limits.depth:
                raise LimitExceeded(f"{where} has arguments nested deeper than {self._limits.depth}")
            match value:
                case None | bool() | int() | float():
                    pass
                case str():
                    _text(value, where, higher_order)
                case schema.Ref(index):
                    if not 0 <= index < position:
                        raise MalformedRequest(f"{where} uses node {index}, which is not before it")
                    # A subgraph is no value: only a higher-order operator may take it.
                    if index in modules and not higher_order:
                        raise MalformedRequest(
                            f"{where} takes subgraph node {index}, but is not higher-order"
                        )
                case schema.ListArg(items) | schema.TupleArg(items):
                    todo += [(item, depth + 1) for item in items]
                case schema.DictArg(pairs):
                    for key, item in pairs:
                        if not isinstance(key, (str, int)):
                            raise MalformedRequest(f"{where} has a dict key that is neither text nor integer")
                        if (
                            higher_order
                            and isinstance(key, str)
                            and not allowed_names.IDENTIFIER.fullmatch(key)
                        ):
                            raise MalformedRequest(f"{where} has option {key[:40]!r}")
                        todo += [(key, depth + 1), (item, depth + 1)]
                    if len({key for key, _ in pairs}) != len(pairs):
                        raise MalformedRequest(f"{where} has a dict with one key twice")
                case schema.SliceArg(start, stop, step):
                    todo += [(start, depth + 1), (stop, depth + 1), (step, depth + 1)]
                case schema.EllipsisArg() | schema.Complex():
                    pass
                case schema.DTypeArg(name):
                    _dtype(name)
                case schema.DeviceArg(kind):
                    self._device(kind)
                case schema.MemoryFormatArg(name):
                    _member(name, allowed_names.MEMORY_FORMATS, "memory format")
                case schema.LayoutArg(name):
                    _member(name, allowed_names.LAYOUTS, "layout")
                case schema.BigInt(text):
                    if not _BIG_INT.fullmatch(text) or int(text) in _INT64:
                        raise MalformedRequest(f"{where} has {text[:40]!r} for an integer past 64 bits")
                case schema.Sym(text):
                    self._expression(text)
                case schema.Callee(target):
                    if (
                        not higher_order
                        or target not in self._ops.functions
                        or not _OVERLOAD.fullmatch(target)
                    ):
                        raise ForbiddenTarget(f"{where} takes {target[:200]!r} as a value")
                case _:
                    raise MalformedRequest(
                        f"{where} has a constant or subgraph outside a get_attr node, or a kernel outside its call"
                    )

    # --- surroundings -------------------------------------------------------------------------------------

    def _ambient(self, ambient: schema.Ambient) -> None:
        _dtype(ambient.default_dtype)
        _member(ambient.matmul_precision, allowed_names.MATMUL_PRECISIONS, "matmul precision")
        if not 0 < ambient.threads <= 4096:
            raise MalformedRequest(f"{ambient.threads} threads")
        if len(ambient.autocast) > len(allowed_names.DEVICES):
            raise MalformedRequest("more autocast states than device types")
        for state in ambient.autocast:
            _member(state.device, allowed_names.DEVICES, "device")
            _dtype(state.dtype)
        _sorted((state.device for state in ambient.autocast), "autocast states")
        _sorted((name for name, _ in ambient.flags), "ambient flags")
        for name, value in ambient.flags:
            if allowed_names.FP32_PRECISION.fullmatch(name):
                _member(str(value), allowed_names.FP32_PRECISIONS, "fp32 precision")
            elif name.startswith(allowed_names.AUTOCAST_DTYPE):
                _member(name.removeprefix(allowed_names.AUTOCAST_DTYPE), allowed_names.DEVICES, "device")
                _dtype(str(value))
            elif name in allowed_names.TEXT_FLAGS:
                if not allowed_names.TEXT_FLAGS[name].fullmatch(str(value)):
                    raise MalformedRequest(f"ambient flag {name} = {str(value)[:60]!r} cannot be set")
            elif name not in allowed_names.AMBIENT_FLAGS or not isinstance(value, bool):
                raise MalformedRequest(f"ambient flag {name[:60]!r} is unknown or not a bool")


def _toolchain(toolchain: schema.Toolchain) -> None:
    for field in toolchain.__struct_fields__:
        if not _VERSION.fullmatch(getattr(toolchain, field)):
            raise MalformedRequest(f"toolchain.{field} is not a version")


def _libraries(request: schema.GraphRequest) -> None:
    """Operators of known libraries are in the graph exactly if the request says which library each is of."""
    used = table.libraries_of(request.graph)
    named = [library.name for library in request.libraries]
    if named != used:
        raise MalformedRequest(f"the graph calls operators of {used}, the request names {named[:8]}")
    for library in request.libraries:
        if not _VERSION.fullmatch(library.version) or not _SHA256.fullmatch(library.source):
            raise MalformedRequest(f"the version or digest of {library.name} is malformed")


def _target(target: schema.Target) -> None:
    if not _NAME.fullmatch(target.name) or not 0 <= target.units <= 100_000:
        raise MalformedRequest("target.name or target.units is out of range")
    if target.kind == "cpu":
        if target.capability or target.units:
            raise MalformedRequest("a CPU target has no capability or units")
    elif not _CAPABILITY.fullmatch(target.capability):
        raise MalformedRequest("target.capability is not a compute capability")
    if len(target.cpu) > 256 or not all(map(allowed_names.INSTRUCTION_SET.fullmatch, target.cpu)):
        raise MalformedRequest("target.cpu holds something else than instruction-set names")
    _sorted(target.cpu, "instruction sets")


def _identifier(name: object, where: str) -> None:
    if not isinstance(name, str) or not allowed_names.IDENTIFIER.fullmatch(name) or keyword.iskeyword(name):
        raise MalformedRequest(f"{where} has the name {str(name)[:40]!r}")


def _text(value: str, where: str, higher_order: bool) -> None:
    if len(value) > allowed_names.MAX_TEXT:
        raise LimitExceeded(
            f"{where} has a text of {len(value)} characters, {allowed_names.MAX_TEXT} allowed"
        )
    if not (allowed_names.OPTION_TEXT if higher_order else allowed_names.TEXT).fullmatch(value):
        raise MalformedRequest(f"{where} has text {value[:40]!r}, with characters that could end a literal")
    if allowed_names.DEVICE_TEXT.fullmatch(value):
        raise MalformedRequest(f"{where} names a device's index")


def _look_up(node: schema.Node, where: str) -> None:
    """A function that looks up a name gets one of a closed set, and nothing but a node's value beside it."""
    position, allowed = allowed_names.TEXT_ARGUMENTS[node.target]
    if node.kwargs or len(node.args) != position + 1:
        raise MalformedRequest(f"{where}: {node.target} takes {position + 1} arguments")
    if not all(isinstance(value, schema.Ref) for value in node.args[:position]):
        raise MalformedRequest(f"{where}: {node.target} takes a node's value first")
    name = node.args[position]
    if not isinstance(name, str) or name not in allowed:
        raise ForbiddenTarget(f"{where}: {node.target} may not look up {str(name)[:60]!r}")


def _options(
    options: list[tuple[str, schema.OptionValue]], known: dict[str, table.ConfigOption], what: str
) -> None:
    _sorted((name for name, _ in options), f"{what}s")
    for name, value in options:
        option = known.get(name)
        if option is None:
            raise BadOption(f"{what} {name[:100]!r} is not one the service takes")
        if not option.accepts(value):
            raise BadOption(f"{what} {name} cannot be {str(value)[:100]!r}")


def _tuning_lock(request: schema.GraphRequest) -> None:
    lock = request.tuning_lock
    if lock is None:
        return
    if len(lock.entries) > MAX_LOCKED:
        raise LimitExceeded(
            f"a tuning lock of {len(lock.entries)} entries for one target, {MAX_LOCKED} allowed",
            hint="Keep in the file what the team's models need",
        )
    if not tuning_pins.tunes(request) or not (lock.strict or lock.entries):
        raise MalformedRequest("a tuning lock that has no effect")
    for entry in lock.entries:
        if not tuning_pins.fits(entry.place, request):
            raise MalformedRequest(
                f"the tuning lock has an entry for {entry.place.device[:60]!r}, which cannot apply"
            )
    if any(one >= other for one, other in pairwise(map(records.entry_sort_key, lock.entries))):
        raise MalformedRequest("the tuning lock's entries are given twice or out of order")


def _sorted(items: Iterable[str], what: str) -> None:
    listed = list(items)
    if listed != sorted(set(listed)):
        raise MalformedRequest(f"{what} are given twice or out of order")


def _dtype(name: str) -> None:
    _member(name, allowed_names.DTYPE_BYTES, "dtype")


def _member(name: str, allowed: Iterable[str], what: str) -> None:
    if name not in allowed:
        raise MalformedRequest(f"{what} {name[:40]!r} is not known")
