"""Stage 2: the FX graph that Dynamo hands over -> wire.Graph and its constants, and back; never pickle.

A node is its op, its target's name in the closed table, and its arguments; it refers to earlier nodes by
position. Names of nodes, files and devices' indices are left behind, and decoding makes names from the
targets, so that encode(decode(g)) is g. What the wire cannot carry raises Unsupported, naming the node at
fault.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.fx

from . import dtensors, expr, names, table, torch_internals, user_kernels, wire
from .errors import BadExpression, ForbiddenTarget, LimitExceeded, MalformedRequest, Unsupported
from .torch_internals import HigherOrderOperator, OpOverload, OpOverloadPacket

_INT64 = range(-(1 << 63), 1 << 63)
_MEMORY_FORMATS = {getattr(torch, name): name for name in sorted(names.MEMORY_FORMATS)}
_LAYOUTS = {getattr(torch, name): name for name in sorted(names.LAYOUTS)}
_DTYPES = {getattr(torch, name): name for name in names.DTYPE_BYTES if hasattr(torch, name)}
_NO_SYMBOLS: Mapping[Any, str] = {}


def encode_graph(
    gm: torch.fx.GraphModule,
    *,
    symbols: Mapping[Any, str] = _NO_SYMBOLS,
    limits: wire.Limits | None = None,
    kernels: Callable[[Any], int] | None = None,
) -> tuple[wire.Graph, list[wire.Constant]]:
    """A graph and the tensors it holds. `symbols`: sympy symbol -> its wire name, for SymInt arguments.

    kernels: a user-written Triton kernel -> its position in the request. Raises Unsupported with the node and the
    reason; LimitExceeded past `limits`.
    """
    encoder = _Encoder(symbols, limits or wire.Limits(), kernels)
    return encoder.graph(gm, 1), encoder.constants


def decode_graph(
    graph: wire.Graph,
    constants: list[wire.Constant],
    *,
    device_index: Mapping[str, int],
    symbols: Mapping[str, Any],
    kernels: Sequence[wire.KernelSource] = (),
    spread: dtensors.Rebuilt | None = None,
) -> torch.fx.GraphModule:
    """The GraphModule of a checked graph. `device_index`: device kind -> index, for kinds that have one.

    `symbols`: name -> value (int or SymInt) for Sym arguments. RUNS the source of `kernels`, so only a compile child
    gives any. spread: the request's meshes; a graph with any makes this process one of a pretended world's. Raises
    ForbiddenTarget, Unsupported or MalformedRequest.
    """
    tensors = [decode_constant(item, device_index) for item in constants]
    known = [torch_internals.register_user_kernel(user_kernels.build(kernel)) for kernel in kernels]
    return _Decoder(tensors, device_index, symbols, known, spread or dtensors.Rebuilt([], "cpu")).graph(graph)


# --- targets ---------------------------------------------------------------------------------------------


def target_name(fn: Any) -> str:
    """A callable's name in the closed table for this torch. Raises Unsupported when it has none."""
    if isinstance(fn, dtensors.Call):
        return fn.target
    ops = table.load(torch.__version__)
    if isinstance(fn, HigherOrderOperator):
        name = f"torch.ops.higher_order.{fn}"
        if name in ops.hops or name == names.TRITON_CALL:
            return name
    elif isinstance(fn, (OpOverload, OpOverloadPacket)):
        name = f"torch.ops.{fn}"
        if name in ops.functions:
            return name
    else:
        try:
            found = _function_names().get(fn)
        except TypeError:
            found = None  # unhashable callables are nobody's operators
        if found is not None:
            return found
        name = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', type(fn).__name__)}"
    raise Unsupported(f"operator {name} is not in the table for torch {ops.torch}")


def resolve_target(name: str) -> Any:
    """The callable that a name of the closed table stands for. Raises ForbiddenTarget outside the table."""
    ops = table.load(torch.__version__)
    if name not in ops.functions and name not in ops.hops:
        raise ForbiddenTarget(f"operator {name[:200]!r} is not in the table for torch {ops.torch}")
    return _walk(name)


