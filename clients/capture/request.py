"""Stage 1: what Dynamo hands to a back end (graph, inputs, surroundings) in; a canonical GraphRequest out.

Everything that can change the compiled result goes in, nothing else: symbols are renamed in order of first
use, devices lose their index, parameters lose their names, and the ambient state is read from torch itself.
What the wire cannot carry raises Unsupported with the input or node at fault; nothing has been sent then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, cast

import sympy
import torch
from msgspec import Struct

from ...compiler.errors import BadExpression, Unsupported
from ...compiler.graph import encode
from ...compiler.graph.ambient import read_ambient
from ...compiler.graph.annotations import eager_nodes, user_line
from ...compiler.graph.toolchain import local_library, local_target, local_toolchain
from ...compiler.graph.torch_names import dtype_name
from ...compiler.request import schema, size_expr
from ...compiler.request.operator_table.libraries import libraries_of
from ...compiler.torch_internals.dynamo import symbolic_shapes, tracing
from ...compiler.torch_internals.dynamo.tensors import fake_tensors
from ...compiler.torch_internals.dynamo.types import FakeTensor, ShapeEnv
from .configuration import Mode, read_configuration
from .inputs.float_inputs import symbolic_floats
from .locked_tunings import LockedTunings
from .triton_sources import KernelSources


class CapturedGraph(Struct, frozen=True):
    """A request, and what the client needs besides to load its answer.

    symints: canonical symbol name -> the client's own torch.SymInt. device_index: the GPU it runs on, or None.
    """

    request: schema.GraphRequest
    symints: dict[str, Any]
    device_index: int | None
    cudagraphs: bool
    floats: dict[int, str]
    """Input position -> Dynamo's name of the symbolic float it stands for."""
    groups: dict[str, str] = {}
    """What generated code calls a process group -> its name here."""


def capture(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: Mode,
    options: Mapping[str, Any],
    lock: LockedTunings | None = None,
    meshes: Sequence[schema.Mesh] = (),
    groups: Mapping[str, str] | None = None,
    shards: Collection[str] = (),
) -> CapturedGraph:
    """Describe a Dynamo graph, with what `lock` pins for it. meshes, groups: of its DTensors (dtensor_edges.py);
    shards: placeholders of their local tensors. Raises Unsupported, BadOption, LimitExceeded or TuningLockError;
    changes nothing."""
    values = _placeholder_values(gm, example_inputs)
    placeholders = gm.graph.find_nodes(op="placeholder")
    given = [
        value if node.name in shards or not isinstance(example, torch.Tensor) else example
        for node, value, example in zip(placeholders, values, example_inputs, strict=True)
    ]
    groups_of_storage = _storage_groups(values)
    bases = _bases(values, groups_of_storage)
    floats = symbolic_floats(gm)
    symbols = _Symbols([*values, *(base for base, _ in bases)])
    inputs = _inputs(values, given, gm, symbols, groups_of_storage, floats)
    sources = KernelSources()
    encoded, constants = encode.encode_graph(gm, symbols=symbols.names, kernels=sources.position)
    index = _device_index(gm, values)
    kind: Literal["cpu", "cuda"] = "cpu" if index is None else "cuda"
    if sources.found and kind == "cpu":
        raise Unsupported("a user-written Triton kernel in a graph on the CPU")
    inductor_options, aot_options, cudagraphs = read_configuration(mode, options)
    request = schema.GraphRequest(
        schema=schema.SCHEMA,
        graph=encoded,
        inputs=inputs,
        symbols=symbols.described(),
        relations=symbols.relations(),
        constants=constants,
        ambient=read_ambient(kind, values, gm),
        mode=mode,
        options=inductor_options,
        aot_options=aot_options,
        toolchain=local_toolchain(),
        target=local_target(kind, index),
        kernels=sources.found,
        eager=eager_nodes(gm),
        meshes=list(meshes),
        libraries=[local_library(name) for name in libraries_of(encoded)],
        exact_sizes=symbols.are_exact(),
        bases=_described_bases(bases, values, given, groups_of_storage, symbols),
    )
    if lock is not None:
        request = lock.pin(request)
    names = {position: symbolic_shapes.symfloat_name(number) or "" for position, number in floats.items()}
    return CapturedGraph(request, symbols.symints(), index, cudagraphs, names, dict(groups or {}))


