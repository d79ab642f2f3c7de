"""PyTorch's private functions that training jobs and exports alone use: the sibling of torch_internals.py, same rules.

Each function names its upstream home. Tested with torch 2.11 to 2.13.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx

from .errors import Unsupported


def aoti_package(exported: torch.export.ExportedProgram, file: Path, options: Mapping[str, Any]) -> None:
    """torch._inductor.aoti_compile_and_package: Inductor's C++ of an exported program, built, with its weights, into
    `file`, which must end in .pt2. Leaves what it built in Inductor's cache folder. Upstream writes what it built for
    into the process' configuration, from where it would go into the next package and into every request's options."""
    from torch._inductor import aoti_compile_and_package, config

    with config.patch({"aot_inductor.metadata": {}}), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of how it copies a pytree
        aoti_compile_and_package(exported, package_path=str(file), inductor_configs=dict(options))


def aoti_load(file: Path) -> Callable[..., Any]:
    """torch._inductor.aoti_load_package: a package's model, called as the exported module was."""
    from torch._inductor import aoti_load_package

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # as above
        loaded: Callable[..., Any] = aoti_load_package(str(file))
    return loaded


def aoti_killed_by(file: Path) -> int:
    """The signal that ends a process that only loads the package (torch._inductor.aoti_load_package); 0: none does."""
    code = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])"
    environment = {
        **os.environ,
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }  # or it tries what this processor can do, for 4 s
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(file)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    return max(0, -done.returncode)


def pretend_process_group(rank: int, world_size: int) -> None:
    """torch.testing._internal.distributed.fake_pg: a default process group of `world_size` ranks whose other ranks are
    not there; collectives end at once, and what they would have brought is made up."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the back end

    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=world_size)


def triton_caches() -> list[Path]:
    """torch._inductor.runtime.cache_dir_utils.triton_cache_dir: the folders in which Triton keeps what it compiled
    for this process, each kernel in one of its own."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    return [Path(triton_cache_dir(number)) for number in range(torch.cuda.device_count())]


def profiler_enabled() -> bool:
    """torch._C._autograd._profiler_enabled: whether any profiler of autograd's is on in this thread."""
    return bool(torch._C._autograd._profiler_enabled())


def unpretended_collective(generated: bytes) -> str:
    """The first collective in generated code whose result this torch's fake process group leaves as memory was; '' for
    none. Since 2.13 it fills them all (torch.testing._internal.distributed.fake_pg)."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        return ""
    unfilled = ("reduce_scatter", "all_to_all", "alltoall")
    return next((name for name in unfilled if name.encode() in generated), "")


@functools.lru_cache(maxsize=1)
def pretended_meshes(
    meshes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...],
    device: str,
    group_name: Callable[[int, int], str],
) -> list[Any]:
    """A DeviceMesh for each (shape, where this process stands in it), whose process groups are named
    `group_name(mesh, dimension)` (torch.distributed.distributed_c10d._process_group_name gives names by counting).

    Makes this process one rank of a pretended world, larger than any of them: a mesh of all ranks would have the
    world's own group. Raises Unsupported where it already is a rank of something else.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.distributed.device_mesh import DeviceMesh

    if dist.is_initialized():
        raise Unsupported("this process is a rank already")
    strides = [[math.prod(shape[axis + 1 :]) for axis in range(len(shape))] for shape, _ in meshes]
    places = [
        sum(at * step for at, step in zip(coordinate, steps, strict=True))
        for (_, coordinate), steps in zip(meshes, strides, strict=True)
    ]
    rank = max(places)
    first = [rank - place for place in places]
    world = max(start + math.prod(shape) for start, (shape, _) in zip(first, meshes, strict=True))
    pretend_process_group(rank, world + 1)
    named = distributed_c10d._process_group_name
    found = []
    try:
        for index, (shape, _) in enumerate(meshes):
            mine, others = itertools.count(), itertools.count()

            def name(ranks: Any, *_: Any, **__: Any) -> str:
                if rank in ranks:
                    return group_name(index, next(mine))  # noqa: B023
                return f"{group_name(index, 0)}_other_{next(others)}"  # noqa: B023

            setattr(distributed_c10d, "_process_group_name", name)  # noqa: B010
            ranks = torch.arange(first[index], first[index] + math.prod(shape)).reshape(shape)
            mesh = DeviceMesh(device, ranks)
            have = [mesh.get_group(axis).group_name for axis in range(len(shape))]
            if have != [group_name(index, axis) for axis in range(len(shape))]:
                raise Unsupported(f"a mesh's process groups are called {', '.join(have)} here")
            found.append(mesh)
    finally:
        distributed_c10d._process_group_name = named
    return found


def mesh_of(value: Any) -> Any:
    """The DeviceMesh that an input is, or stands for (torch._library.fake_class_registry.FakeScriptObject, since
    2.12); None for anything else."""
    from torch.distributed.device_mesh import DeviceMesh

    real = getattr(value, "real_obj", None) if type(value).__name__ == "FakeScriptObject" else value
    return real if isinstance(real, DeviceMesh) else None


def local_part(tensor: Any) -> torch.Tensor:
    """A DTensor's own part, without autograd (DTensor._local_tensor)."""
    part: torch.Tensor = tensor._local_tensor
    return part


def parts_of(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """`DTensor.to_local()` of each, for autograd in one go: one node, and gradients that become DTensors without the
    checks of from_local (torch.distributed.tensor._api._ToTorchTensor, which takes three times as long). For tensors
    that are not partial."""
    return list(_parts_function().apply(*tensors)) if tensors else []


@functools.cache
def _parts_function() -> Any:
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
