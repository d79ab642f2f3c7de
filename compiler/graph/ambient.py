"""Stages 1 and 7: ambient state is read on the client and applied on the worker."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import Unsupported
from ..request import allowed_names, schema
from ..torch_internals import ambient_state
from ..torch_internals.dynamo.operators import all_nodes
from ..torch_internals.inductor import config


def dtype_name(dtype: torch.dtype) -> str:
    """Its name in a request. Raises Unsupported."""
    name = str(dtype).removeprefix("torch.")
    if name not in allowed_names.DTYPE_BYTES:
        raise Unsupported(f"dtype {name} is not known to the service")
    return name


def read_ambient(kind: str, values: Sequence[Any], gm: torch.fx.GraphModule) -> schema.Ambient:
    """This process' state, as far as it changes what `gm` compiles to. kind: cpu or cuda; values: the graph's inputs.
    Raises Unsupported for a state that no worker can be set to."""
    if ambient_state.sm_carveout():
        raise Unsupported("multiprocessors set aside (torch._C._set_sm_carveout_experimental)")
    autocast = [
        schema.Autocast(
            device=device,
            dtype=dtype_name(torch.get_autocast_dtype(device)),
            cache=torch.is_autocast_cache_enabled(),
        )
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
    on_cpu = any(isinstance(v, torch.Tensor) and v.device.type == "cpu" and v.dim() > 0 for v in values)
    return schema.Ambient(
        grad=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        autocast=autocast,
        default_dtype=dtype_name(torch.get_default_dtype()),
        matmul_precision=ambient_state.matmul_precision(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        fill_uninitialized=bool(torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
        threads=_threads(kind, on_cpu),
        flags=sorted([*current_flags(), *_einsum_flags(gm)]),
    )


def _threads(kind: str, on_cpu: bool) -> int:
    """CPU kernels are compiled for a number of threads. A graph with all tensors on a GPU has none."""
    return config.codegen_threads() if kind == "cpu" or on_cpu else 1


_BACKEND_FLAGS: dict[str, tuple[Any, str]] = {
    f"{module}.{attribute}": (operator.attrgetter(module)(torch.backends), attribute)
    for module, attribute in (
        ("cuda.matmul", "allow_fp16_reduced_precision_reduction"),
        ("cuda.matmul", "allow_bf16_reduced_precision_reduction"),
        ("cudnn", "benchmark"),
        ("cudnn", "deterministic"),
        ("cudnn", "enabled"),
        ("mkldnn", "enabled"),
    )
}
"""A flag's name -> the object that has it, and its attribute there."""

_SDP_FLAGS: dict[str, tuple[Any, Any]] = {
    f"sdp.{kind}": (
        getattr(torch.backends.cuda, f"{kind}_sdp_enabled"),
        getattr(torch.backends.cuda, f"enable_{kind}_sdp"),
    )
    for kind in ("cudnn", "flash", "math", "mem_efficient")
}
"""A flag's name -> the functions that read and set it: the kernels of scaled dot product attention."""

_AUTOCAST_DTYPES = {"cpu": torch.bfloat16, "cuda": torch.float16}
"""What torch.autocast(device) without a dtype means, unless torch.set_autocast_dtype has said otherwise."""

_EINSUM = "opt_einsum.strategy"


def current_flags() -> list[tuple[str, bool | int | str]]:
    """This process' flags that change a graph's kernels, with their values, sorted by name.

    A flag of _AUTOCAST_DTYPES, and one that `attention` reads, is there only if it is not PyTorch's default.
    """
    values: dict[str, bool | int | str] = {
        name: _plain(getattr(owner, attribute)) for name, (owner, attribute) in _BACKEND_FLAGS.items()
    }
    values |= {name: bool(read()) for name, (read, _) in _SDP_FLAGS.items()}
    values |= ambient_state.read_precisions()
    values |= ambient_state.read_choices()
    for device, default in _AUTOCAST_DTYPES.items():
        dtype = torch.get_autocast_dtype(device)
        # That of an autocast that is on is in Ambient.autocast.
        if not torch.is_autocast_enabled(device) and dtype != default:
            values[f"{allowed_names.AUTOCAST_DTYPE}{device}"] = dtype_name(dtype)
    return sorted(values.items())


