"""The matrix products that are tuned: in: nothing, or a device; out: shapes from well-known models, inputs, calls.

m, k, n: rows of the result, the length that is summed over, columns. layout: of the two operands, `n` for rows one
after the other, `t` for columns: a linear layer's forward is `nt`, the gradients are `nn` (of its input) and `tn` (of
its weight).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_SHORT = {"float32": "tf32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}


@dataclass(frozen=True)
class Product:
    source: str
    op: str
    """mm, addmm, bmm, or scaled: fp8 operands with one scale each, a bfloat16 result."""
    m: int
    k: int
    n: int
    dtype: torch.dtype = torch.bfloat16
    layout: str = "nt"
    batch: int = 0

    @property
    def name(self) -> str:
        short = _SHORT[str(self.dtype).removeprefix("torch.")]
        batch = f"{self.batch}x" if self.batch else ""
        return f"{self.source}: {self.op} {batch}{self.m}x{self.k}x{self.n} {short} {self.layout}"

    def inputs(self, device: str) -> list[Tensor]:
        """The same for the same product."""
        maker = torch.Generator(device).manual_seed(
            int(hashlib.sha256(self.name.encode()).hexdigest()[:8], 16)
        )

        def matrix(rows: int, columns: int, kept: str) -> Tensor:
            size = (rows, columns) if kept == "n" else (columns, rows)
            whole = [self.batch, *size] if self.batch else list(size)
            made = torch.randn(whole, device=device, generator=maker)
            made = (made * 0.25).to(self.dtype)
            return made if kept == "n" else made.transpose(-2, -1)

        pair = [matrix(self.m, self.k, self.layout[0]), matrix(self.k, self.n, self.layout[1])]
        if self.op == "addmm":
            return [torch.randn(self.n, device=device, generator=maker).to(self.dtype), *pair]
        if self.op == "scaled":
            return [*pair, *(torch.tensor(scale, device=device) for scale in (0.5, 2.0))]
        return pair

    def call(self) -> Callable[..., Tensor]:
        """A function with code of its own, that torch.compile has not seen."""
        if self.op == "scaled":

            def scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
                product: Tensor = torch._scaled_mm(
                    a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
                )
                return product

            return _anew(scaled)
        function: Any = getattr(torch, self.op)
        return _anew(lambda *inputs: function(*inputs))


def _anew(function: Any) -> Callable[..., Tensor]:
    made: Callable[..., Tensor] = FunctionType(
        function.__code__.replace(), function.__globals__, None, None, function.__closure__
    )
    return made


def all_at_once(calls: Sequence[Callable[..., Tensor]], counts: Sequence[int]) -> Callable[..., list[Tensor]]:
    """One function of all the calls' inputs, one after the other."""

    def every(*inputs: Tensor) -> list[Tensor]:
        results, taken = [], 0
        for call, count in zip(calls, counts, strict=True):
            results.append(call(*inputs[taken : taken + count]))
            taken += count
        return results

    return every


