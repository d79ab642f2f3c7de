"""0-d tensors and NumPy scalars as inputs: tensors like any other, served for every value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torchrelay
from comparison import agree
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torchrelay.clients.backend import RelayBackend

pytestmark = pytest.mark.usefixtures("remote")
Program = Callable[..., Any]
Connect = Callable[..., RelayBackend]

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def rows(*scalars: Any) -> Callable[[int], tuple[Any, ...]]:
    return lambda step: (torch.randn(6, 4), *scalars)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_argument_of_any_type_is_one_graph_for_all_values(dtype: torch.dtype) -> None:
    found = agree(
        lambda: lambda x, n: x * n + n,
        lambda step: (torch.randn(6, 4), torch.tensor(step + 1).to(dtype)),
        steps=3,
    )
    assert found.graphs == 1


class Counted(nn.Module):
    """Has a 0-d buffer and a 0-d attribute."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("position", torch.tensor(2, dtype=dtype))
        self.scale = torch.tensor(3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.position + self.scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_a_buffer_or_an_attribute(dtype: torch.dtype) -> None:
    agree(lambda: Counted(dtype), rows(), steps=2)


@pytest.mark.parametrize("kind", [numpy.float64, numpy.float32, numpy.int64, numpy.int32, numpy.bool_])
def test_a_numpy_scalar_is_one_graph_for_all_values(kind: type) -> None:
    found = agree(lambda: lambda x, n: x * n, lambda step: (torch.randn(6, 4), kind(step + 1)), steps=3)
    assert found.graphs == 1


USES: dict[str, Program] = {
    "a sum": lambda x, n: x + n,
    "a comparison": lambda x, n: torch.where(n > 2, x, -x),
    "linspace": lambda x, n: x.sum() + torch.linspace(0, n, 5),
    "a loop": lambda x, n: while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, y * 1.5), (n, x)),
    "a change": lambda x, n: (x * n, n.add_(1)),
}


@pytest.mark.parametrize("use", USES)
def test_uses_of_an_integer_tensor(use: str) -> None:
    agree(lambda: USES[use], lambda step: (torch.randn(6, 4), torch.tensor(1 + step)), steps=2)


def narrowed(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    size = n.item()
    torch._check(size >= 0)
    torch._check(size <= x.size(0))
    return x.narrow(0, 0, size) * 2


READS: dict[str, Program] = {
    "item and the tensor": lambda x, n: x * n.item() + n,
    "a division": lambda x, n: x * (n.item() / 3),
    "a shape": lambda x, n: torch.full((2, 3), n.item()) + x.sum(),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("read", READS)
def test_a_value_that_the_graph_reads(read: str, dtype: torch.dtype) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        agree(
            lambda: READS[read], lambda step: (torch.randn(6, 4), torch.tensor(2 + step).to(dtype)), steps=3
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_a_value_that_bounds_a_size(dtype: torch.dtype) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        agree(
            lambda: narrowed, lambda step: (torch.randn(6, 4), torch.tensor(2 + step, dtype=dtype)), steps=3
        )


def test_an_index_that_inductor_does_not_compile_is_counted_and_warns(connect: Connect) -> None:
    """Before PyTorch 2.14 the operator needs the number while it is traced. Dynamo runs such a function as it is."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
        pytest.skip("Inductor compiles it")
    connect(TORCHRELAY_MODE="remote")
    compiled = torch.compile(lambda x, n: x.sin()[n] * 2, backend="torchrelay")
    x, n = torch.randn(6, 4), torch.tensor(2)
    with pytest.warns(torchrelay.FallbackWarning, match="data-dependent"):
        found = compiled(x, n)
    torch.testing.assert_close(found, x.sin()[n] * 2)
    assert torchrelay.report().fallbacks == {"compile_failed": 1}
