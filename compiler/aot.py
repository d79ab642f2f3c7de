"""Stage 7: a decoded request in; the same graph with the same (fake) inputs and surroundings as the client's out.

AOTAutograd traces whatever it is given, so this stage's task is to give it what Dynamo would have: placeholders
with sources and static-address marks, fake tensors whose sizes, strides, storages and leaf-ness are the
client's, one ShapeEnv with the client's symbols, and the client's ambient state. The joint graph, the partition
and both halves are then AOTAutograd's own work, inside compile_fx (inductor.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from msgspec import Struct

from . import dtensors, expr, graph, torch_internals, wire
from .errors import MalformedRequest
from .torch_internals import FakeTensorMode, ShapeEnv


class Program(Struct, frozen=True):
    """A graph ready to be compiled. `symbols`: canonical name -> torch.SymInt of `fake_mode`'s shape environment."""

    gm: torch.fx.GraphModule
    inputs: list[Any]
    fake_mode: FakeTensorMode
    symbols: dict[str, Any]
    numbers: dict[int, Any]
    """Input position -> torch.SymFloat, for inputs that stand for a Python float."""


def rebuild(request: wire.GraphRequest) -> Program:
    """Rebuild the client's program on fake tensors. Raises MalformedRequest where inputs contradict themselves."""
    env = torch_internals.new_shape_env()
    fake_mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    symbols: dict[str, Any] = {
        s.name: torch_internals.new_symint(env, s.name, s.hint, s.lower, s.upper) for s in request.symbols
    }
    for relation in request.relations:
        if not bool(expr.evaluate(relation, symbols)):
            raise MalformedRequest(f"relation {relation} does not hold for the symbols' own hints")
    gm = graph.decode_graph(
        request.graph,
        request.constants,
        device_index={"cuda": 0},
        symbols=symbols,
        kernels=request.kernels,
        spread=dtensors.Rebuilt(request.meshes, request.target.kind),
    )
    numbers = {
        position: torch_internals.new_symfloat(env, f"input_{position}", spec.number)
        for position, spec in enumerate(request.inputs)
        if isinstance(spec, wire.TensorInput) and spec.number is not None
    }
    inputs = fake_inputs(request, fake_mode, symbols, numbers)
    _describe(gm, request, inputs)
    with ambient(request.ambient):
        _propagate(gm, fake_inputs(request, fake_mode, symbols, numbers), fake_mode, env)
    return Program(gm, inputs, fake_mode, symbols, numbers)


def fake_inputs(
    request: wire.GraphRequest,
    fake_mode: FakeTensorMode,
    symbols: Mapping[str, Any],
    numbers: Mapping[int, Any],
) -> list[Any]:
    """Fresh fake inputs; inputs that shared memory on the client share it here."""
    with fake_mode:
        inputs = make_inputs(request, symbols, _empty)
    for position, number in numbers.items():
        torch_internals.set_item_memo(inputs[position], number)
    return inputs


def make_inputs(request: wire.GraphRequest, symbols: Mapping[str, Any], make: Any) -> list[Any]:
    """One value for each input; `make(spec, shape, stride)` gives the memory of a tensor that stands alone."""
    storages: dict[int, torch.Tensor] = {}
    return [_input(spec, symbols, storages, make) for spec in request.inputs]


def size(value: wire.Size, symbols: Mapping[str, Any]) -> Any:
    """An integer, or the value of a size expression."""
    return value if isinstance(value, int) else expr.evaluate(value, symbols)


def _input(spec: wire.Input, symbols: Mapping[str, Any], storages: dict[int, torch.Tensor], make: Any) -> Any:
    if isinstance(spec, wire.ScalarInput):
        return spec.value
    if isinstance(spec, wire.SymIntInput):
        return size(spec.expr, symbols)
    shape = [size(s, symbols) for s in spec.shape]
    stride = [size(s, symbols) for s in spec.stride]
    if len(shape) != len(stride):
        raise MalformedRequest(f"an input has {len(shape)} sizes and {len(stride)} strides")
    offset = size(spec.offset, symbols)
    dtype = getattr(torch, spec.dtype)
    if spec.storage < 0 and isinstance(offset, int) and offset == 0:
        value = make(spec, shape, stride)
    else:
        base = storages.get(spec.storage) if spec.storage >= 0 else None
        if base is None:
            length = size(spec.storage_bytes, symbols)
            base = torch.zeros(length, dtype=torch.uint8, device=spec.device)
            if spec.storage >= 0:
                storages[spec.storage] = base
        value = torch.empty(0, dtype=dtype, device=spec.device)
        value.set_(base.untyped_storage(), offset, shape, stride)
    return _with_autograd(spec, value)