def _products() -> list[Product]:
    bf16, fp16, fp32, fp8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
    gpt2, llama, vit, bert = "GPT-2", "Llama-7B", "ViT-L", "BERT-large"
    return [
        # GPT-2: 8 x 512 tokens, 768 wide; its weights are stored as `nn`
        Product(f"{gpt2} attention in", "addmm", 4096, 768, 2304, bf16, "nn"),
        Product(f"{gpt2} attention out", "addmm", 4096, 768, 768, bf16, "nn"),
        Product(f"{gpt2} MLP in", "addmm", 4096, 768, 3072, bf16, "nn"),
        Product(f"{gpt2} MLP out", "addmm", 4096, 3072, 768, bf16, "nn"),
        Product(f"{gpt2} head", "mm", 4096, 768, 50257, bf16, "nt"),
        Product(f"{gpt2} MLP in, gradient of x", "mm", 4096, 3072, 768, bf16, "nt"),
        Product(f"{gpt2} MLP in, gradient of w", "mm", 768, 4096, 3072, bf16, "tn"),
        Product(f"{gpt2} MLP in", "addmm", 4096, 768, 3072, fp32, "nn"),
        Product(f"{gpt2} MLP out", "addmm", 4096, 3072, 768, fp32, "nn"),
        # Llama-7B: 2048 tokens at once, and a few at a time as when it writes
        Product(f"{llama} attention", "mm", 2048, 4096, 4096, bf16, "nt"),
        Product(f"{llama} MLP in", "mm", 2048, 4096, 11008, bf16, "nt"),
        Product(f"{llama} MLP out", "mm", 2048, 11008, 4096, bf16, "nt"),
        Product(f"{llama} one token", "mm", 1, 4096, 4096, bf16, "nt"),
        Product(f"{llama} 8 tokens", "mm", 8, 4096, 11008, bf16, "nt"),
        Product(f"{llama} 16 tokens", "mm", 16, 11008, 4096, bf16, "nt"),
        Product(f"{llama} 64 tokens", "mm", 64, 4096, 4096, fp16, "nt"),
        Product(f"{llama} attention", "scaled", 2048, 4096, 4096, fp8, "nt"),
        Product(f"{llama} MLP in", "scaled", 2048, 4096, 11008, fp8, "nt"),
        Product(f"{llama} MLP out", "scaled", 2048, 11008, 4096, fp8, "nt"),
        Product(f"{llama} 16 tokens", "scaled", 16, 4096, 4096, fp8, "nt"),
        # ViT-L: 32 images of 197 patches
        Product(f"{vit} attention in", "addmm", 6304, 1024, 3072, fp16, "nt"),
        Product(f"{vit} MLP in", "addmm", 6304, 1024, 4096, fp16, "nt"),
        Product(f"{vit} MLP out", "addmm", 6304, 4096, 1024, fp16, "nt"),
        Product(f"{vit} MLP out, gradient of w", "mm", 1024, 6304, 4096, fp16, "tn"),
        Product(f"{vit} scores", "bmm", 197, 64, 197, fp16, "nt", 512),
        Product(f"{vit} values", "bmm", 197, 197, 64, fp16, "nn", 512),
        # BERT-large: 8 x 512 tokens
        Product(f"{bert} attention", "addmm", 4096, 1024, 1024, fp16, "nt"),
        Product(f"{bert} MLP in", "addmm", 4096, 1024, 4096, bf16, "nt"),
        Product(f"{bert} MLP out", "addmm", 4096, 4096, 1024, fp32, "nt"),
        Product(f"{bert} head", "mm", 1024, 1024, 30522, fp16, "nt"),
        Product(f"{bert} scores", "bmm", 512, 64, 512, bf16, "nt", 128),
        Product(f"{bert} values", "bmm", 512, 512, 64, bf16, "nn", 128),
        # and what every table has
        Product("square", "mm", 512, 512, 512, bf16, "nn"),
        Product("square", "mm", 1024, 1024, 1024, fp16, "nn"),
        Product("square", "mm", 2048, 2048, 2048, fp32, "nn"),
        Product("square", "mm", 4096, 4096, 4096, bf16, "nn"),
        Product("square", "mm", 8192, 8192, 8192, bf16, "nn"),
        Product("ragged", "mm", 1000, 1000, 1000, fp16, "nn"),
        Product("ragged", "mm", 2040, 1192, 3336, bf16, "nn"),
        Product("ragged", "mm", 777, 1333, 555, bf16, "nn"),
        Product("skinny", "mm", 32, 16384, 256, bf16, "nn"),
        Product("skinny", "mm", 16384, 64, 128, fp16, "nn"),
    ]


def _small() -> list[Product]:
    """For a CPU, where Inductor has several candidates for batched products alone."""
    return [
        Product("small", "bmm", m, k, n, torch.float32, "nn", 4) for m, k, n in ((64, 32, 64), (96, 64, 48))
    ]


def products(device: str) -> list[Product]:
    """In an order that mixes them, so that the first ones stand for all."""
    every = _products() if device == "cuda" else _small()
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        every = [product for product in every if product.op != "scaled"]
    return sorted(every, key=lambda product: hashlib.sha256(product.name.encode()).hexdigest())
