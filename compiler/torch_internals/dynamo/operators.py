"""Operators: what registers them, what their schemas say, which one computes nothing, and how to watch calls."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload

from ...request.operator_table.rules import REGISTERED_BY

LOG_API_USAGE: Any = getattr(torch._C, "_log_api_usage_once", None)
"""Counts API usage and computes nothing; some libraries' graphs hold calls of it."""


def register(name: str) -> None:
    """Register the operators of the library that torch.ops.<library>.<...> names, if it is one of PyTorch's. Raises
    ImportError where this torch does not have it."""
    if name.startswith("torch.ops."):
        library = name.split(".")[2]
        if library in REGISTERED_BY:
            importlib.import_module(REGISTERED_BY[library])


def packets(names: str) -> list[Any]:
    """The ATen operators of these names that this version of PyTorch has, and their forms that change their first
    argument."""
    aten = torch.ops.aten
    forms = (getattr(aten, form, None) for name in names.split() for form in (name, f"{name}_"))
    return [packet for packet in forms if packet is not None]


def mutates_inputs(target: Any) -> bool:
    """Whether an operator's schema says that it writes to an argument."""
    return isinstance(target, OpOverload) and bool(target._schema.is_mutable)


def is_pytorchs(target: Any) -> bool:
    """Whether an operator is in one of PyTorch's own libraries."""
    return isinstance(target, OpOverload) and target.namespace in REGISTERED_BY


def is_stateless(node: torch.fx.Node) -> bool:
    """Whether a node calls an operator of ATen or a function of PyTorch's that keeps nothing from call to call. A batch
    norm may change its running means, though its schema does not say so."""
    target: Any = node.target
    if node.op not in ("call_function", "call_method") or isinstance(target, torch._ops.HigherOrderOperator):
        return False
    if isinstance(target, (OpOverload, torch._ops.OpOverloadPacket)):
        return str(target).startswith(("aten.", "prims.")) and "batch_norm" not in str(target)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return "batch_norm" not in name and "instance_norm" not in name


def schema_argument(node: torch.fx.Node, name: str) -> Any:
    """An operator call's argument by its name in the schema, its default where the call has none."""
    for position, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            given = node.kwargs.get(name, declared.default_value)
            return node.args[position] if position < len(node.args) else given
    return None


def result_name(node: torch.fx.Node, position: int) -> str:
    """The name that the schema of an operator has for one of its results; '' for another kind of call."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.returns[position].name)


def is_left_out(node: torch.fx.Node) -> bool:
    """Whether a request leaves a node out: it counts uses of an API, or seeds NumPy, which Inductor does while it
    traces and not when the graph runs, and computes nothing."""
    wrapped = getattr(node.target, "f", None)
    names = (getattr(wrapped, "__module__", ""), getattr(wrapped, "__name__", ""))
    seeds = names == ("torch._numpy.random", "seed")
    return (node.target is LOG_API_USAGE or seeds) and not node.users


def all_nodes(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The nodes of a graph and of all graphs inside it."""
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from module.graph.nodes


OnCall = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""Takes an operator, below autograd, and its arguments; runs it and returns its result."""


def watching_calls(on_call: OnCall) -> AbstractContextManager[object]:
    """Inside the block, each operator that runs goes through `on_call`; the operators that it calls itself do not.

    A mode of torch.utils._python_dispatch. A higher-order operator is one call; called_graph has its graph.
    """
    watch = _watch_class()()
    watch.on_call = on_call
    return watch  # type: ignore[no-any-return]


@functools.cache
def _watch_class() -> Any:
    """Made once: a class for each watch would keep what the watch has seen until garbage is collected."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
        supports_higher_order_operators = True
        on_call: OnCall

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self.on_call(func, args, kwargs or {})

    return Watch


def called_graph(operator: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The graph that a higher-order operator only calls, and with which arguments; None for another operator."""
    skipped = _CALLS_ITS_GRAPH.get(getattr(operator, "__name__", ""))
    if skipped is None or getattr(operator, "namespace", "") != "higher_order":
        return None
    return args[0], args[1 + skipped :]


_CALLS_ITS_GRAPH = {
    "tag_activation_checkpoint": 0,
    "wrap": 0,
    "wrap_activation_checkpoint": 0,
    "invoke_subgraph": 1,
}
"""By name, how many arguments follow the graph that are none of its own."""


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in which what is cast to another floating dtype, or made with one, is float64. Its inputs must be
    float64 too."""

    def on_call(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if called := called_graph(operator, args):
            with watching_calls(on_call):
                return called[0](*called[1])
        args, kwargs = widened(operator, args, kwargs)
        return operator(*args, **kwargs)

    def call(*args: Any) -> Any:
        with watching_calls(on_call):
            return function(*args)

    return call


def widened(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The arguments of an ATen operator, with float64 for each floating dtype among them."""
    from torch.utils._pytree import tree_map_only

    def widest(dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype.is_floating_point else dtype

    if operator is torch.ops.aten.view.dtype:  # the same bits
        return args, kwargs
    return tree_map_only(torch.dtype, widest, (args, dict(kwargs)))


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors in an operator's arguments or results, in order."""
    from torch.utils._pytree import tree_leaves

    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


# --- NumPy -----------------------------------------------------------------------------------------------
# Dynamo makes a wrapper without a name for each call of PyTorch's own form of NumPy, torch._numpy.

NUMPY = "torch._numpy."
NUMPY_OPERATOR = "torch._numpy._operator."
NUMPY_METHOD = "torch._numpy.ndarray."


def numpy_name(target: Any, functions: Mapping[Any, str]) -> str | None:
    """The name of what a wrapper calls; None: not a wrapper. functions: torch._numpy's, with their names."""
    from torch._dynamo import utils

    kind = type(target)  # not isinstance: a subclass may do anything else
    if kind is utils.numpy_to_tensor_wrapper:
        return functions.get(target.f, f"{NUMPY}{target.f.__name__}")
    if kind is utils.numpy_operator_wrapper:
        name = target.op.__name__
        return f"{NUMPY_OPERATOR}{name}" if getattr(operator, name, None) is target.op else f"{NUMPY}{name}"
    return f"{NUMPY_METHOD}{target.method}" if kind is utils.numpy_method_wrapper else None


def numpy_wrapper(name: str, find: Callable[[str], Any]) -> Any:
    """What a graph calls for such a name. find: a function of torch._numpy by its name."""
    from torch._dynamo import utils

    if name.startswith(NUMPY_OPERATOR):
        return utils.numpy_operator_wrapper(getattr(operator, name.removeprefix(NUMPY_OPERATOR)))
    if name.startswith(NUMPY_METHOD):
        return utils.numpy_method_wrapper(name.removeprefix(NUMPY_METHOD))
    return utils.numpy_to_tensor_wrapper(find(name))
