"""Stage 2: encodes Dynamo's FX graph as a schema.Graph with its constants and kernels, without pickle.

An encoded node has its op, its target's name in the operator table, and its arguments; it refers to earlier nodes by
position. Names of nodes and files and indices of devices are left out. What the wire format lacks raises Unsupported
with the node's name.

A request has no annotations (`node.meta`, `gm.meta`). Those listed here only say where code came from, or the worker
computes them again. Any other could change the lowering (an activation memory budget, a region's own options), so a
graph that has one is not sent. A graph inside it that no node names is left out: Dynamo leaves one behind where it
inlines a nested_compile_region. AOTAutograd reads such graphs for hooks for saved tensors alone, by their names, and a
graph with those is not sent.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from ..errors import BadExpression, LimitExceeded, RelayError, Unsupported
from ..request import allowed_names, codec, schema, size_expr, triton_source
from ..request.operator_table import table
from ..torch_internals.dynamo import kernel_side_table, operators, symbolic_shapes
from ..torch_internals.dynamo.types import OpOverload
from . import triton_kernels
from .names import DTYPES, LAYOUTS, MEMORY_FORMATS, not_in_table, target_name

_ASSERTION = re.compile(r"torch\.(ops\.aten\.)?(_functional)?_?(assert|check)\w*(\.\w+)?")
"""Operators whose texts are only messages."""
_UNPRINTED = re.compile(r"[\x00-\x1f\x7f]+")
_INT64 = range(-(1 << 63), 1 << 63)


class EncodedGraph(NamedTuple):
    """gpus: indices of the GPUs that the graph names; None stands for the current one. eager: the paths of the nodes
    that have EAGER, sorted: the positions of the subgraphs around each, then its own."""

    graph: schema.Graph
    constants: list[schema.Constant]
    kernels: list[schema.KernelSource]
    eager: list[list[int]]
    unbacked: list[schema.Unbacked]
    gpus: set[int | None]


def encode_graph(
    gm: torch.fx.GraphModule,
    *,
    symbols: Mapping[Any, str] = {},
    original: torch.fx.GraphModule | None = None,
) -> EncodedGraph:
    """Encode a graph, the tensors that it holds, and the user-written Triton kernels that it calls.

    symbols: sympy symbol -> its name on the wire, for SymInt arguments. original: the graph of which `gm` is a copy,
    without its annotations and what no node names. Raises Unsupported with the node and the reason; LimitExceeded
    beyond a gateway's usual limits (codec.Limits).
    """
    _refuse_annotations("the graph", original or gm)
    encoder = _Encoder(symbols)
    graph = encoder.graph(gm)
    kernels = [] if encoder.kernels is None else encoder.kernels.sources
    return EncodedGraph(
        graph, encoder.constants, kernels, sorted(encoder.eager), encoder.unbacked, encoder.gpus
    )


def encode_constant(tensor: torch.Tensor) -> schema.Constant:
    """Encode a plain dense tensor. Raises Unsupported for any other."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise Unsupported(f"a constant of type {type(tensor).__name__} cannot travel")
    dtype = DTYPES.get(tensor.dtype)
    if tensor.layout != torch.strided or dtype is None or tensor.device.type not in ("cpu", "cuda"):
        raise Unsupported(
            f"a constant of {tensor.dtype}, {tensor.layout}, on {tensor.device.type} cannot travel"
        )
    if tensor.requires_grad and not tensor.is_leaf:
        raise Unsupported("a constant with a gradient history cannot travel")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return schema.Constant(
        dtype=dtype,
        shape=list(tensor.shape),
        device=tensor.device.type,
        data=data,
        requires_grad=tensor.requires_grad,
    )


def _refused(node: torch.fx.Node, why: str, called: str = "") -> Unsupported:
    where = user_line(node)
    at = f" at {where}" if where else ""
    error = Unsupported(f"node '{node.name}' ({node.op}{at}): {why}")
    error.operator, error.line = called or _called(node), where
    return error


