"""DTensors, their meshes and local shards, and Dynamo's calls of their methods."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch


def device_mesh_of(value: Any) -> Any:
    """The DeviceMesh that an input is, or stands for (torch._library.fake_class_registry.FakeScriptObject, since
    2.12); None for anything else."""
    from torch.distributed.device_mesh import DeviceMesh

    real = getattr(value, "real_obj", None) if type(value).__name__ == "FakeScriptObject" else value
    return real if isinstance(real, DeviceMesh) else None


def local_shard(tensor: Any) -> torch.Tensor:
    """A DTensor's own part, without autograd (DTensor._local_tensor)."""
    part: torch.Tensor = tensor._local_tensor
    return part


def local_shards(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """`DTensor.to_local()` of each, for autograd in one go: one node, and gradients that become DTensors without the
    checks of from_local (torch.distributed.tensor._api._ToTorchTensor, which takes three times as long). For tensors
    that are not partial."""
    return list(_shards_function().apply(*tensors)) if tensors else []


@functools.cache
def _shards_function() -> Any:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_global_tensor_info

    class Parts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            ctx.set_materialize_grads(False)
            ctx.specs = [(tensor._spec, tensor._local_tensor.stride()) for tensor in tensors]
            return tuple(tensor._local_tensor.view_as(tensor._local_tensor) for tensor in tensors)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return tuple(
                None if gradient is None else whole(gradient, spec, stride)
                for gradient, (spec, stride) in zip(gradients, ctx.specs, strict=True)
            )

    def whole(gradient: torch.Tensor, spec: Any, stride: tuple[int, ...]) -> Any:
        if gradient.stride() == stride:
            return DTensor(gradient, copy.copy(spec), requires_grad=False)  # type: ignore[no-untyped-call]
        strides = tuple(compute_global_tensor_info(gradient, spec.mesh, spec.placements)[1])
        return DTensor.from_local(
            gradient, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=strides
        )

    return Parts


def dtensor_call(node: torch.fx.Node) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """('from_local' | 'redistribute' | 'to_local', arguments, keyword arguments) of a node in which Dynamo calls that
    method of DTensor; None for any other.

    Since 2.12 the node says so itself. Before, its target is a function that Dynamo made, which holds the arguments
    (torch._dynamo.variables: torch.py, handle_from_local; tensor.py, method_redistribute and method_to_local).
    """
    from torch.distributed.tensor import DTensor

    if node.op == "call_method" and node.target in ("redistribute", "to_local"):
        return str(node.target), node.args, dict(node.kwargs)
    if node.op != "call_function":
        return None
    if node.target is DTensor.from_local:
        return "from_local", node.args, dict(node.kwargs)
    name = getattr(node.target, "__name__", "")
    known = {
        "prim from_local": "from_local",
        "prim_redistribute": "redistribute",
        "prim_to_local": "to_local",
    }
    if name not in known or not getattr(node.target, "__module__", "").startswith("torch._dynamo.variables"):
        return None
    held = inspect.getclosurevars(node.target).nonlocals  # type: ignore[arg-type]
    return known[name], (*node.args, *held["args_as_value"]), {**held["kwargs_as_value"], **node.kwargs}
