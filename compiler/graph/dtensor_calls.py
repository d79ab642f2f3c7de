"""Stages 1 and 7: DTensor's methods become calls that can be sent, and these become DTensor's methods again.

The worker's process becomes one rank of a fake process group, at the client's position in each mesh. DTensor's work is
then traced as on the client, collectives included. Process groups get names that `group_name` makes; the client
replaces them by its own in the generated code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import ForbiddenTarget, Unsupported
from ..request import allowed_names, schema
from ..torch_internals.distributed import fake_process_group


class DTensorCall:
    """A node's target: one of allowed_names.DTENSOR_CALLS. Without `run`, the graph can only be sent."""

    def __init__(self, target: str, run: Callable[..., Any] | None = None) -> None:
        self.target = target
        self._run = run
        self.__name__ = self.__qualname__ = target.rpartition(".")[2]
        self.__module__ = __name__

    def __call__(self, *args: Any) -> Any:
        if self._run is None:
            raise Unsupported(f"{self.target} in a graph that is only to be sent")
        return self._run(*args)

    def __deepcopy__(self, memo: Any) -> DTensorCall:
        return self


def placement_text(placement: Any) -> str:
    """A placement's name on the wire. Raises Unsupported if it is not of the three kinds."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Replicate:
        return "R"
    if type(placement) is Shard:
        return f"S{placement.dim}"
    if type(placement) is Partial and allowed_names.PLACEMENT.fullmatch(f"P{placement.reduce_op}"):
        return f"P{placement.reduce_op}"
    raise Unsupported(f"a tensor that lies on its mesh as {type(placement).__name__}")


def placements_text(placements: Sequence[Any]) -> tuple[str, ...]:
    return tuple(map(placement_text, placements))


def _placement(text: str) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if not allowed_names.PLACEMENT.fullmatch(text):
        raise ForbiddenTarget(f"placement {text[:40]!r} is not known")
    return Replicate() if text == "R" else Shard(int(text[1:])) if text[0] == "S" else Partial(text[1:])


def group_name(mesh: int, dimension: int) -> str:
    """The name, in generated code, of the process group of a mesh's dimension."""
    return f"torchrelay_mesh_{mesh}_{dimension}"


class RequestMeshes:
    """Makes DTensor calls over a request's meshes."""

    def __init__(self, meshes: Sequence[schema.Mesh], device: str) -> None:
        self._described = tuple((tuple(mesh.shape), tuple(mesh.coordinate)) for mesh in meshes)
        self._device = device

    def call(self, target: str, args: tuple[Any, ...]) -> tuple[DTensorCall, tuple[Any, ...]]:
        """A node's target and arguments for those on the wire. Raises ForbiddenTarget."""
        match target, args:
            case "torchrelay.from_local", (part, mesh, placements, shape, stride):
                return self._from_local(mesh, placements, shape is not None), (
                    (part,) if shape is None else (part, shape, stride)
                )
            case "torchrelay.redistribute", (tensor, placements, async_op, forward, backward):
                return _redistribute(placements, async_op, forward, backward), (tensor,)
            case "torchrelay.to_local", (tensor, placements):
                return _to_local(placements), (tensor,)
        raise ForbiddenTarget(f"{target} with {len(args)} arguments")

    def _from_local(self, mesh: int, texts: Sequence[str], whole: bool) -> DTensorCall:
        meshes = fake_process_group.fake_device_meshes(self._described, self._device, group_name)
        lies = tuple(map(_placement, texts))

        def run(part: torch.Tensor, shape: Any = None, stride: Any = None) -> Any:
            from torch.distributed.tensor import DTensor

            given: dict[str, Any] = {"shape": torch.Size(shape), "stride": tuple(stride)} if whole else {}
            return DTensor.from_local(part, meshes[mesh], lies, run_check=False, **given)

        return DTensorCall("torchrelay.from_local", run)


def _redistribute(texts: Sequence[str], async_op: bool, forward: Any, backward: Any) -> DTensorCall:
    lies = tuple(map(_placement, texts))
    given = {
        name: dtype
        for name, dtype in (("forward_dtype", forward), ("backward_dtype", backward))
        if dtype is not None
    }
    return DTensorCall(
        "torchrelay.redistribute",
        lambda tensor: tensor.redistribute(placements=lies, async_op=async_op, **given),
    )


def _to_local(texts: Sequence[str] | None) -> DTensorCall:
    lies = None if texts is None else tuple(map(_placement, texts))
    return DTensorCall("torchrelay.to_local", lambda tensor: tensor.to_local(grad_placements=lies))
