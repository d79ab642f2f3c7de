"""One model of the zoo: a name, and how to build the model with one batch, at its real size or small."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SUITES = ("transformers", "timm", "torchbench", "newer")


@dataclass(kw_only=True)
class Built:
    """A model in training mode with one batch. loss: of what the model returns; None for a model that is not trained,
    such as one that computes gradients itself."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] | None


@dataclass(frozen=True, kw_only=True)
class ZooModel:
    """build: at the real size, or small where its argument is true; on the default device.

    tolerance: upstream's for training. note: how the model differs from the one that upstream has under this name.
    missing: why there is none.
    """

    name: str
    suite: str
    build: Callable[[bool], Built] | None
    tolerance: float = 1e-2
    float32_only: bool = False
    note: str = ""
    missing: str = ""


def own_loss(outputs: Any) -> Tensor:
    """Where the model computes its loss from the labels in its batch."""
    loss: Tensor = outputs.loss
    return loss


def mean_of_outputs(outputs: Any) -> Tensor:
    """Of a function of each output that has gradients. Upstream's `reduce_to_scalar_loss` takes the outputs themselves,
    whose mean after a layer norm is a constant, so that all gradients are rounding."""
    floats = [each for each in tensors_in(outputs) if each.is_floating_point() and each.requires_grad]
    return torch.stack([nn.functional.softplus(each).mean() for each in floats]).sum() / len(floats)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return (
        [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, list | tuple) else []
    )


def without_dropout(model: nn.Module) -> nn.Module:
    """Upstream sets dropout to 1e-30; with 0 there is no random number either."""
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            module.p = 0.0
        for name in ("drop_prob", "dropout", "attention_dropout", "attn_drop", "layerdrop", "dropout_prob"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    return model


def without_repeats(model: nn.Module, most: int = 2) -> nn.Module:
    """Small: of neighbouring blocks whose parameters have the same shapes, the first `most` stay."""
    for parent in list(model.modules()):
        if not isinstance(parent, nn.Sequential | nn.ModuleList):
            continue
        kept: list[tuple[str, nn.Module]] = []
        run, previous = 0, None
        for name, child in parent.named_children():
            shape = (type(child), [(key, tuple(p.shape)) for key, p in child.named_parameters()])
            run = run + 1 if shape == previous and shape[1] else 1
            previous = shape
            if run <= most:
                kept.append((name, child))
        names = [str(index) for index in range(len(kept))] if isinstance(parent, nn.ModuleList) else None
        parent._modules.clear()
        for index, (name, child) in enumerate(kept):
            parent.add_module(names[index] if names else name, child)
    return model
