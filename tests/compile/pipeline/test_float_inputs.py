"""Floats are drawn so that values keep their size, and a graph in which rounding decides is not refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured_requests import eager_of, request_of
from planted_faults import Compiled
from torch import nn
from torch.nn import functional
from torchrelay.compiler.errors import VerifyFailed
from torchrelay.compiler.pipeline.verification import verify
from torchrelay.compiler.request import schema


def drawn(request: schema.GraphRequest) -> list[Any]:
    """The inputs that a graph is compared on first."""
    gm = eager_of(request)
    facts = verify.input_facts(request, gm, {}, verify.DEVIATIONS[0])
    return verify.random_inputs(request, {}, facts)


def size(value: torch.Tensor) -> float:
    return float(value.detach().float().square().mean().sqrt())


@pytest.mark.parametrize("width", [16, 1024])
def test_values_keep_their_size_whatever_the_width(width: int) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(12)))
    request = request_of(layers, torch.randn(8, width))
    (result,) = eager_of(request)(*drawn(request))
    assert 0.1 < size(result) < 2.0


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Conv2d(64, 96, 3), torch.randn(2, 64, 12, 12)),
        (nn.Conv2d(64, 64, 3, groups=64), torch.randn(2, 64, 12, 12)),
        (nn.ConvTranspose2d(64, 32, 4, stride=2), torch.randn(2, 64, 12, 12)),
        (nn.Bilinear(32, 32, 16), None),
        (nn.TransformerEncoderLayer(256, 4, dropout=0.0, batch_first=True), torch.randn(2, 9, 256)),
        (nn.utils.parametrizations.weight_norm(nn.Linear(512, 512)), torch.randn(4, 512)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_give_values_of_ordinary_size(layer: nn.Module, inputs: Any) -> None:
    given = (torch.randn(4, 32), torch.randn(4, 32)) if inputs is None else (inputs,)
    request = request_of(layer, *given)
    result = eager_of(request)(*drawn(request))[0]
    assert 0.05 < size(result) < 8.0


def test_vectors_are_drawn_by_what_takes_them() -> None:
    request = request_of(
        nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64)).eval(), torch.randn(2, 3, 8, 8)
    )
    by_shape = [value for value in drawn(request) if isinstance(value, torch.Tensor) and value.shape == (64,)]
    biases = [value for value in by_shape if bool((value.abs() <= 0.25).all())]
    near_one = [value for value in by_shape if bool(((value >= 0.5) & (value <= 1.5)).all())]
    assert (len(biases), len(near_one)) == (3, 2)  # bias, mean and shift; variance and scale


def test_what_is_multiplied_by_a_large_number_is_a_mask() -> None:
    def attention(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (scores + (1.0 - mask[:, None, None, :]) * torch.finfo(torch.float32).min).softmax(-1)

    request = request_of(attention, torch.randn(2, 3, 64, 64), torch.ones(2, 64))
    mask = next(value for value in drawn(request) if value.shape == (2, 64))
    assert set(mask.unique().tolist()) == {0.0, 1.0}


def test_layers_inside_a_checkpoint_are_seen() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return x

    request = request_of(Model(), torch.randn(4, 512, requires_grad=True))
    with torch.no_grad():
        result = eager_of(request)(*drawn(request))[0]
    assert 0.1 < size(result) < 2.0


class Unscaled(nn.Module):
    """Attention without a scale, as in T5, several times."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.mixes = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mix in self.mixes:
            q, k, v = (
                mix(functional.rms_norm(x, x.shape[-1:])).view(*x.shape[:2], 3, 8, -1).permute(2, 0, 3, 1, 4)
            )
            mixed = (q @ k.transpose(-1, -2)).float().softmax(-1).to(v.dtype) @ v
            x = x + mixed.transpose(1, 2).flatten(2).relu()
        return x


def test_right_code_in_half_precision_is_not_refused() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        request = request_of(Unscaled(), torch.randn(2, 64, 512))
    found = verify.verify(request, Compiled(request))
    assert (found.status, found.reason) == ("passed", "")