def _placeholder_values(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Each placeholder's fake (symbolic) value, or the example itself where Dynamo left none. Raises Unsupported for a
    tensor that is not a plain one."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
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


class _Symbols:
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
            if symbolic_shapes.symbol_hint(self.env, symbol) is None:
                raise Unsupported(f"an input's size depends on data ({symbol})")
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
            assert hint is not None
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


def _inputs(
    values: Sequence[Any],
    given: Sequence[Any],
    gm: torch.fx.GraphModule,
    symbols: _Symbols,
    groups: Mapping[int, int],
    floats: Mapping[int, torch.SymFloat],
) -> list[schema.Input]:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    reaches_past = _reads_past_a_view(gm)
    return [
        _input(
            f"input {position}",
            value,
            given[position],
            tracing.static_input_type(node),
            groups.get(position, -1),
            symbols,
            reaches_past,
            floats.get(position),
        )
        for position, (value, node) in enumerate(zip(values, placeholders, strict=True))
    ]


def _storage_groups(values: Sequence[Any]) -> dict[int, int]:
    """Position -> number of the storage, for inputs that share one with another input."""
    by_storage: dict[int, list[int]] = {}
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            by_storage.setdefault(fake_tensors.storage_id(value), []).append(position)
    shared = [positions for positions in by_storage.values() if len(positions) > 1]
    return {position: number for number, positions in enumerate(shared) for position in positions}


def _bases(values: Sequence[Any], groups: Mapping[int, int]) -> list[tuple[torch.Tensor, list[int]]]:
    """What inputs that share memory are views of (Tensor._base), each with the positions of its views."""
    found: dict[int, tuple[torch.Tensor, list[int]]] = {}
    for position in sorted(groups):
        base = fake_tensors.base_of(values[position])
        if base is not None:
            found.setdefault(id(base), (base, []))[1].append(position)
    return list(found.values())


def _described_bases(
    bases: Sequence[tuple[torch.Tensor, list[int]]],
    values: Sequence[Any],
    given: Sequence[Any],
    groups: Mapping[int, int],
    symbols: _Symbols,
) -> list[schema.Base]:
    found = []
    for base, views in bases:
        tensor: Any = next((position for position in groups if values[position] is base), None)
        if tensor is None:
            where = f"what input {views[0]} is a view of"
            if what := _why_not_plain(base):
                raise Unsupported(f"{where} {what}")
            real = fake_tensors.base_of(given[views[0]])
            tensor = _input(where, base, base if real is None else real, "", groups[views[0]], symbols, False)
        found.append(schema.Base(tensor=tensor, views=views))
    return found


def _reads_past_a_view(gm: torch.fx.GraphModule) -> bool:
    """Whether the graph can reach memory of an input's storage that the input itself does not."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule))
    return any("as_strided" in str(node.target) for graph in graphs for node in graph.nodes)


def _input(
    where: str,
    value: Any,
    given: Any,
    static_address: str,
    storage: int,
    symbols: _Symbols,
    reaches_past: bool,
    number: torch.SymFloat | None = None,
) -> schema.Input:
    """given: what says whether it requires gradients: the value may be another since Dynamo changed it in place as it
    traced. AOTAutograd makes values of its own from what is given."""
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
        requires_grad=given.requires_grad,
        offset=offset,
        is_leaf=given.is_leaf,
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


def _device_index(gm: torch.fx.GraphModule, values: Sequence[Any]) -> int | None:
    """The one GPU that inputs, constants and device arguments name; None for a graph on the CPU.

    Raises Unsupported for a graph over several GPUs.
    """
    found = {v.device for v in values if isinstance(v, torch.Tensor) and v.device.type == "cuda"}
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                found |= _devices_in((node.args, node.kwargs))
    found |= {t.device for t in (*gm.parameters(), *gm.buffers()) if t.device.type == "cuda"}
    indices = {torch.cuda.current_device() if d.index is None else d.index for d in found}
    if len(indices) > 1:
        raise Unsupported(f"the graph spans {len(indices)} GPUs")
    return indices.pop() if indices else None


def _devices_in(value: Any) -> set[torch.device]:
    if isinstance(value, torch.device):
        return {value} if value.type == "cuda" else set()
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return {torch.device(value)}
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return set().union(*(_devices_in(item) for item in value))
    return set()
