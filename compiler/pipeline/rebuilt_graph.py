"""Stage 7: rebuilds the client's graph from a decoded request, with fake inputs like the client's.

AOTAutograd must get what Dynamo would have given it: placeholders with sources and static-address marks; fake tensors
with the client's sizes, strides, storages and leaves; and one ShapeEnv with the client's symbols. The joint graph and
the partition are then made by AOTAutograd itself, inside compile_fx (inductor.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from msgspec import Struct

from ..errors import MalformedRequest
from ..graph import decode, toolchain
from ..graph.ambient import apply_ambient
from ..graph.dtensors import RequestMeshes
from ..request import schema, size_expr
from ..torch_internals.dynamo import symbolic_shapes, tracing
from ..torch_internals.dynamo.tensors import fake_tensors
from ..torch_internals.dynamo.types import FakeTensorMode, ShapeEnv

MakeTensor = Callable[[schema.TensorInput, list[Any], list[Any]], torch.Tensor]


CHANGES_ARGUMENTS = "torchrelay_changes_arguments"
"""The key in a node's meta that says that it changes a tensor that it is called with."""


class RebuiltGraph(Struct, frozen=True):
    """A graph ready to be compiled. `symbols`: canonical name -> torch.SymInt of `fake_mode`'s shape environment."""

    gm: torch.fx.GraphModule
    inputs: list[Any]
    fake_mode: FakeTensorMode
    symbols: dict[str, Any]
    numbers: dict[int, Any]
    """Input position -> torch.SymFloat, for inputs that stand for a Python float."""


def rebuild(request: schema.GraphRequest) -> RebuiltGraph:
    """Rebuild the client's graph on fake tensors. Raises MalformedRequest if the inputs contradict each other."""
    env = symbolic_shapes.new_shape_env()
    fake_mode = fake_tensors.new_fake_mode(env)
    symbols: dict[str, Any] = {
        s.name: symbolic_shapes.new_symint(env, s.name, s.hint, s.lower, s.upper) for s in request.symbols
    }
    for relation in request.relations:
        if not bool(size_expr.evaluate(relation, symbols)):
            raise MalformedRequest(f"relation {relation} does not hold for the symbols' own hints")
    gm = decode_request(request, symbols)
    decode.mark_eager(gm, request.eager)
    numbers = {
        position: symbolic_shapes.new_symfloat(env, f"input_{position}", spec.number)
        for position, spec in enumerate(request.inputs)
        if isinstance(spec, schema.TensorInput) and spec.number is not None
    }
    inputs = fake_inputs(request, fake_mode, symbols, numbers)
    _describe(gm, request, inputs)
    with apply_ambient(request.ambient):
        _propagate(gm, request, fake_inputs(request, fake_mode, symbols, numbers), fake_mode, env)
    return RebuiltGraph(gm, inputs, fake_mode, symbols, numbers)


def decode_request(request: schema.GraphRequest, symbols: Mapping[str, Any]) -> torch.fx.GraphModule:
    """The request's graph, for this process' first GPU or its CPU. Raises LibraryMismatch."""
    toolchain.require_libraries(request.libraries)
    return decode.decode_graph(
        request.graph,
        request.constants,
        device_index={"cuda": 0},
        symbols=symbols,
        kernels=request.kernels,
        spread=RequestMeshes(request.meshes, request.target.kind),
    )


def fake_inputs(
    request: schema.GraphRequest,
    fake_mode: FakeTensorMode,
    symbols: Mapping[str, Any],
    numbers: Mapping[int, Any],
) -> list[Any]:
    """New fake inputs. Inputs that shared memory on the client share it here."""
    with fake_mode:
        inputs = make_inputs(request, symbols, _empty)
    for position, number in numbers.items():
        fake_tensors.set_item_memo(inputs[position], number)
    return inputs


def make_inputs(request: schema.GraphRequest, symbols: Mapping[str, Any], make: MakeTensor) -> list[Any]:
    """One value for each input, sharing memory and being views of each other as on the client. make(spec, shape,
    stride): a tensor of new memory, of the spec's dtype or a wider one."""
    memory = _Memory(request, symbols, make)
    bases = {position: base for base in request.bases for position in base.views}
    values: list[Any] = [
        None if position in bases else memory.value(spec) for position, spec in enumerate(request.inputs)
    ]
    for base in request.bases:
        whole = values[base.tensor] if isinstance(base.tensor, int) else memory.value(base.tensor)
        for position in base.views:
            values[position] = memory.view(request.inputs[position], whole)
    return values


def size_value(value: schema.Size, symbols: Mapping[str, Any]) -> Any:
    """A size as a number: an integer itself, or the value of a size expression."""
    return value if isinstance(value, int) else size_expr.evaluate(value, symbols)


