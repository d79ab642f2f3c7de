"""Stage 1, for a graph's inputs: fake values and examples in; their descriptions, symbols and shared memory out.

Dynamo passes a Python float that it left symbolic as a 0-d float64 tensor, of which the graph takes the `.item()`.
PyTorch gives a symbolic number to each 0-d int64 and float64 tensor on the CPU, whether the graph reads it or not. What
is only computed with is a tensor like any other; an integer that the graph reads depends on data, as AOTAutograd sees
it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import sympy
import torch

from ..errors import BadExpression, Unsupported
from ..request import schema, size_expr
from ..torch_internals.dynamo import backend_interface, symbolic_shapes, tracing
from ..torch_internals.dynamo.operators import all_nodes
from ..torch_internals.dynamo.tensors import fake_tensors
from ..torch_internals.dynamo.types import FakeTensor, ShapeEnv
from .ambient import dtype_name
from .encode import user_line

_READ = "item"
"""Dynamo's method call for `.item()`, `.tolist()` and `float()` of a tensor."""


class DescribedInputs(NamedTuple):
    """A graph's inputs as a request has them. values: the fake (symbolic) value of each, or the example itself where
    Dynamo left none. floats: the symbolic float that the tensor at a position stands for."""

    values: list[Any]
    symbols: Symbols
    inputs: list[schema.Input]
    bases: list[schema.Base]
    floats: dict[int, torch.SymFloat]


def describe_inputs(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, shards: Collection[str] = ()
) -> DescribedInputs:
    """shards: placeholders of local tensors of DTensors. Raises Unsupported for what is no plain tensor or number."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    values = _placeholder_values(placeholders, example_inputs)
    # A value may be another since Dynamo changed it in place as it traced. AOTAutograd makes its own from the examples.
    originals = [
        value if node.name in shards or not isinstance(example, torch.Tensor) else example
        for node, value, example in zip(placeholders, values, example_inputs, strict=True)
    ]
    storages = _storage_groups(values)
    bases = _bases(values, storages)
    floats = _symbolic_floats(gm)
    symbols = Symbols([*values, *(base for base, _ in bases)])
    reaches_past = _reads_past_a_view(gm)
    inputs = [
        _input(
            f"input {position}",
            value,
            originals[position],
            tracing.static_input_type(node),
            storages.get(position, -1),
            symbols,
            reaches_past,
            floats.get(position),
        )
        for position, (value, node) in enumerate(zip(values, placeholders, strict=True))
    ]
    described = _described_bases(bases, values, originals, storages, symbols)
    return DescribedInputs(values, symbols, inputs, described, floats)


def _placeholder_values(placeholders: Sequence[torch.fx.Node], example_inputs: Sequence[Any]) -> list[Any]:
    if len(placeholders) != len(example_inputs):
        raise Unsupported(f"the graph has {len(placeholders)} placeholders and {len(example_inputs)} inputs")
    values = [
        node.meta.get("example_value", example)
        for node, example in zip(placeholders, example_inputs, strict=True)
    ]
    for position, (node, value) in enumerate(zip(placeholders, values, strict=True)):
        if isinstance(value, torch.Tensor) and (what := _why_not_plain(value)):
            line = next(filter(None, map(user_line, node.users)), "")
            at = f", used at {line}" if line else ""
            error = Unsupported(f"input {position} ({node.name}{at}) {what}")
            error.line = line
            raise error
    return values


class Symbols:
    """The symbols that the inputs' sizes are made of, named s0, s1, ... in order of first use."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.names: dict[sympy.Symbol, str] = {}
        self.env: ShapeEnv | None = None
        for value in values:
            if isinstance(value, torch.SymInt):
                self._add(value)
            elif isinstance(value, torch.Tensor):
                for size in (*value.shape, *value.stride(), value.storage_offset()):
                    self._add(size)

    def _add(self, size: Any) -> None:
        if not isinstance(size, torch.SymInt):
            return
        self.env = symbolic_shapes.sym_env(size)
        for symbol in sorted(symbolic_shapes.sym_expr(size).free_symbols, key=str):
            self.names.setdefault(symbol, f"s{len(self.names)}")

    def text(self, size: Any) -> schema.Size:
        """A size as the wire has it: an integer, or an expression over the names."""
        if isinstance(size, int):
            return size
        rendered = symbolic_shapes.sym_expr(size)
        if rendered.is_Integer:
            return int(rendered)
        try:
            return size_expr.render(rendered, self.names)
        except BadExpression as error:
            raise Unsupported(f"an input's size cannot be sent: {error.message}") from error

    def know(self, size: Any) -> bool:
        """Whether a size is a number, or made of these symbols alone."""
        return isinstance(size, int) or symbolic_shapes.sym_expr(size).free_symbols <= self.names.keys()

    def described(self) -> list[schema.Symbol]:
        found = []
        for symbol, name in self.names.items():
            assert self.env is not None
            hint = symbolic_shapes.symbol_hint(self.env, symbol)
            lower, upper = symbolic_shapes.symbol_range(self.env, symbol)
            found.append(schema.Symbol(name=name, hint=hint, lower=lower, upper=upper))
        return found

    def are_exact(self) -> bool:
        """Whether the program itself says for which sizes to optimize."""
        return bool(self.names) and self.env is not None and symbolic_shapes.has_hint_override(self.env)

    def relations(self) -> list[str]:
        """What Dynamo has assumed about the symbols so far; the worker starts from the same assumptions."""
        if self.env is None:
            return []
        found: list[str] = []
        for guard in symbolic_shapes.guard_expressions(self.env):
            if guard.free_symbols and guard.free_symbols <= self.names.keys():
                text = size_expr.render(guard, self.names)
                if text not in found:
                    found.append(text)
        return found

    def symints(self) -> dict[str, Any]:
        if self.env is None:
            return {}
        return {name: symbolic_shapes.symint_of(self.env, symbol) for symbol, name in self.names.items()}


