"""Stages 1 and 7: ambient state is read on the client and applied on the worker."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..request import schema
from ..torch_internals import precision
from ..torch_internals.inductor import config
from .torch_names import dtype_name


def read_ambient(kind: str, values: Sequence[Any]) -> schema.Ambient:
    autocast = [
        schema.Autocast(
            device=device,
            dtype=dtype_name(torch.get_autocast_dtype(device)),
            cache=torch.is_autocast_cache_enabled(),
        )
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
    # A CPU kernel's thread count is fixed when it is compiled. A graph with all tensors on a GPU has no such kernel.
    on_cpu = any(isinstance(v, torch.Tensor) and v.device.type == "cpu" and v.dim() > 0 for v in values)
    return schema.Ambient(
        grad=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        autocast=autocast,
        default_dtype=dtype_name(torch.get_default_dtype()),
        matmul_precision=precision.matmul_precision(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        fill_uninitialized=bool(torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
        threads=config.codegen_threads() if kind == "cpu" or on_cpu else 1,
        flags=current_flags(),
    )


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


def current_flags() -> list[tuple[str, bool | int | str]]:
    """This process' flags that change a graph's kernels, with their values, sorted by name."""
    values: dict[str, bool | int | str] = {
        name: _plain(getattr(owner, attribute)) for name, (owner, attribute) in _BACKEND_FLAGS.items()
    }
    values |= {name: bool(read()) for name, (read, _) in _SDP_FLAGS.items()}
    values |= precision.read_precisions()
    return sorted(values.items())


def _plain(value: Any) -> bool | int | str:
    return value if isinstance(value, bool | int | str) else bool(value)


@contextlib.contextmanager
def apply_ambient(state: schema.Ambient) -> Iterator[None]:
    """Run a block in the client's ambient state. Only modes are restored afterwards: the process serves one job."""
    precision.apply_precisions(state.matmul_precision, dict(state.flags))
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
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(state.grad))
        if state.inference:
            stack.enter_context(torch.inference_mode())
        for cast in state.autocast:
            stack.enter_context(
                torch.autocast(cast.device, dtype=getattr(torch, cast.dtype), cache_enabled=cast.cache)
            )
        yield
