"""Small programs, each sensitive to some of PyTorch's settings, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


class Model(nn.Module):
    def __init__(self, width: int = 8, features: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(features, width)
        self.second = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).sum()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convolution(x)).mean()


def arithmetic(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * 2 + y).sum(1)


def attention(q: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, q, q)


def attention_by_math(q: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel([SDPBackend.MATH]):
        return attention(q)


def product_in_autocast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return x @ y


def chain_of_products(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ij,jk,kl->il", a, b, c)


def scatter(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(10).index_put((x.long().view(-1),), x.view(-1), accumulate=True)


def made_inside(x: torch.Tensor) -> torch.Tensor:
    return torch.full((4,), 2.0).cos()


def dropped_out(x: torch.Tensor) -> torch.Tensor:
    return (functional.dropout(x, 0.5) * x).sum()


def views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.t(), x * 2


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x), 1)


def wide(x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x) + torch.sin(x)).sum(0)


Program = Callable[..., Any]
Inputs = Callable[[], list[torch.Tensor]]


def ones(*shapes: tuple[int, ...], **kwargs: Any) -> Inputs:
    return lambda: [torch.ones(shape, **kwargs) for shape in shapes]


PROGRAMS: dict[str, tuple[Callable[[], Program], Inputs]] = {
    "model": (Model, ones((4, 6))),
    "convolutions": (Convolutions, ones((2, 3, 8, 8))),
    "arithmetic": (lambda: arithmetic, ones((4, 6), (4, 6))),
    "attention": (lambda: attention, ones((1, 2, 8, 16), dtype=torch.bfloat16)),
    "attention by math": (lambda: attention_by_math, ones((1, 2, 8, 16), dtype=torch.bfloat16)),
    "product in autocast": (lambda: product_in_autocast, ones((4, 6), (6, 4))),
    "chain of products": (lambda: chain_of_products, ones((2, 64), (64, 64), (64, 2))),
    "scatter": (lambda: scatter, ones((4, 6))),
    "made inside": (lambda: made_inside, ones((4, 6))),
    "dropped out": (lambda: dropped_out, ones((4, 6), requires_grad=True)),
    "views": (lambda: views, ones((4, 6), requires_grad=True)),
    "softmax": (lambda: softmax, ones((64, 96))),
    "wide": (lambda: wide, ones((512, 256))),
}