def _storage_groups(values: Sequence[Any]) -> dict[int, int]:
    """Position -> number of the storage, for inputs that share one with another input."""
    by_storage: dict[int, list[int]] = {}
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            by_storage.setdefault(fake_tensors.storage_id(value), []).append(position)
    shared = [positions for positions in by_storage.values() if len(positions) > 1]
    return {position: number for number, positions in enumerate(shared) for position in positions}


def _bases(values: Sequence[Any], storages: Mapping[int, int]) -> list[tuple[torch.Tensor, list[int]]]:
    """What inputs that share memory are views of (Tensor._base), each with the positions of its views."""
    found: dict[int, tuple[torch.Tensor, list[int]]] = {}
    for position in sorted(storages):
        base = fake_tensors.base_of(values[position])
        if base is not None:
            found.setdefault(id(base), (base, []))[1].append(position)
    return list(found.values())


def _described_bases(
    bases: Sequence[tuple[torch.Tensor, list[int]]],
    values: Sequence[Any],
    originals: Sequence[Any],
    storages: Mapping[int, int],
    symbols: Symbols,
) -> list[schema.Base]:
    found = []
    for base, views in bases:
        tensor: Any = next((position for position in storages if values[position] is base), None)
        if tensor is None:
            where = f"what input {views[0]} is a view of"
            if what := _why_not_plain(base):
                raise Unsupported(f"{where} {what}")
            real = fake_tensors.base_of(originals[views[0]])
            tensor = _input(
                where, base, base if real is None else real, "", storages[views[0]], symbols, False
            )
        found.append(schema.Base(tensor=tensor, views=views))
    return found


def _reads_past_a_view(gm: torch.fx.GraphModule) -> bool:
    """Whether the graph can reach memory of an input's storage that the input itself does not."""
    return any("as_strided" in str(node.target) for node in all_nodes(gm))