def _empty(spec: wire.TensorInput, shape: list[Any], stride: list[Any]) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=getattr(torch, spec.dtype), device=spec.device)


def _with_autograd(spec: wire.TensorInput, value: torch.Tensor) -> torch.Tensor:
    if spec.is_parameter:
        return torch.nn.Parameter(value, requires_grad=spec.requires_grad)
    if not spec.requires_grad:
        return value
    if spec.is_leaf:
        return value.requires_grad_()
    # An activation: in-place arithmetic with a leaf keeps strides and storage and gives it a grad_fn.
    with torch.enable_grad():
        return value.mul_(torch.ones((), dtype=value.dtype, device=value.device, requires_grad=True))


def _describe(gm: torch.fx.GraphModule, request: wire.GraphRequest, inputs: list[Any]) -> None:
    """What Dynamo attaches to a graph and its placeholders."""
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    marks = [getattr(spec, "static_address", "") for spec in request.inputs]
    torch_internals.describe_as_dynamo(gm, list(zip(nodes, inputs, marks, strict=True)))


def _propagate(gm: torch.fx.GraphModule, inputs: list[Any], fake_mode: FakeTensorMode, env: ShapeEnv) -> None:
    """Set `example_value` on every node, as Dynamo does: Inductor's pre-grad passes read it.

    Runs on inputs of its own, because graphs may change theirs in place.
    """

    class Recorder(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> Any:
            result = super().run_node(node)
            if node.op not in ("placeholder", "output"):
                node.meta["example_value"] = result
            return result

    with (
        fake_mode,
        torch_internals.python_dispatcher(),
        env.ignore_fresh_unbacked_symbols(),
        torch.random.fork_rng(devices=[]),
    ):
        Recorder(gm).run(*inputs)


# --- ambient state ---------------------------------------------------------------------------------------

_FLAG_OWNERS: dict[str, tuple[Any, str]] = {
    "cuda.matmul.allow_fp16_reduced_precision_reduction": (
        torch.backends.cuda.matmul,
        "allow_fp16_reduced_precision_reduction",
    ),
    "cuda.matmul.allow_bf16_reduced_precision_reduction": (
        torch.backends.cuda.matmul,
        "allow_bf16_reduced_precision_reduction",
    ),
    "cudnn.allow_tf32": (torch.backends.cudnn, "allow_tf32"),
    "cudnn.benchmark": (torch.backends.cudnn, "benchmark"),
    "cudnn.deterministic": (torch.backends.cudnn, "deterministic"),
    "cudnn.enabled": (torch.backends.cudnn, "enabled"),
    "mkldnn.enabled": (torch.backends.mkldnn, "enabled"),
}
_SDP_FLAGS: dict[str, tuple[Any, Any]] = {
    "sdp.cudnn": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    "sdp.flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "sdp.math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "sdp.mem_efficient": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
}


def current_flags() -> list[tuple[str, bool | int | str]]:
    """This process' values of the flags that reach a graph's kernels, sorted by name."""
    values: dict[str, bool | int | str] = {
        name: _plain(getattr(owner, attribute)) for name, (owner, attribute) in _FLAG_OWNERS.items()
    }
    values |= {name: bool(read()) for name, (read, _) in _SDP_FLAGS.items()}
    return sorted(values.items())


def _plain(value: Any) -> bool | int | str:
    return value if isinstance(value, bool | int | str) else bool(value)


@contextlib.contextmanager
def ambient(state: wire.Ambient) -> Iterator[None]:
    """Run a block in the client's ambient state. The process is the job's own: nothing is put back but modes."""
    torch.set_float32_matmul_precision(state.matmul_precision)
    torch.set_default_dtype(getattr(torch, state.default_dtype))
    torch.use_deterministic_algorithms(state.deterministic, warn_only=state.deterministic_warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = state.fill_uninitialized  # type: ignore[attr-defined]
    if torch.get_num_threads() != state.threads:  # to set it starts a thread, which a fork server must not
        torch.set_num_threads(state.threads)
    for name, value in state.flags:
        if name in _FLAG_OWNERS:
            owner, attribute = _FLAG_OWNERS[name]
            if _plain(getattr(owner, attribute)) != value:
                setattr(owner, attribute, value)
        elif name in _SDP_FLAGS:
            _SDP_FLAGS[name][1](value)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(state.grad))
        if state.inference:
            stack.enter_context(torch.inference_mode())
        for cast in state.autocast:
            stack.enter_context(
                torch.autocast(cast.device, dtype=getattr(torch, cast.dtype), cache_enabled=cast.cache)
            )
        yield
