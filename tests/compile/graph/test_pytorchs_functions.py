"""Functions that Dynamo leaves whole in a graph, or writes into it itself: through a service as locally."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
import torchrelay
from comparison import agree, run, same, served
from torch import nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401 (registers operators)

pytestmark = pytest.mark.usefixtures("remote")


FOREACH: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.ASGD, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
]


def rows(*shape: int, grad: bool = False) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda step: (torch.randn(*shape, requires_grad=grad),)


def of(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    return lambda: function


def test_functions_of_torch_masked() -> None:
    def reduce(x: torch.Tensor) -> list[torch.Tensor]:
        mask = x > 0
        return [
            torch.masked.softmax(x, 1, mask=mask),
            torch.masked.logsumexp(x, 0, mask=mask),
            torch.masked.std(x, 1, unbiased=False, mask=mask),
            torch.masked.argmax(x, 1, mask=mask),
            torch.masked.cumsum(x, 1, mask=mask),
        ]

    agree(of(reduce), rows(4, 8, grad=True), tolerance=1e-6)


def test_fused_products_that_dynamo_writes_for_updates_in_place() -> None:
    def update(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.addcmul_(y, y, value=0.25).addcdiv_(y, y.abs() + 1, value=-2)
        return x.add_(y, alpha=3.0)

    agree(of(update), lambda step: (torch.randn(4, 8), torch.randn(4, 8)), tolerance=1e-6)


@pytest.mark.parametrize(
    "kind",
    [
        functools.partial(torch.optim.Adam, amsgrad=True),
        functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
        torch.optim.Adadelta,
        *(
            pytest.param(functools.partial(kind, foreach=True, **options), marks=pytest.mark.slow)
            for kind, options in FOREACH
        ),
    ],
)
def test_the_step_of_an_optimizer(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """Parameters of unlike shapes; what the optimizer keeps are tensors that the graph takes."""
    parameters: list[nn.Parameter] = []

    def make() -> Callable[..., Any]:
        parameters[:] = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))]
        step = kind(parameters, lr=0.1).step

        def run(*gradients: torch.Tensor) -> list[torch.Tensor]:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            step()
            return [parameter.detach() for parameter in parameters]

        return run

    agree(make, lambda step: (torch.randn(3, 4), torch.randn(4)), steps=3, tolerance=1e-6)


def test_gradients_of_convolutions_by_name() -> None:
    def gradients(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.nn.grad.conv2d_input(x.shape, weight, out, padding=1),
            torch.nn.grad.conv2d_weight(x, weight.shape, out, padding=1),
        )

    def given(step: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 8, 8)

    agree(of(gradients), given, tolerance=1e-6)


def test_random_projections_of_low_rank() -> None:
    agree(of(lambda x: torch.svd_lowrank(x, q=3)[1]), rows(8, 6), tolerance=1e-5)


def test_fake_quantization() -> None:
    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale, zero = torch.full((8,), 0.1), torch.zeros(8, dtype=torch.int32)
        return (
            torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
            torch.fake_quantize_per_channel_affine(x, scale, zero, 1, -128, 127),
        )

    agree(of(quantize), rows(4, 8, grad=True))


def test_the_operators_that_pt2e_quantization_writes() -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        library = torch.ops.quantized_decomposed
        small = library.quantize_per_tensor.default(x, 0.05, 3, -128, 127, torch.int8)
        return library.dequantize_per_tensor.default(small, 0.05, 3, -128, 127, torch.int8) @ x.T

    agree(of(both), rows(4, 8), tolerance=1e-6)


def test_code_in_numpy() -> None:
    def code(x: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
        y = x.copy()
        y[0] = 3.0
        y += 1
        return np.tanh(x) @ y.T, np.where(y > 0, y, -y).astype(np.float64), np.linalg.norm(x.real, axis=0)

    def through_tensors(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(array) for array in code(x.numpy()))

    agree(of(through_tensors), rows(4, 8), tolerance=1e-6)


def test_a_seed_of_numpy_in_the_graph_as_models_with_random_attention_set() -> None:
    def seeded(x: torch.Tensor) -> torch.Tensor:
        np.random.seed(0)
        return x.sin() + 1

    agree(of(seeded), rows(4, 8, grad=True))


def test_a_region_that_is_compiled_once_for_all_and_called_once() -> None:
    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    agree(of(lambda x: region(x).cos()), rows(4, 8, grad=True))


def test_a_region_that_is_compiled_once_for_all_and_called_for_each_layer() -> None:
    """As eager: with local Inductor the gradients are wrong, up to torch 2.13."""

    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, (16,), scale)
        return x + F.gelu(F.linear(y, weight), approximate="tanh")

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(16, 16) / 4 for _ in range(3))
            self.scales = nn.ParameterList(torch.ones(16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight, scale in zip(self.weights, self.scales, strict=True):
                x = region(x, weight, scale)
            return F.layer_norm(x, (16,)).sin()

    def eagerly() -> contextlib.AbstractContextManager[Any]:
        return torch.compiler.set_stance("force_eager")

    eager = run(Layers, rows(4, 16, grad=True), backend="eager", around=eagerly)
    before = torchrelay.report()
    remote = run(Layers, rows(4, 16, grad=True), backend="torchrelay")
    assert served(before) == remote.graphs
    same(eager, remote, tolerance=1e-5)


def test_a_quantization_that_stays_one_operator() -> None:
    from torch._higher_order_ops import InvokeQuant

    call = InvokeQuant()

    def invoke(x: torch.Tensor) -> torch.Tensor:
        return call(lambda a, b: (torch.sin(a) * b,), x, x, scheme="nf4")[0] * 2.0

    agree(of(invoke), rows(4, 8), tolerance=1e-6)