class _Memory:
    """Makes tensors, and the storages that several of them share."""

    def __init__(self, request: schema.GraphRequest, symbols: Mapping[str, Any], make: MakeTensor) -> None:
        self._symbols = symbols
        self._make = make
        self._sharing: dict[int, list[schema.TensorInput]] = {}
        self._shared: dict[int, torch.Tensor] = {}
        described = (*request.inputs, *(base.tensor for base in request.bases))
        for spec in described:
            if isinstance(spec, schema.TensorInput) and spec.storage >= 0:
                self._sharing.setdefault(spec.storage, []).append(spec)

    def value(self, spec: schema.Input) -> Any:
        """An input, or a base, that is no view."""
        if isinstance(spec, schema.ScalarInput):
            return spec.value
        if isinstance(spec, schema.SymIntInput):
            return size_value(spec.expr, self._symbols)
        shape, stride, offset = self._layout(spec)
        if spec.storage < 0 and isinstance(offset, int) and offset == 0 and spec.storage_bytes == 0:
            made = self._make(spec, shape, stride)
        else:
            made = torch.empty(0, dtype=self._dtype(spec), device=spec.device)
            made.set_(self._flat(spec).untyped_storage(), offset, shape, stride)
        return _with_autograd(spec, made)

    def view(self, spec: schema.Input, base: torch.Tensor) -> torch.Tensor:
        assert isinstance(spec, schema.TensorInput)
        shape, stride, offset = self._layout(spec)
        return fake_tensors.view_of(
            base,
            self._dtype(spec),
            shape,
            stride,
            offset,
            requires_grad=spec.requires_grad,
            is_leaf=spec.is_leaf,
        )

    def _layout(self, spec: schema.TensorInput) -> tuple[list[Any], list[Any], Any]:
        shape = [size_value(s, self._symbols) for s in spec.shape]
        stride = [size_value(s, self._symbols) for s in spec.stride]
        if len(shape) != len(stride):
            raise MalformedRequest(f"an input has {len(shape)} sizes and {len(stride)} strides")
        return shape, stride, size_value(spec.offset, self._symbols)

    def _dtype(self, spec: schema.TensorInput) -> torch.dtype:
        made = self._flat(spec).dtype
        return getattr(torch, spec.dtype) if made is torch.uint8 else made

    def _flat(self, spec: schema.TensorInput) -> torch.Tensor:
        """All of a tensor's storage, as one tensor: of bytes, all zero, where dtypes differ."""
        found = self._shared.get(spec.storage) if spec.storage >= 0 else None
        if found is None:
            sharing = self._sharing[spec.storage] if spec.storage >= 0 else [spec]
            length = size_value(spec.storage_bytes, self._symbols)
            if len({each.dtype for each in sharing}) == 1:
                count = length // getattr(torch, spec.dtype).itemsize
                vectors = all(len(each.shape) < 2 for each in sharing)
                # Of what is no vector, values may be negative.
                found = self._make(spec, [count] if vectors else [count, 1], [1] if vectors else [1, 1])
            else:
                found = torch.zeros(length, dtype=torch.uint8, device=spec.device)
            if spec.storage >= 0:
                self._shared[spec.storage] = found
        return found


def _empty(spec: schema.TensorInput, shape: list[Any], stride: list[Any]) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=getattr(torch, spec.dtype), device=spec.device)


def _with_autograd(spec: schema.TensorInput, value: torch.Tensor) -> torch.Tensor:
    if spec.is_parameter:
        return torch.nn.Parameter(value, requires_grad=spec.requires_grad)
    if not spec.requires_grad:
        return value
    if spec.is_leaf:
        return value.requires_grad_()
    # An activation has a grad_fn. In-place arithmetic with a leaf adds one and keeps strides and storage.
    with torch.enable_grad():
        return value.mul_(torch.ones((), dtype=value.dtype, device=value.device, requires_grad=True))


def _describe(gm: torch.fx.GraphModule, request: schema.GraphRequest, inputs: list[Any]) -> None:
    """Attach what Dynamo attaches to a graph and its placeholders."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    marks = [getattr(spec, "static_address", "") for spec in request.inputs]
    tracing.attach_dynamo_metadata(gm, list(zip(placeholders, inputs, marks, strict=True)))


def _propagate(
    gm: torch.fx.GraphModule,
    request: schema.GraphRequest,
    inputs: list[Any],
    fake_mode: FakeTensorMode,
    env: ShapeEnv,
) -> None:
    """Set `example_value` on every node, as Dynamo does: Inductor's pre-grad passes read it. With it goes what is known
    of sizes that depend on data, and CHANGES_ARGUMENTS on a node that changes a tensor.

    The inputs must not be used afterwards: the graph may have changed them in place.
    """
    known: dict[torch.fx.Node, list[symbolic_shapes.UnbackedFacts]] = {}
    nodes = list(gm.graph.nodes)
    for size in request.unbacked:
        facts = symbolic_shapes.UnbackedFacts(size.path, size.lower, size.upper, size.size_like)
        known.setdefault(nodes[size.node], []).append(facts)

    class Recorder(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> Any:
            tensors = self._tensors(node)
            before = [_version(tensor) for tensor in tensors]
            result = super().run_node(node)
            if before != [_version(tensor) for tensor in tensors]:
                node.meta[CHANGES_ARGUMENTS] = True
            if node.op not in ("placeholder", "output"):
                node.meta["example_value"] = result
                symbolic_shapes.bind_unbacked(env, node, result, known.get(node, ()))
            return result

        def _tensors(self, node: torch.fx.Node) -> list[torch.Tensor]:
            values = (self.env.get(argument) for argument in node.all_input_nodes)
            return [value for value in values if isinstance(value, torch.Tensor)]

    with fake_mode, tracing.python_dispatcher(), torch.random.fork_rng(devices=[]):
        Recorder(gm).run(*inputs)


def _version(tensor: torch.Tensor) -> object:
    """What another value follows once the tensor has changed. Of an inference tensor it is not known: always new."""
    return object() if tensor.is_inference() else tensor._version
