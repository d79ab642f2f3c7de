"""What the trace of an optimizer's step takes from the optimizer: a description in place of guards on addresses.

Tracing a step, Dynamo calls `_init_group`, which makes the parameters' state, and its graph holds parameters and state
as tensors of its own (torch._dynamo.variables.optimizer). A start does the same to the optimizer before it compares,
and undoes it if no record fits.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree

from .....artifact.programs import digests
from .....artifact.programs.records import NotPortable
from .. import values


class Step:
    """An optimizer in its `step`, as plain values, with numbers for tensors in the order in which they are met."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        """call: the arguments of convert_frame._compile. Raises NotPortable unless the function is the step of one of
        PyTorch's optimizers, with an `_init_group` of the same module and without a closure."""
        self._optimizer = optimizer = call["locals"].get("self")
        kind: Any = type(optimizer)
        if (
            not kind.__module__.startswith("torch.optim.")
            or inspect.unwrap(kind.step).__code__ is not call["code"]
            or inspect.unwrap(optimizer._init_group).__globals__ is not call["globals"]
            or call["locals"].get("closure") is not None
        ):
            raise NotPortable("an optimizer's state that is not made in a step of PyTorch's")
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[int, int] = {}
        """By the tensors' ids."""

    def begun(self, undo: contextlib.ExitStack) -> Step:
        """Do what tracing does to groups (OptimizerVariable.var_getattr, _set_capturable) and to the state of their
        parameters (OptimizerVariable.call_method)."""
        from torch._dynamo.decorators import mark_static_address
        from torch._dynamo.variables.optimizer import OptimizerVariable

        groups, state = self._optimizer.param_groups, self._optimizer.state
        for each in (state, *state.values(), *groups):
            undo.callback(each.update, dict(each))
            undo.callback(each.clear)
        for group in groups:
            for each in (parameters := group["params"]):
                mark_static_address(each, guard=True)
            on_gpu = all(each.is_cuda or each.is_xpu for each in parameters)
            if "capturable" in group and on_gpu and not any(each in state for each in parameters):
                group["capturable"] = True
        lists = len(inspect.signature(self._optimizer._init_group).parameters) - 1
        variable: Any = types.SimpleNamespace(value=self._optimizer)
        for group in groups:
            OptimizerVariable.move_step_if_cpu(variable)
            self._optimizer._init_group(group, *([] for _ in range(lists)))
        _pytree.tree_map_only(torch.Tensor, lambda each: mark_static_address(each, guard=True), state)
        return self

    def described(self) -> list[Any]:
        """FrameProgram.optimizer, once it has begun or was traced. Raises NotPortable."""
        groups = [dict(sorted(group.items())) for group in self._optimizer.param_groups]
        grads = [each.grad for group in groups for each in group["params"]]
        makes_state = digests.function_digest(inspect.unwrap(self._optimizer._init_group))
        plain, memories = self._plain([groups, grads, self._optimizer.state]), dict[int, int]()
        return [makes_state, plain, [_tensor(each, memories) for each in self.tensors]]

    def _plain(self, value: Any) -> Any:
        match value:
            case torch.Tensor():
                if id(value) not in self.numbers:
                    self.numbers[id(value)] = len(self.tensors)
                    self.tensors.append(value)
                return self.numbers[id(value)]
            case list() | tuple():
                return [type(value).__name__, *map(self._plain, value)]
            case dict():
                return [[self._plain(key), self._plain(each)] for key, each in value.items()]
        return values.described(value)


def _tensor(value: torch.Tensor, memories: dict[int, int]) -> list[Any]:
    memory = memories.setdefault(value.untyped_storage()._cdata, len(memories))
    place = value.shape, value.stride(), value.storage_offset(), memory
    own = sorted(name for name in vars(value) if not name.startswith("_"))
    return [*values.tensor(value), repr(place), own]