def _called(node: torch.fx.Node) -> str:
    """The operator that a node calls; '' if it calls none."""
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    return target_name(node.target) if node.op == "call_function" else ""


class _Encoder:
    """Encodes one request's graphs; has what they share: constants, kernels, the devices they use, the number of
    nodes."""

    def __init__(self, symbols: Mapping[Any, str]) -> None:
        self.constants: list[schema.Constant] = []
        self.kernels: triton_kernels.KernelSources | None = None
        self.eager: list[list[int]] = []
        self.unbacked: list[schema.Unbacked] = []
        self.gpus: set[int | None] = set()
        self._symbols = symbols
        self._limits = codec.Limits()
        self._positions: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # keeps ids in _positions from being reused
        self._bytes = 0
        self._nodes = 0

    def graph(self, gm: torch.fx.GraphModule, path: tuple[int, ...] = ()) -> schema.Graph:
        """path: positions of the subgraphs around it, and its own; () for the whole graph."""
        if len(path) >= self._limits.depth:
            raise LimitExceeded(f"subgraphs are nested deeper than {self._limits.depth}")
        self._nodes += len(gm.graph.nodes)
        if self._nodes > self._limits.nodes:
            raise LimitExceeded(f"the graph has more than {self._limits.nodes} nodes")
        position: dict[torch.fx.Node, int] = {}
        nodes: list[schema.Node] = []
        subgraphs: list[schema.Graph] = []
        subgraph_position: dict[int, int] = {}
        for node in gm.graph.nodes:
            if operators.is_left_out(node):
                continue
            try:
                if node.op == "get_attr":
                    value = operator.attrgetter(str(node.target))(gm)
                    if isinstance(value, torch.fx.GraphModule):
                        if id(value) not in subgraph_position:
                            subgraph_position[id(value)] = len(subgraphs)
                            subgraphs.append(self.graph(value, (*path, len(subgraphs))))
                        attribute: schema.Arg = schema.Subgraph(subgraph_position[id(value)])
                    else:
                        attribute = schema.Const(self._constant(value))
                    nodes.append(schema.Node(op="get_attr", target="", args=[attribute]))
                else:
                    nodes.append(self._node(node, position))
            except RelayError as error:
                if not isinstance(error, Unsupported) or error.line or "node '" in error.message:
                    raise
                raise _refused(node, error.message, error.operator) from None
            except Exception as error:  # a kind of value that PyTorch itself cannot read here
                raise _refused(node, f"{type(error).__name__}: {error}") from error
            if node.meta.get("custom") == EAGER:
                self.eager.append([*path, len(position)])
            if not path and "unbacked_bindings" in node.meta:
                self._note_unbacked(node, len(position))
            position[node] = len(position)
        return schema.Graph(nodes=nodes, subgraphs=subgraphs)

    def _note_unbacked(self, node: torch.fx.Node, position: int) -> None:
        self.unbacked += [
            schema.Unbacked(node=position, **facts._asdict())
            for facts in symbolic_shapes.unbacked_facts(node)
            if allowed_names.UNBACKED_PATH.fullmatch(facts.path)
        ]

    def _node(self, node: torch.fx.Node, position: Mapping[torch.fx.Node, int]) -> schema.Node:
        def arg(value: Any) -> schema.Arg:
            return self._arg(value, position, self._limits.depth)

        match node.op:
            case "placeholder":
                if node.args:
                    raise Unsupported("an input with a default value")
                return schema.Node(op="placeholder", target="", args=[])
            case "output":
                return schema.Node(op="output", target="", args=[arg(node.args[0])])
            case "call_function":
                target = target_name(node.target)
                if target == allowed_names.TRITON_CALL:
                    return self._kernel_call(node, arg)
            case "call_method":
                target = str(node.target)
                if target not in table.load(torch.__version__).methods:
                    raise not_in_table(f"Tensor.{target}", "method")
            case _:
                raise Unsupported(f"{node.op} of {type(node.target).__name__} {node.target}")
        args, kwargs = list(node.args), dict(node.kwargs)
        if node.op == "call_function" and _ASSERTION.fullmatch(target):
            args = [_message(value) if isinstance(value, str) else value for value in args]
            kwargs = {
                name: _message(value) if isinstance(value, str) else value for name, value in kwargs.items()
            }
        if target in ("to", "cuda") and node.op == "call_method" and len(args) > 1 and type(args[1]) is int:
            args[1] = torch.device("cuda", args[1])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", int(str(kwargs["device"])))
        # Sorted, because the order of keyword arguments has no meaning to the callee.
        return schema.Node(
            op=node.op,
            target=target,
            args=[arg(value) for value in args],
            kwargs=[(name, arg(kwargs[name])) for name in sorted(kwargs)],
        )

    def _kernel_call(self, node: torch.fx.Node, arg: Callable[[Any], schema.Arg]) -> schema.Node:
        if node.kwargs["tma_descriptor_metadata"]:
            raise Unsupported(
                "a user-written Triton kernel that takes tensor descriptors (TMA) from the host"
            )
        constants = kernel_side_table.user_kernel_constants(cast(int, node.kwargs["constant_args_idx"]))
        try:
            values = [(name, triton_kernels.constant_of(name, value)) for name, value in constants.items()]
        except triton_source.BadKernelSource as error:
            raise Unsupported(f"an argument of a user-written Triton kernel: {error}") from None
        if self.kernels is None:
            self.kernels = triton_kernels.KernelSources()
        kernel = kernel_side_table.user_kernel(cast(int, node.kwargs["kernel_idx"]))
        return schema.Node(
            op="call_function",
            target=allowed_names.TRITON_CALL,
            args=[],
            kwargs=[
                ("constant_args", schema.DictArg(cast(Any, values))),
                ("grid", arg(node.kwargs["grid"])),
                ("kernel", schema.UserKernel(self.kernels.position(kernel))),
                ("kwargs", arg(node.kwargs["kwargs"])),
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
            self._device(value.device)
            self._positions[id(value)] = len(self.constants)
            self._kept.append(value)
            self.constants.append(encode_constant(value))
        return self._positions[id(value)]

    def _device(self, device: torch.device) -> schema.DeviceArg:
        if device.type not in allowed_names.DEVICES:
            raise Unsupported(f"device {device.type} cannot travel")
        if device.type == "cuda":
            self.gpus.add(device.index)
        return schema.DeviceArg(device.type)

    def _arg(self, value: Any, position: Mapping[torch.fx.Node, int], depth: int) -> schema.Arg:
        if depth <= 0:
            raise LimitExceeded(f"arguments are nested deeper than {self._limits.depth}")

        def below(item: Any) -> schema.Arg:
            return self._arg(item, position, depth - 1)

        match value:
            case None | bool():
                return value
            case float():
                return float(value)  # numpy.float64 is a float too
            case int():
                return int(value) if value in _INT64 else schema.BigInt(str(int(value)))
            case str():
                if allowed_names.DEVICE_TEXT.fullmatch(value):
                    return self._device(torch.device(value))
                if len(value) > allowed_names.MAX_TEXT or not allowed_names.TEXT.fullmatch(value):
                    raise Unsupported(
                        f"a text with quotes, backslashes or control characters: {value[:40]!r}"
                    )
                return str(value)
            case torch.fx.Node():
                return schema.Ref(position[value])
            case slice():
                return schema.SliceArg(below(value.start), below(value.stop), below(value.step))
            case dict():
                return schema.DictArg([(below(key), below(item)) for key, item in value.items()])
            case list():
                return schema.ListArg([below(item) for item in value])
            case tuple() if type(value) is tuple or isinstance(value, torch.Size):
                return schema.TupleArg([below(item) for item in value])
            case complex():
                return schema.Complex(value.real, value.imag)
            case torch.dtype() if value in DTYPES:
                return schema.DTypeArg(DTYPES[value])
            case torch.device():
                return self._device(value)
            case torch.memory_format() if value in MEMORY_FORMATS:
                return schema.MemoryFormatArg(MEMORY_FORMATS[value])
            case torch.layout() if value in LAYOUTS:
                return schema.LayoutArg(LAYOUTS[value])
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return self._symbolic(value)
        if value is ...:
            return schema.EllipsisArg()
        if isinstance(value, OpOverload):
            return schema.Callee(target_name(value))
        raise Unsupported(f"an argument of type {type(value).__module__}.{type(value).__qualname__}")

    def _symbolic(self, value: Any) -> schema.Arg:
        try:
            return schema.Sym(size_expr.render(symbolic_shapes.sym_expr(value), self._symbols))
        except BadExpression as error:
            raise Unsupported(f"symbolic argument {value}: {error.message}") from None


def _message(text: str) -> str:
    """An assertion's message without what a text on the wire cannot have. Inductor writes it into C++ as it is."""
    plain = _UNPRINTED.sub(" ", text).replace('"', "'").replace("\\", "/")
    return plain[: allowed_names.MAX_TEXT]


# --- annotations -----------------------------------------------------------------------------------------

INERT_NODE_META = frozenset(
    {
        # where the node came from
        *allowed_names.words(
            "creation_timestamp desc from_node fwd_nn_module_stack fwd_source_fn_stack grapharg "
            "nn_module_stack original_aten seq_nr source_fn_stack stack_trace torch_fn"
        ),
        # keeps Dynamo's own pass from removing an assertion that it added; AOTAutograd traces the graph anew
        *allowed_names.words("_fx_runtime_assert_preserve"),
        # read when inputs are encoded, or computed again on the worker from the inputs' specifications
        *allowed_names.words("example_value fake_result tensor_dict tensor_meta type unbacked_bindings val"),
    }
)
"""Keys of `node.meta` that do not change code."""

INERT_GRAPH_META = frozenset(
    {"backend_id", "dynamo_compile_id", "dynamo_flat_name_to_original_fqn", "locals_to_steal"}
)
"""Keys of `gm.meta` that do not change code."""

EAGER = {"fallback_to_eager": True}
"""The only user annotation (`node.meta["custom"]`) that is sent: Inductor lowers such a node to a call of the eager
operator. flex_attention's create_block_mask sets it."""

SAVED_TENSORS_HOOKS = "saved_tensors_hooks_"
"""Names of graphs that AOTAutograd runs on the tensors that it saves for the backward pass begin with it."""

_REASONS = {
    "_checkpoint_context_fn": "selective activation checkpointing (context_fn) runs Python code while compiling",
}


def _refuse_annotations(name: str, gm: torch.fx.GraphModule) -> None:
    """Raises Unsupported, with a name, if `gm` or a graph inside it has what a request cannot carry."""
    for key, value in gm.meta.items():
        if key not in INERT_GRAPH_META and _is_set(value):
            raise Unsupported(_REASONS.get(key, f"{name} has the annotation {key!r}, which cannot be sent"))
    for child, _ in gm.named_children():
        if child.startswith(SAVED_TENSORS_HOOKS):
            raise Unsupported(f"{name} has hooks for saved tensors")
    inside: dict[str, torch.fx.GraphModule] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(gm)
            if isinstance(value, torch.fx.GraphModule):
                inside[str(node.target)] = value
        for key, value in node.meta.items():
            if key not in INERT_NODE_META and _is_set(value) and (key, value) != ("custom", EAGER):
                refused = Unsupported(f"node '{node.name}' has the annotation {key!r}, which cannot be sent")
                refused.line = user_line(node)
                raise refused
    for child, graph in inside.items():
        _refuse_annotations(child, graph)


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value != {} and value != []


_CALL = re.compile(r'File "(.+)", line (\d+), in ')
_PYTORCH = f"{Path(torch.__file__).parent}/"


def user_line(node: torch.fx.Node) -> str:
    """`FILE:LINE` from which a node comes: of the innermost call that is not PyTorch's own; '' if Dynamo left none."""
    calls = _CALL.findall(node.meta.get("stack_trace") or "")
    outside = [call for call in calls if not call[0].startswith(_PYTORCH)]
    return ":".join((outside or calls)[-1]) if calls else ""