def differing_process_state(request: schema.GraphRequest) -> str:
    """What of the process' state is not as in `request`, as far as no record of a guard says so: dtypes, precision,
    threads and flags; '' if the graph would be captured in the same one now."""
    state = request.ambient
    tensors = [each for each in request.inputs if isinstance(each, schema.TensorInput)]
    threads = _threads(request.target.kind, any(each.device == "cpu" and each.shape for each in tensors))
    settings: Any = torch.backends.opt_einsum
    flags = dict(current_flags())
    if any(name == _EINSUM for name, _ in state.flags) and settings.is_available() and settings.enabled:
        flags[_EINSUM] = str(settings.strategy)
    filled = bool(torch.utils.deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]
    others = [
        *(["multiprocessors left free"] if ambient_state.sm_carveout() else []),
        *(["the default dtype"] if state.default_dtype != dtype_name(torch.get_default_dtype()) else []),
        *(
            ["the precision of products"]
            if state.matmul_precision != ambient_state.matmul_precision()
            else []
        ),
        *(["fill_uninitialized_memory"] if state.fill_uninitialized != filled else []),
        *(["the number of threads"] if state.threads != threads else []),
        *sorted(name for name, _ in {*flags.items()} ^ {*state.flags}),
    ]
    return ", ".join(dict.fromkeys(others))


def _einsum_flags(gm: torch.fx.GraphModule) -> list[tuple[str, bool | int | str]]:
    """How opt_einsum orders the products of three or more tensors, where `gm` has any. PyTorch uses opt_einsum if it is
    installed, and else multiplies from left to right."""
    settings: Any = torch.backends.opt_einsum
    if not (settings.is_available() and settings.enabled):
        return []
    for node in all_nodes(gm):
        if node.target is torch.functional.einsum:
            tensors: list[torch.fx.Node] = []
            torch.fx.map_arg(node.args, tensors.append)
            if len(tensors) > 2:
                return [(_EINSUM, str(settings.strategy))]
    return []


def _apply_einsum(strategy: str | None) -> None:
    settings: Any = torch.backends.opt_einsum
    if strategy is not None and not settings.is_available():
        raise Unsupported(
            "the client orders the products of torch.einsum with opt_einsum, which this worker does not have",
            hint="Install opt_einsum on the workers, or set torch.backends.opt_einsum.enabled = False in the program",
        )
    if settings.is_available():
        settings.set_flags(True, strategy or "auto")
        settings.set_flags(strategy is not None)


def _plain(value: Any) -> bool | int | str:
    return value if isinstance(value, bool | int | str) else bool(value)


@contextlib.contextmanager
def apply_ambient(state: schema.Ambient) -> Iterator[None]:
    """Run a block in the client's ambient state. Only modes are restored afterwards: the process serves one job."""
    ambient_state.apply_precisions(state.matmul_precision, dict(state.flags))
    torch.set_default_dtype(getattr(torch, state.default_dtype))
    torch.use_deterministic_algorithms(state.deterministic, warn_only=state.deterministic_warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = state.fill_uninitialized  # type: ignore[attr-defined]
    if torch.get_num_threads() != state.threads:  # setting it starts a thread; a fork server must have none
        torch.set_num_threads(state.threads)
    for name, value in state.flags:
        if name in _BACKEND_FLAGS:
            owner, attribute = _BACKEND_FLAGS[name]
            if _plain(getattr(owner, attribute)) != value:
                setattr(owner, attribute, value)
        elif name in _SDP_FLAGS:
            _SDP_FLAGS[name][1](value)
    flags = dict(state.flags)
    for device, default in _AUTOCAST_DTYPES.items():
        chosen = flags.get(f"{allowed_names.AUTOCAST_DTYPE}{device}")
        torch.set_autocast_dtype(device, default if chosen is None else getattr(torch, str(chosen)))
    ambient_state.apply_choices(flags)
    _apply_einsum(str(flags[_EINSUM]) if _EINSUM in flags else None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(state.grad))
        if state.inference:
            stack.enter_context(torch.inference_mode())
        for cast in state.autocast:
            stack.enter_context(
                torch.autocast(cast.device, dtype=getattr(torch, cast.dtype), cache_enabled=cast.cache)
            )
        yield
