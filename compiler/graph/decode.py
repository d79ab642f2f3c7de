"""Stage 7: decodes a checked schema.Graph and its constants into an FX graph.

FX makes the nodes' names from their targets. Encoding the result gives the same schema.Graph."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct

from ..errors import ForbiddenTarget, MalformedRequest, Unsupported
from ..request import allowed_names, schema, size_expr
from ..request.operator_table import table
from ..torch_internals.dynamo import kernel_side_table
from . import triton_kernels
from .dtensors import RequestMeshes
from .encode import EAGER
from .names import import_name, resolve_target, torch_device, torch_value


def decode_graph(
    graph: schema.Graph,
    constants: list[schema.Constant],
    *,
    device_index: Mapping[str, int],
    symbols: Mapping[str, Any],
    kernels: Sequence[schema.KernelSource] = (),
    spread: RequestMeshes | None = None,
) -> torch.fx.GraphModule:
    """The GraphModule of a checked graph.

    device_index: device kind -> index, for kinds that have one. symbols: name -> value (int or SymInt) for Sym
    arguments. kernels: only a compile child passes any, because their source is RUN here. spread: the request's meshes;
    if it has any, this process becomes a rank of a fake process group. Raises ForbiddenTarget, Unsupported or
    MalformedRequest.
    """
    tensors = [decode_constant(item, device_index) for item in constants]
    known = [kernel_side_table.register_user_kernel(triton_kernels.build(kernel)) for kernel in kernels]
    return _Decoder(tensors, device_index, symbols, known, spread or RequestMeshes([], "cpu")).graph(graph)


def mark_eager(gm: torch.fx.GraphModule, paths: Sequence[Sequence[int]]) -> None:
    """Set EAGER on the nodes of a decoded graph; `paths` as in EncodedGraph."""
    for *subgraphs, position in paths:
        module = functools.reduce(lambda outer, index: getattr(outer, f"subgraph_{index}"), subgraphs, gm)
        list(module.graph.nodes)[position].meta["custom"] = dict(EAGER)


def decode_constant(constant: schema.Constant, device_index: Mapping[str, int]) -> torch.Tensor:
    dtype = torch_value(constant.dtype, allowed_names.DTYPE_BYTES)
    device = torch_device(constant.device, device_index)
    if constant.data:
        flat = torch.frombuffer(bytearray(constant.data), dtype=torch.uint8).view(dtype)
        tensor = flat.reshape(constant.shape).to(device)
    else:
        tensor = torch.empty(constant.shape, dtype=dtype, device=device)
    return tensor.requires_grad_(constant.requires_grad)


class _Decoder(Struct):
    """Decodes one request's graphs; has what they share."""

    tensors: list[torch.Tensor]
    device_index: Mapping[str, int]
    symbols: Mapping[str, Any]
    kernels: list[int]
    spread: RequestMeshes

    def graph(self, encoded: schema.Graph) -> torch.fx.GraphModule:
        attributes: dict[str, Any] = {
            f"subgraph_{index}": self.graph(child) for index, child in enumerate(encoded.subgraphs)
        }
        graph = torch.fx.Graph()
        nodes: list[torch.fx.Node] = []
        inputs = 0
        for node in encoded.nodes:
            args = tuple(self._arg(value, nodes) for value in node.args)
            kwargs = {name: self._arg(value, nodes) for name, value in node.kwargs}
            match node.op:
                case "placeholder":
                    nodes.append(graph.placeholder(f"arg{inputs}"))
                    inputs += 1
                case "get_attr":
                    nodes.append(graph.create_node("get_attr", self._attribute(node.args[0], attributes)))
                case "call_function" if node.target == allowed_names.TRITON_CALL:
                    nodes.append(
                        graph.create_node("call_function", import_name(node.target), (), _kernel_call(kwargs))
                    )
                case "call_function" if node.target in allowed_names.DTENSOR_CALLS:
                    nodes.append(graph.create_node("call_function", *self.spread.call(node.target, args)))
                case "call_function":
                    nodes.append(
                        graph.create_node("call_function", resolve_target(node.target), args, kwargs)
                    )
                case "call_method":
                    if node.target not in table.load(torch.__version__).methods:
                        raise ForbiddenTarget(f"method {node.target[:200]!r} is not in the table")
                    nodes.append(graph.create_node("call_method", node.target, args, kwargs))
                case "output":
                    nodes.append(graph.output(args[0]))
        try:
            return torch.fx.GraphModule(attributes, graph)
        except (AssertionError, IndexError, SyntaxError, RecursionError) as error:
            # FX generates Python code of the graph, which fails if an operator has too few operands.
            raise MalformedRequest(f"the graph cannot be written as code: {error}") from error

    def _attribute(self, value: schema.Arg, attributes: dict[str, Any]) -> str:
        """The name of the attribute that a get_attr node reads. A tensor becomes an attribute here."""
        if isinstance(value, schema.Subgraph):
            return f"subgraph_{value.index}"
        if isinstance(value, schema.Const):
            name = f"constant_{value.index}"
            attributes[name] = self.tensors[value.index]
            return name
        raise Unsupported(f"get_attr of {type(value).__name__}")

    def _arg(self, value: schema.Arg, nodes: list[torch.fx.Node]) -> Any:
        def below(item: schema.Arg) -> Any:
            return self._arg(item, nodes)

        match value:
            case None | bool() | int() | float() | str():
                return value
            case schema.Ref(index):
                return nodes[index]
            case schema.ListArg(items):
                return [below(item) for item in items]
            case schema.TupleArg(items):
                return tuple(below(item) for item in items)
            case schema.DictArg(pairs):
                return {below(key): below(item) for key, item in pairs}
            case schema.SliceArg(start, stop, step):
                return slice(below(start), below(stop), below(step))
            case schema.EllipsisArg():
                return ...
            case schema.DTypeArg(name):
                return torch_value(name, allowed_names.DTYPE_BYTES)
            case schema.DeviceArg(kind):
                return torch_device(kind, self.device_index)
            case schema.MemoryFormatArg(name):
                return torch_value(name, allowed_names.MEMORY_FORMATS)
            case schema.LayoutArg(name):
                return torch_value(name, allowed_names.LAYOUTS)
            case schema.Complex(re, im):
                return complex(re, im)
            case schema.BigInt(text):
                return int(text)
            case schema.Sym(text):
                return size_expr.evaluate(text, self.symbols)
            case schema.Callee(target):
                return resolve_target(target)
            case schema.UserKernel(index):
                return self.kernels[index]
            case schema.TritonDType():
                return triton_kernels.value_of(value)
            case schema.Const() | schema.Subgraph():
                return None  # _attribute reads it; get_attr nodes take no arguments


def _kernel_call(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a user-written kernel as Dynamo writes them, from those on the wire."""
    return {
        "kernel_idx": kwargs["kernel"],
        "constant_args_idx": kernel_side_table.register_user_kernel_constants(kwargs["constant_args"]),
        "grid": kwargs["grid"],
        "tma_descriptor_metadata": {},
        "kwargs": kwargs["kwargs"],
    }
