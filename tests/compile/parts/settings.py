"""Settings of PyTorch's as context managers that put everything back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
import torch.fx.experimental._config
from torch._inductor import choices, lowering
from torch._inductor.codegen import common, cpp
from torch._inductor.compiler_bisector import CompilerBisector
from torch._inductor.decomposition import decompositions, fast_random_decomps
from torch._inductor.virtualized import V
from torch.autograd.graph import saved_tensors_hooks
from torchrelay.compiler.torch_internals import ambient_state

Around = Callable[[], contextlib.AbstractContextManager[Any]]

inductor: Any = torch._inductor.config
functorch: Any = torch._functorch.config
fx: Any = torch.fx.experimental._config
RELU = torch.ops.aten.relu.default


@contextlib.contextmanager
def setting(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def attribute(owner: Any, name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    return setting(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)


@contextlib.contextmanager
def entry(table: dict[Any, Any], name: Any, value: Any) -> Iterator[None]:
    before = dict(table)
    table[name] = value
    try:
        yield
    finally:
        table.clear()
        table.update(before)


def variable(name: str, value: str) -> Around:
    return lambda: mock.patch.dict(os.environ, {name: value})


@contextlib.contextmanager
def precisions(change: Callable[[], object]) -> Iterator[None]:
    before = ambient_state.matmul_precision(), ambient_state.read_precisions()
    change()
    try:
        yield
    finally:
        ambient_state.apply_precisions(*before)


def fp32(owner: Any, value: str) -> Callable[[], object]:
    return lambda: setattr(owner, "fp32_precision", value)


@contextlib.contextmanager
def deterministic(*, warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def autocast_dtype(device: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    return setting(
        lambda: torch.get_autocast_dtype(device), lambda new: torch.set_autocast_dtype(device, new), dtype
    )


def hooks() -> contextlib.AbstractContextManager[Any]:
    return saved_tensors_hooks(
        torch.fx.symbolic_trace(lambda x: x.to(torch.float16)),
        torch.fx.symbolic_trace(lambda x: x.to(torch.float32)),
    )


def a_pass(graph: object) -> object:
    return graph


class OwnChoices(choices.InductorChoices):
    pass


class OwnScheduling(cpp.CppScheduling):
    pass


def own_choices() -> contextlib.AbstractContextManager[None]:
    return setting(lambda: V.choices, V.set_choices_handler, OwnChoices())


def own_code_generator() -> contextlib.AbstractContextManager[None]:
    common.init_backend_registration()
    stock = common.device_codegens["cpu"]
    own = common.DeviceCodegen(OwnScheduling, stock.wrapper_codegen, stock.cpp_wrapper_codegen)
    return entry(common.device_codegens, "cpu", own)


def as_sigmoid(x: Any) -> Any:
    return lowering.lowerings[torch.ops.aten.sigmoid.default](x)


@contextlib.contextmanager
def own_decomposition() -> Iterator[None]:
    fast_random_decomps.cache_clear()
    with entry(decompositions, RELU, lambda x: torch.sigmoid(x)):
        yield
    fast_random_decomps.cache_clear()


def own_lowering() -> contextlib.AbstractContextManager[None]:
    return entry(lowering.lowerings, RELU, as_sigmoid)


def bisecting() -> contextlib.AbstractContextManager[None]:
    return attribute(CompilerBisector, "bisection_enabled", True)