def _walk(name: str) -> Any:
    root, *rest = name.split(".")
    value: Any = importlib.import_module(root)
    path = root
    for part in rest:
        path = f"{path}.{part}"
        if isinstance(value, types.ModuleType) and not hasattr(value, part):
            importlib.import_module(path)
        value = getattr(value, part)
    return value


@functools.lru_cache(maxsize=1)
def _function_names() -> dict[Any, str]:
    # Higher-order operators and overloads name themselves; the rest is found by identity.
    ops = table.load(torch.__version__)
    return {_walk(name): name for name in sorted(ops.functions) if not name.startswith("torch.ops.")}


# --- constants -------------------------------------------------------------------------------------------


def encode_constant(tensor: torch.Tensor) -> wire.Constant:
    """A plain dense tensor's dtype, shape and bytes. Raises Unsupported for anything else."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise Unsupported(f"a constant of type {type(tensor).__name__} cannot travel")
    dtype = _DTYPES.get(tensor.dtype)
    if tensor.layout != torch.strided or dtype is None or tensor.device.type not in ("cpu", "cuda"):
        raise Unsupported(
            f"a constant of {tensor.dtype}, {tensor.layout}, on {tensor.device.type} cannot travel"
        )
    if tensor.requires_grad and not tensor.is_leaf:
        raise Unsupported("a constant with a gradient history cannot travel")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return wire.Constant(
        dtype=dtype,
        shape=list(tensor.shape),
        device=tensor.device.type,
        data=data,
        requires_grad=tensor.requires_grad,
    )


def decode_constant(constant: wire.Constant, device_index: Mapping[str, int]) -> torch.Tensor:
    dtype = _torch_value(constant.dtype, names.DTYPE_BYTES)
    device = _device(constant.device, device_index)
    if constant.data:
        flat = torch.frombuffer(bytearray(constant.data), dtype=torch.uint8).view(dtype)
        tensor = flat.reshape(constant.shape).to(device)
    else:
        tensor = torch.empty(constant.shape, dtype=dtype, device=device)
    return tensor.requires_grad_(constant.requires_grad)


def _device(kind: str, device_index: Mapping[str, int]) -> torch.device:
    if kind not in names.DEVICES:
        raise Unsupported(f"device {kind[:40]!r} is not known")
    return torch.device(kind, device_index[kind]) if kind in device_index else torch.device(kind)


def _torch_value(name: str, allowed: Any) -> Any:
    if name not in allowed or not hasattr(torch, name):
        raise Unsupported(f"torch {torch.__version__} has no {name[:40]!r}")
    return getattr(torch, name)


# --- encoding --------------------------------------------------------------------------------------------


class _Encoder:
    """One request's walk: what the graphs share (constants, devices seen, node count) is kept here."""

    def __init__(
        self, symbols: Mapping[Any, str], limits: wire.Limits, kernels: Callable[[Any], int] | None
    ) -> None:
        self.constants: list[wire.Constant] = []
        self._symbols = symbols
        self._limits = limits
        self._kernels = kernels
        self._positions: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # keeps ids in _positions from being reused
        self._bytes = 0
        self._nodes = 0
        self._indices: dict[str, int] = {}

    def graph(self, gm: torch.fx.GraphModule, depth: int) -> wire.Graph:
        if depth > self._limits.depth:
            raise LimitExceeded(f"subgraphs are nested deeper than {self._limits.depth}")
        if gm.meta.get("_checkpoint_context_fn") is not None:
            raise Unsupported(
                "selective activation checkpointing (context_fn) runs Python code while compiling"
            )
        self._nodes += len(gm.graph.nodes)
        if self._nodes > self._limits.nodes:
            raise LimitExceeded(f"the graph has more than {self._limits.nodes} nodes")
        position: dict[torch.fx.Node, int] = {}
        nodes: list[wire.Node] = []
        subgraphs: list[wire.Graph] = []
        subgraph_position: dict[int, int] = {}
        for node in gm.graph.nodes:
            if node.target is torch_internals.LOG_API_USAGE and not node.users:
                continue  # counts uses of an API; computes nothing
            try:
                if node.op == "get_attr":
                    value = _attribute(gm, str(node.target))
                    if isinstance(value, torch.fx.GraphModule):
                        if id(value) not in subgraph_position:
                            subgraph_position[id(value)] = len(subgraphs)
                            subgraphs.append(self.graph(value, depth + 1))
                        held: wire.Arg = wire.Subgraph(subgraph_position[id(value)])
                    else:
                        held = wire.Const(self._constant(value))
                    nodes.append(wire.Node(op="get_attr", target="", args=[held]))
                else:
                    nodes.append(self._node(node, position))
            except Unsupported as error:
                if depth == 1 or "node '" not in error.message:
                    raise Unsupported(f"node '{node.name}' ({node.op}): {error.message}") from None
                raise
            position[node] = len(position)
        return wire.Graph(nodes=nodes, subgraphs=subgraphs)

    def _node(self, node: torch.fx.Node, position: Mapping[torch.fx.Node, int]) -> wire.Node:
        def arg(value: Any) -> wire.Arg:
            return self._arg(value, position, self._limits.depth)

        match node.op:
            case "placeholder":
                if node.args:
                    raise Unsupported("an input with a default value")
                return wire.Node(op="placeholder", target="", args=[])
            case "output":
                return wire.Node(op="output", target="", args=[arg(node.args[0])])
            case "call_function":
                target = target_name(node.target)
                if target == names.TRITON_CALL:
                    return self._kernel_call(node, arg)
            case "call_method":
                target = str(node.target)
                if target not in table.load(torch.__version__).methods:
                    raise Unsupported(
                        f"method Tensor.{target} is not in the table for torch {torch.__version__}"
                    )
            case _:
                raise Unsupported(f"{node.op} of {type(node.target).__name__} {node.target}")
        args, kwargs = list(node.args), dict(node.kwargs)
        if target in ("to", "cuda") and node.op == "call_method" and len(args) > 1 and type(args[1]) is int:
            args[1] = torch.device("cuda", args[1])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", int(str(kwargs["device"])))
        # The order of keyword arguments means nothing to the callee.
        return wire.Node(
            op=node.op,
            target=target,
            args=[arg(value) for value in args],
            kwargs=[(name, arg(kwargs[name])) for name in sorted(kwargs)],
        )

    def _kernel_call(self, node: torch.fx.Node, arg: Callable[[Any], wire.Arg]) -> wire.Node:
        given = node.kwargs
        if self._kernels is None:
            raise Unsupported("a user-written Triton kernel")
        if given["tma_descriptor_metadata"]:
            raise Unsupported(
                "a user-written Triton kernel that takes tensor descriptors (TMA) from the host"
            )
        constants = torch_internals.user_kernel_constants(cast(int, given["constant_args_idx"]))
        try:
            values = [(name, user_kernels.constant_of(name, value)) for name, value in constants.items()]
        except user_kernels.BadKernel as error:
            raise Unsupported(f"an argument of a user-written Triton kernel: {error}") from None
        kernel = torch_internals.user_kernel(cast(int, given["kernel_idx"]))
        return wire.Node(
            op="call_function",
            target=names.TRITON_CALL,
            args=[],
            kwargs=[
                ("constant_args", wire.DictArg(cast(Any, values))),
                ("grid", arg(given["grid"])),
                ("kernel", wire.UserKernel(self._kernels(kernel))),
                ("kwargs", arg(given["kwargs"])),
            ],
        )

    def _constant(self, value: Any) -> int:
        if not isinstance(value, torch.Tensor):
            raise Unsupported(f"an attribute of type {type(value).__name__} cannot travel")
        if id(value) not in self._positions:
            self._bytes += value.numel() * value.element_size()
            if self._bytes > self._limits.constant_bytes:
                raise LimitExceeded(
                    f"the graph holds tensors of more than {self._limits.constant_bytes} bytes"
                )
            if value.device.index is not None:
                self._see_device(value.device)
            self._positions[id(value)] = len(self.constants)
            self._kept.append(value)
            self.constants.append(encode_constant(value))
        return self._positions[id(value)]

    def _see_device(self, device: torch.device) -> wire.Device:
        if device.type not in names.DEVICES:
            raise Unsupported(f"device {device.type} cannot travel")
        if device.type != "cpu" and device.index is not None:
            seen = self._indices.setdefault(device.type, device.index)
            if seen != device.index:
                raise Unsupported(f"the graph uses two {device.type} devices, {seen} and {device.index}")
        return wire.Device(device.type)

    def _arg(self, value: Any, position: Mapping[torch.fx.Node, int], depth: int) -> wire.Arg:
        if depth <= 0:
            raise LimitExceeded(f"arguments are nested deeper than {self._limits.depth}")

        def below(item: Any) -> wire.Arg:
            return self._arg(item, position, depth - 1)

        match value:
            case None | bool():
                return value
            case float():
                return float(value)  # numpy.float64 is a float too
            case int():
                return int(value) if value in _INT64 else wire.BigInt(str(int(value)))
            case str():
                if names.DEVICE_TEXT.fullmatch(value):
                    return self._see_device(torch.device(value))
                if len(value) > names.MAX_TEXT or not names.TEXT.fullmatch(value):
                    raise Unsupported(
                        f"a text with quotes, backslashes or control characters: {value[:40]!r}"
                    )
                return str(value)
            case torch.fx.Node():
                return wire.Ref(position[value])
            case slice():
                return wire.SliceArg(below(value.start), below(value.stop), below(value.step))
            case dict():
                return wire.DictArg([(below(key), below(item)) for key, item in value.items()])
            case list():
                return wire.ListArg([below(item) for item in value])
            case tuple() if type(value) is tuple or isinstance(value, torch.Size):
                return wire.TupleArg([below(item) for item in value])
            case complex():
                return wire.Complex(value.real, value.imag)
            case torch.dtype() if value in _DTYPES:
                return wire.DType(_DTYPES[value])
            case torch.device():
                return self._see_device(value)
            case torch.memory_format() if value in _MEMORY_FORMATS:
                return wire.MemoryFormat(_MEMORY_FORMATS[value])
            case torch.layout() if value in _LAYOUTS:
                return wire.Layout(_LAYOUTS[value])
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return self._symbolic(value)
        if value is ...:
            return wire.EllipsisArg()
        if isinstance(value, OpOverload):
            return wire.Callee(target_name(value))
        raise Unsupported(f"an argument of type {type(value).__module__}.{type(value).__qualname__}")

    def _symbolic(self, value: Any) -> wire.Arg:
        try:
            return wire.Sym(expr.render(torch_internals.sym_expr(value), self._symbols))
        except BadExpression as error:
            raise Unsupported(f"symbolic argument {value}: {error.message}") from None


