"""What users write, compiled through a whole service, does what local compilation does: values, gradients,
changes in place, random numbers and the number of graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from comparison import agree
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("remote")


def rows(*shape: int, grad: bool = False) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda step: (torch.randn(*shape, requires_grad=grad),)


def of(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    return lambda: function


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


# --- training and inference ------------------------------------------------------------------------------


def test_training_follows_the_same_path_over_several_steps() -> None:
    agree(mlp, rows(4, 8), steps=4)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_inference_is_the_same(around: Callable[[], Any]) -> None:
    agree(lambda: nn.Sequential(nn.Linear(8, 4), nn.GELU()), rows(4, 8), around=around)


def test_a_size_made_of_symbolic_sizes() -> None:
    agree(of(lambda x: F.layer_norm(x.sin(), x.shape[-1:])), rows(4, 8, grad=True), dynamic=True)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_bias_that_batch_norm_cancels(dropout: float) -> None:
    """Its gradient is zero, and what rounding leaves of it depends on the order of summation."""

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for channels in (3, 16, 16):
            layers += [
                nn.Conv2d(channels, 16, 3, padding=1),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Dropout(dropout),
            ]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

    agree(make, rows(16, 3, 32, 32))


def test_batch_norm_updates_its_buffers() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))

    agree(make, rows(4, 3, 8, 8))


def test_dropout_and_rand_draw_the_same_stream() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.dropout(self.linear(x), 0.5)
            return hidden + torch.rand_like(hidden) + torch.randn(8) + torch.randint(0, 5, (8,))

    agree(Noisy, rows(4, 8), steps=3)


def test_dropout_in_half_precision() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.dropout(x @ x, 0.1) * 2

    agree(of(noisy), rows(600, 600, grad=True))


def test_a_transformer_layer_in_half_precision() -> None:
    def make() -> Callable[..., Any]:
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)

        def run(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return layer(x)

        return run

    agree(make, rows(4, 32, 64, grad=True))


def test_fallback_random_draws_eagers_stream() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.rand(8)

    found = agree(of(noisy), rows(4, 8), options={"fallback_random": True})
    torch.manual_seed(101)
    expected = noisy(torch.randn(4, 8))
    assert torch.equal(dict(found.values)["step 1: output 0"], expected)


def test_autocast_computes_in_bfloat16() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16))

    agree(make, rows(4, 8), around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))


def test_tied_and_partly_frozen_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.middle = nn.Linear(8, 8)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight
            self.middle.weight.requires_grad_(False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.middle(self.embed(ids)))

    agree(Tied, lambda step: (torch.randint(0, 10, (4, 3)),))


def test_attention() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    agree(of(attend), lambda step: tuple(torch.randn(2, 2, 8, 8, requires_grad=True) for _ in range(3)))


def test_activation_checkpointing_recomputes_the_same_dropout() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False) + x

    agree(Checkpointed, rows(4, 8, grad=True))


class _TripledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x


def test_a_custom_autograd_function_keeps_its_own_backward() -> None:
    agree(of(lambda x: _TripledGradient.apply(x.sin())), rows(4, 8, grad=True))


# --- graphs ----------------------------------------------------------------------------------------------


def test_a_graph_break_makes_two_graphs() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).relu()
            torch._dynamo.graph_break()
            return self.second(x) * 2

    assert agree(Broken, rows(4, 8)).graphs == 2


def test_a_branch_on_data_stays_in_the_graph() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    agree(of(branch), lambda step: (torch.randn(4) + (-1) ** step,), fullgraph=True)


def test_constants_made_in_the_graph() -> None:
    def constant(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.arange(4) + torch.eye(4)[0]

    agree(of(constant), rows(3, 4, grad=True))


HELD = torch.arange(4.0)


@torch._dynamo.assume_constant_result
def held() -> torch.Tensor:
    return HELD


def test_tensors_that_the_graph_itself_holds() -> None:
    agree(of(lambda x: x * held() + held()), rows(3, 4, grad=True))


def test_nested_results_keep_their_structure() -> None:
    def nest(x: dict[str, torch.Tensor], y: list[torch.Tensor]) -> dict[str, Any]:
        return {"a": [x["x"] + 1, (y[0] * 2,)], "none": None, "number": 3}

    agree(of(nest), lambda step: ({"x": torch.randn(4)}, [torch.randn(4, requires_grad=True)]))


# --- memory ----------------------------------------------------------------------------------------------


def test_inputs_are_changed_in_place_and_returned() -> None:
    def change(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        y.mul_(x)
        return x.sum() + y, x

    agree(of(change), lambda step: (torch.randn(8), torch.randn(8)))


def test_inputs_that_overlap_see_each_others_changes() -> None:
    def change(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return y * 2, x.sum()

    def overlapping(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        base = torch.randn(8)
        return base[:6], base[2:]

    agree(of(change), overlapping)


def test_outputs_are_views_of_inputs_as_locally() -> None:
    found = agree(of(lambda x: (x.view(-1), x.t(), x, x + 1)), rows(4, 4, grad=True))
    assert dict(found.values)["step 0: aliases"] == [(0,), (0,), (0,), ()]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(40)[3:27].view(6, 4),
        lambda: torch.randn(12, 8)[::2, ::2],
        lambda: torch.randn(4).expand(6, 4),
    ],
    ids=["transposed", "at an offset", "strided", "expanded"],
)
def test_inputs_of_any_layout(make: Callable[[], torch.Tensor]) -> None:
    agree(of(lambda x: (x * 2).softmax(1)), lambda step: (make(),), steps=1)


def test_channels_last() -> None:
    def make() -> nn.Module:
        return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    agree(make, lambda step: (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),))


def test_zero_size_and_zero_dimensional_inputs() -> None:
    def join(empty: torch.Tensor, scalar: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.cat([empty, x]) * scalar, empty.sum() + scalar

    agree(
        of(join), lambda step: (torch.randn(0, 4), torch.tensor(2.0, requires_grad=True), torch.randn(3, 4))
    )


def test_integers_alone() -> None:
    agree(of(lambda x: (x // 3, x % 3, x.sum())), lambda step: (torch.randint(0, 50, (4, 8)),))


def test_complex_numbers() -> None:
    def rotate(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.fft.fft(x) * (1 + 2j)).sum(-1)

    agree(of(rotate), lambda step: (torch.randn(4, 8, dtype=torch.complex64),))


# --- shapes and numbers that change ----------------------------------------------------------------------


def test_a_new_shape_recompiles_once_and_then_serves_every_size() -> None:
    found = agree(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), lambda s: (torch.randn(4 + 3 * s, 8),), steps=4
    )
    assert found.graphs == 2


def test_a_size_that_breaks_an_assumption_recompiles() -> None:
    """s0 % 3 decides in Python: sizes that are multiples of three have a graph of their own."""

    def by_size(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = x.view(-1, 4)
        if x.shape[0] % 3 == 0:
            z = z * 2
        return z.sum(1), x[: y.shape[0]] + y

    def given(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8 + step, 8, requires_grad=True), torch.randn(3 + step, 8)

    found = agree(of(by_size), given, steps=4, dynamic=True)
    assert 1 < found.graphs < 4
    for step in range(4):
        torch.manual_seed(100 + step)
        expected = by_size(*given(step))
        torch.testing.assert_close(dict(found.values)[f"step {step}: output 0"], expected[0].detach())


def test_an_operator_whose_kernel_takes_no_symbolic_sizes() -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bilinear = nn.Bilinear(8, 8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.bilinear(x, x.tanh())
            return out

    agree(Squared, lambda step: (torch.randn(4 + step, 8, requires_grad=True),), steps=3, dynamic=True)


def test_a_symbolic_float_serves_every_value() -> None:
    found = agree(of(lambda x, k: x * k + k), lambda step: (torch.randn(4), 1.5 + step), steps=4)
    assert found.graphs == 2


def test_a_float_that_cannot_stay_symbolic_is_traced_again() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    agree(make, lambda step: (torch.randn(4 + step, 3, 6, 6),), steps=2, dynamic=True)


# --- options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_every_mode(mode: str) -> None:
    agree(of(lambda x: (x @ x.t()).relu()), rows(16, 16), mode=mode, steps=1, tolerance=1e-6)


def test_an_option_of_inductors() -> None:
    agree(mlp, rows(4, 8), options={"max_autotune_pointwise": True, "epilogue_fusion": False}, steps=1)
