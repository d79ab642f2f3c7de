"""The models that are timed: in: a name and a device, out: a model, its inputs and a training step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model in training mode with one batch; `loss(callable)` runs forward on the (compiled) callable.
    compiles_update: whether the optimizer's step is compiled too; then `update` is set to the compiled one."""

    model: nn.Module
    loss: Callable[[Callable[..., Any]], Tensor]
    compiles_update: bool = False
    optimizer: torch.optim.Optimizer = field(init=False)
    update: Callable[[], Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", torch.optim.AdamW(self.model.parameters(), lr=1e-4))
        object.__setattr__(self, "update", self.optimizer.step)

    def step(self, callable_: Callable[..., Any]) -> Tensor:
        """Forward, backward, optimizer; returns the loss, still on the device."""
        loss = self.loss(callable_)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.update()
        return loss.detach()


def _gpt2(device: torch.device, *, batch: int, length: int, **shape: int) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False, **shape)
    model = GPT2LMHeadModel(config).to(device).train()
    text = torch.randint(config.vocab_size, (batch, length), device=device)
    return Workload(model, lambda f: f(input_ids=text, labels=text).loss)


def _gpt2_narrow(device: torch.device, layers: int) -> Workload:
    shape = {"n_embd": 256, "n_head": 4, "vocab_size": 8192, "n_positions": 256}
    return _gpt2(device, batch=4, length=128, n_layer=layers, **shape)


def _gpt2_with_optimizer(device: torch.device) -> Workload:
    return replace(_gpt2_narrow(device, 12), compiles_update=True)


def _gpt2_base(device: torch.device) -> Workload:
    return _gpt2(device, batch=8, length=512, n_layer=12, n_embd=768, n_head=12)


def _llama(device: torch.device) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=16,
        hidden_size=1024,
        intermediate_size=2816,
        num_attention_heads=16,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device).train()
    text = torch.randint(config.vocab_size, (4, 512), device=device)
    return Workload(model, lambda f: f(input_ids=text, labels=text).loss)


def _resnet50(device: torch.device) -> Workload:
    import timm

    model = timm.create_model("resnet50").to(device).train()
    images = torch.randn(64, 3, 224, 224, device=device)
    labels = torch.randint(1000, (64,), device=device)
    return Workload(model, lambda f: nn.functional.cross_entropy(f(images), labels))


WORKLOADS: dict[str, Callable[[torch.device], Workload]] = {
    **{f"gpt2-{layers}x256": functools.partial(_gpt2_narrow, layers=layers) for layers in (4, 12, 24, 48)},
    "gpt2-12x256-adamw": _gpt2_with_optimizer,
    "gpt2-12x768": _gpt2_base,
    "llama-16x1024": _llama,
    "resnet50": _resnet50,
}
NEEDS = {name: "timm" if name == "resnet50" else "transformers" for name in WORKLOADS}
"""The library that each model comes from."""


def build(name: str, device: torch.device, seed: int = 0) -> Workload:
    torch.manual_seed(seed)
    return WORKLOADS[name](device)


def wait_for(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