def _input(
    where: str,
    value: Any,
    original: Any,
    static_address: str,
    storage: int,
    symbols: Symbols,
    reaches_past: bool,
    number: torch.SymFloat | None = None,
) -> schema.Input:
    """original: what says whether it requires gradients."""
    if isinstance(value, torch.SymInt):
        return schema.SymIntInput(expr=str(symbols.text(value)))
    if value is None or isinstance(value, bool | int | float):
        return schema.ScalarInput(value=value)
    if not isinstance(value, torch.Tensor):
        raise Unsupported(f"{where} is a {type(value).__name__}")
    offset = symbols.text(value.storage_offset())
    stored = value.untyped_storage().nbytes()
    needs_storage = storage >= 0 or offset != 0
    if storage < 0 and not reaches_past and not symbols.know(stored):  # of a base that is no input
        stored = fake_tensors.bytes_reached(value)
    if reaches_past and not needs_storage and symbols.know(stored):
        needs_storage = symbols.text(stored) != symbols.text(value.numel() * value.element_size())
    return schema.TensorInput(
        shape=[symbols.text(s) for s in value.shape],
        stride=[symbols.text(s) for s in value.stride()],
        dtype=dtype_name(value.dtype),
        device=value.device.type,
        requires_grad=original.requires_grad,
        offset=offset,
        is_leaf=original.is_leaf,
        is_parameter=isinstance(value, torch.nn.Parameter),
        static_address=cast('Literal["", "guarded", "unguarded"]', static_address),
        storage=storage,
        storage_bytes=symbols.text(stored) if needs_storage else 0,
        number=None if number is None else symbolic_shapes.symfloat_hint(number),
    )


def _why_not_plain(value: torch.Tensor) -> str:
    """What keeps a tensor from being described; '' if nothing does."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor):
        return f"is a tensor subclass, {type(value).__name__}"
    if value.layout != torch.strided or value.is_quantized or value.is_mkldnn or value.is_nested:
        return "is not a plain strided tensor"
    if value.is_conj() or value.is_neg():
        return "is a lazily conjugated or negated view"
    return "" if value.device.type in ("cpu", "cuda") else f"lives on {value.device.type}"


def _symbolic_floats(gm: torch.fx.GraphModule) -> dict[int, torch.SymFloat]:
    """Input position -> the symbolic float that the tensor there stands for."""
    found = dict(_float_inputs(gm))
    if not found:
        return {}
    reads = [node for node in all_nodes(gm) if node.target == _READ]
    read = {symbolic_shapes.symfloat_name(node.meta.get("example_value")) for node in reads}
    return {position: number for position, number in found.items() if float_name(number) in read}


def with_constants(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with numbers in place of the floats that Dynamo was asked to make constants and still passes, because
    the graph uses the tensors too: a copy, and a guard of Dynamo's on each; `gm` itself if there is none."""
    nodes = gm.graph.find_nodes(op="placeholder")
    constants = {
        nodes[position].name: number
        for position, number in _float_inputs(gm)
        if backend_interface.is_specialized(float_name(number))
        and any(user.target == _READ for user in nodes[position].users)
    }
    if not constants:
        return gm
    graph = copy.deepcopy(gm.graph)
    for node in list(graph.nodes):
        if node.target == _READ and node.args[0].name in constants:
            node.replace_all_uses_with(float(constants[node.args[0].name]))
            graph.erase_node(node)
    return torch.fx.GraphModule(gm, graph)


def _float_inputs(gm: torch.fx.GraphModule) -> Iterator[tuple[int, torch.SymFloat]]:
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        number = fake_tensors.item_memo(node.meta.get("example_value"))
        if isinstance(number, torch.SymFloat) and symbolic_shapes.is_backed(number) and float_name(number):
            yield position, number


def float_name(number: torch.SymFloat) -> str:
    return symbolic_shapes.symfloat_name(number) or ""