def test_a_graph_that_rounding_decides_is_published_with_the_reason() -> None:
    def chaos(x: torch.Tensor) -> torch.Tensor:
        x = x.frac()
        for _ in range(40):
            x = 3.9 * x * (1 - x)
        return x

    request = request_of(chaos, torch.rand(64).mul_(0.9))
    eager = eager_of(request)

    def elsewhere(x: torch.Tensor) -> Any:
        return eager(x * (1 + 1e-6))

    found = verify.verify(request, elsewhere)
    assert found.status == "skipped"
    assert "rounding decides 1 of 1 values: output 0, at most" in found.reason


def test_integers_are_compared_where_rounding_does_not_decide_them() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x * 1.1
        return x.sum(-1) - x.flip(-1).sum(-1) > 0, x[:, 0] > 0

    request = request_of(program, torch.randn(600, 64))
    eager = eager_of(request)
    found = verify.verify(request, lambda x: [torch.zeros_like(eager(x)[0]), eager(x)[1]])
    assert found.status == "passed"
    assert "rounding decides 1 of 2 values" in found.reason and "integers of output 0" in found.reason
    with pytest.raises(VerifyFailed, match="output 1 differs from eager in 600 of 600 integers"):
        verify.verify(request, lambda x: [eager(x)[0], ~eager(x)[1]])


class NormAfterMean(nn.Module):
    """A block of ResNeSt: a mean over an image, a convolution with a bias, a batch norm, which cancels the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.small, self.norm = nn.Conv2d(32, 16, 1), nn.BatchNorm2d(16)
        self.gate, self.head = nn.Conv2d(16, 32, 1), nn.Linear(32, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.stem(x)
            y = functional.relu(self.norm(self.small(x.mean((2, 3), keepdim=True))))
            return self.head((x * torch.sigmoid(self.gate(y))).mean((2, 3)))


class FusedBiasAndNorm(torch.autograd.Function):
    """As Inductor's kernels on a GPU: mean and variance are those of float32 numbers, of which the backward has
    bfloat16 ones."""

    @staticmethod
    def forward(context: Any, x: Any, bias: Any, weight: Any, shift: Any, mean: Any, variance: Any) -> Any:
        x = x.float() + bias.bfloat16()[:, None, None]
        here, spread = x.mean((0, 2, 3), True), x.var((0, 2, 3), unbiased=False, keepdim=True)
        mean.lerp_(here.flatten(), 0.1)
        variance.lerp_(spread.flatten() * len(x) / (len(x) - 1), 0.1)
        inverse = (spread + 1e-5).rsqrt()
        context.save_for_backward(x.bfloat16(), here, inverse, weight)
        normal = (x - here) * inverse
        return (normal * weight[:, None, None] + shift[:, None, None]).bfloat16()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        x, here, inverse, weight = context.saved_tensors
        gradient, normal = gradient.float(), (x - here) * inverse
        by_weight, by_shift = ((gradient * each).sum((0, 2, 3), True) for each in (normal, 1.0))
        by_x = weight[:, None, None] * inverse * (gradient - (by_shift + normal * by_weight) / len(x))
        sums = (each.sum((0, 2, 3)) for each in (by_x, by_weight, by_shift))
        return by_x.bfloat16(), *sums, None, None


def test_a_norm_after_a_mean_over_an_image_has_something_to_divide_by() -> None:
    request = request_of(NormAfterMean(), torch.randn(32, 3, 64, 64))
    gm = eager_of(request)
    (norm,) = (
        node
        for node in gm.graph.nodes
        if node.op == "call_function"
        and "batch_norm" in str(node.target)
        and node.args[0].args[2] is not None
    )
    product = norm.args[0]
    with gm.graph.inserting_before(norm):
        plain = gm.graph.call_function(product.target, (*product.args[:2], None, *product.args[3:]))
        given = (plain, product.args[2], norm.args[3], norm.args[4], norm.args[1], norm.args[2])
        norm.replace_all_uses_with(gm.graph.call_function(fused, given))
    gm.graph.erase_node(norm)
    gm.recompile()
    found = verify.verify(request, gm)
    assert (found.status, found.reason) == ("passed", "")


def fused(*given: Any) -> Any:
    return FusedBiasAndNorm.apply(*given)
