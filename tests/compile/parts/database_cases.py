"""PyTorch's own test databases as cases: a callable and its arguments, for each operator, module, optimizer and so on.

Each entry gives its first sample on the CPU. The databases come with torch (torch.testing._internal); they need
expecttest.
"""

from __future__ import annotations

import functools
import importlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch

DTYPES = (
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def _call(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


@functools.cache
def _databases(module: str) -> Any:
    """A module of torch.testing._internal. Importing one takes some 20 s, and forbids this process to set flags of
    torch.backends, which is undone. The entries of random operators are functions that set the seed first, which is no
    graph: they call the operator alone here."""
    found = importlib.import_module(f"torch.testing._internal.{module}")
    # torch.backends is an object that stands in for the module whose functions read the flag.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    for name, loaded in list(sys.modules.items()):
        if name.startswith("torch.testing._internal.") and hasattr(loaded, "wrapper_set_seed"):
            vars(loaded)["wrapper_set_seed"] = _call
    return found


class Call(NamedTuple):
    """function(*args, **kwargs) is what a case computes."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Case(NamedTuple):
    """An entry of a database. samples(dtype, requires_grad): its calls, on new tensors. dtypes: those that it supports;
    the first is the one to use."""

    name: str
    samples: Callable[[torch.dtype, bool], Iterator[Call]]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    def make(self) -> Call | None:
        """The first call; None where the entry has no sample."""
        seed()
        return next(self.samples(self.dtypes[0], False), None)


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def operators() -> Iterator[Case]:
    """Each operator that supports the CPU, with float32 or else the first dtype that it supports."""
    for entry in _databases("common_methods_invocations").op_db:
        dtypes = entry.supported_dtypes("cpu")
        if dtypes:
            yield _operator(f"operators/{_name(entry)}", entry, _first_dtype(dtypes))


def inplace_variants() -> Iterator[Case]:
    for entry in _databases("common_methods_invocations").op_db:
        dtypes = entry.supported_dtypes("cpu")
        if dtypes and entry.inplace_variant is not None:
            dtype = _first_dtype(dtypes)
            yield _operator(f"inplace/{_name(entry)}", entry, dtype, entry.inplace_variant)


def dtypes() -> Iterator[Case]:
    """Every tenth operator with each of eight dtypes."""
    for entry in [
        entry for entry in _databases("common_methods_invocations").op_db if entry.supported_dtypes("cpu")
    ][::10]:
        for dtype in DTYPES:
            if dtype in entry.supported_dtypes("cpu"):
                yield _operator(f"dtypes/{_name(entry)} {str(dtype).removeprefix('torch.')}", entry, dtype)


def foreach() -> Iterator[Case]:
    databases = (
        _databases("common_methods_invocations").foreach_unary_op_db,
        _databases("common_methods_invocations").foreach_binary_op_db,
        _databases("common_methods_invocations").foreach_pointwise_op_db,
        _databases("common_methods_invocations").foreach_reduce_op_db,
        _databases("common_methods_invocations").foreach_other_op_db,
    )
    for database in databases:
        for entry in database:
            yield _operator(f"foreach/{entry.name}", entry, torch.float32)
            if entry.inplace_variant is not None:
                yield _operator(f"foreach/{entry.name}_", entry, torch.float32, entry.inplace_variant)


def higher_order_operators() -> Iterator[Case]:
    for entry in _databases("hop_db").hop_db:
        yield _operator(f"higher-order/{_name(entry)}", entry, torch.float32)


def autograd_functions() -> Iterator[Case]:
    for entry in _databases("autograd_function_db").autograd_function_db:
        yield _operator(f"autograd/{_name(entry)}", entry, torch.float32)


def custom_operators() -> Iterator[Case]:
    for entry in _databases("custom_op_db").custom_op_db:
        yield _operator(f"custom/{_name(entry)}", entry, torch.float32)


def modules() -> Iterator[Case]:
    """Each module, training and not."""
    for entry in _databases("common_modules").module_db:
        for training in (True, False):
            if entry.train_and_eval_differ or training:
                state = "train" if training else "eval"
                yield Case(f"modules/{entry.name} {state}", _module(entry, training))


def optimizers() -> Iterator[Case]:
    """Each optimizer's step, with each set of options of its database that a graph can have."""
    for entry in _databases("common_optimizers").optim_db:
        for position, sample in enumerate(entry.optim_inputs_func(device="cpu")):
            if not sample.kwargs.get("differentiable"):  # needs parameters that are no leaves
                described = " ".join(f"{name}={value}" for name, value in sample.kwargs.items()) or "default"
                name = f"optimizers/{entry.optim_cls.__name__} {position} {described}"
                yield Case(name, _optimizer(entry, sample.kwargs))


def _name(entry: Any) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else str(entry.name)


def _first_dtype(dtypes: Any) -> torch.dtype:
    if torch.float32 in dtypes:
        return torch.float32
    first: torch.dtype = min(dtypes, key=str)
    return first


def _operator(name: str, entry: Any, dtype: torch.dtype, variant: Callable[..., Any] | None = None) -> Case:
    def samples(dtype: torch.dtype, requires_grad: bool) -> Iterator[Call]:
        for sample in entry.sample_inputs("cpu", dtype, requires_grad=requires_grad):
            yield Call(variant or entry.op, (sample.input, *sample.args), dict(sample.kwargs))

    others = sorted(entry.supported_dtypes("cpu") - {dtype}, key=str)
    return Case(name, samples, (dtype, *others))


def _module(entry: Any, training: bool) -> Callable[[torch.dtype, bool], Iterator[Call]]:
    def samples(dtype: torch.dtype, requires_grad: bool) -> Iterator[Call]:
        for sample in entry.module_inputs_func(
            entry, device="cpu", dtype=dtype, requires_grad=requires_grad, training=training
        ):
            given, made = sample.forward_input, sample.constructor_input
            if given is not None:
                module = entry.module_cls(*made.args, **made.kwargs).train(training)
                yield Call(module, tuple(given.args), dict(given.kwargs))

    return samples


def _optimizer(entry: Any, options: dict[str, Any]) -> Callable[[torch.dtype, bool], Iterator[Call]]:
    def samples(dtype: torch.dtype, requires_grad: bool) -> Iterator[Call]:
        parameters = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(2, 5))]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = entry.optim_cls(parameters, **options)
        yield Call(optimizer.step, (), {})

    return samples


DATABASES: dict[str, Callable[[], Iterator[Case]]] = {
    "operators": operators,
    "inplace": inplace_variants,
    "dtypes": dtypes,
    "foreach": foreach,
    "modules": modules,
    "optimizers": optimizers,
    "higher-order": higher_order_operators,
    "autograd": autograd_functions,
    "custom": custom_operators,
}