def _attribute(gm: torch.fx.GraphModule, path: str) -> Any:
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part)
    return value


# --- decoding --------------------------------------------------------------------------------------------


class _Decoder:
    """One request's way back: the tensors and values that its graphs share."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        device_index: Mapping[str, int],
        symbols: Mapping[str, Any],
        kernels: list[int],
        spread: dtensors.Rebuilt,
    ) -> None:
        self._spread = spread
        self._tensors = tensors
        self._device_index = device_index
        self._symbols = symbols
        self._kernels = kernels

    def graph(self, encoded: wire.Graph) -> torch.fx.GraphModule:
        held: dict[str, Any] = {
            f"subgraph_{index}": self.graph(child) for index, child in enumerate(encoded.subgraphs)
        }
        graph = torch.fx.Graph()
        made: list[torch.fx.Node] = []
        inputs = 0
        for node in encoded.nodes:
            args = tuple(self._arg(value, made) for value in node.args)
            kwargs = {name: self._arg(value, made) for name, value in node.kwargs}
            match node.op:
                case "placeholder":
                    made.append(graph.placeholder(f"arg{inputs}"))
                    inputs += 1
                case "get_attr":
                    made.append(graph.create_node("get_attr", self._held(node.args[0], held)))
                case "call_function" if node.target == names.TRITON_CALL:
                    made.append(
                        graph.create_node("call_function", _walk(node.target), (), _kernel_call(kwargs))
                    )
                case "call_function" if node.target in names.DTENSOR_CALLS:
                    made.append(graph.create_node("call_function", *self._spread.call(node.target, args)))
                case "call_function":
                    made.append(graph.create_node("call_function", resolve_target(node.target), args, kwargs))
                case "call_method":
                    if node.target not in table.load(torch.__version__).methods:
                        raise ForbiddenTarget(f"method {node.target[:200]!r} is not in the table")
                    made.append(graph.create_node("call_method", node.target, args, kwargs))
                case "output":
                    made.append(graph.output(args[0]))
        try:
            return torch.fx.GraphModule(held, graph)
        except (AssertionError, IndexError, SyntaxError, RecursionError) as error:
            # FX writes the graph down as Python, and an operator may have too few operands for its sign.
            raise MalformedRequest(f"the graph cannot be written as code: {error}") from error

    def _held(self, value: wire.Arg, held: dict[str, Any]) -> str:
        """The attribute a get_attr node reads; a tensor becomes one where it is first read."""
        if isinstance(value, wire.Subgraph):
            return f"subgraph_{value.index}"
        if isinstance(value, wire.Const):
            name = f"constant_{value.index}"
            held[name] = self._tensors[value.index]
            return name
        raise Unsupported(f"get_attr of {type(value).__name__}")

    def _arg(self, value: wire.Arg, made: list[torch.fx.Node]) -> Any:
        def below(item: wire.Arg) -> Any:
            return self._arg(item, made)

        match value:
            case None | bool() | int() | float() | str():
                return value
            case wire.Ref(index):
                return made[index]
            case wire.ListArg(items):
                return [below(item) for item in items]
            case wire.TupleArg(items):
                return tuple(below(item) for item in items)
            case wire.DictArg(pairs):
                return {below(key): below(item) for key, item in pairs}
            case wire.SliceArg(start, stop, step):
                return slice(below(start), below(stop), below(step))
            case wire.EllipsisArg():
                return ...
            case wire.DType(name):
                return _torch_value(name, names.DTYPE_BYTES)
            case wire.Device(kind):
                return _device(kind, self._device_index)
            case wire.MemoryFormat(name):
                return _torch_value(name, names.MEMORY_FORMATS)
            case wire.Layout(name):
                return _torch_value(name, names.LAYOUTS)
            case wire.Complex(re, im):
                return complex(re, im)
            case wire.BigInt(text):
                return int(text)
            case wire.Sym(text):
                return expr.evaluate(text, self._symbols)
            case wire.Callee(target):
                return resolve_target(target)
            case wire.UserKernel(index):
                return self._kernels[index]
            case wire.TritonDType():
                return user_kernels.value_of(value)
            case wire.Const() | wire.Subgraph():
                return None  # read by _held; get_attr nodes take no arguments


def _kernel_call(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a user-written kernel as Dynamo writes them, from those on the wire."""
    return {
        "kernel_idx": given["kernel"],
        "constant_args_idx": torch_internals.register_user_kernel_constants(given["constant_args"]),
        "grid": given["grid"],
        "tma_descriptor_metadata": {},
        "kwargs": given["kwargs"],
    }
