"""A compile takes the kernels that an earlier one built, and builds only what is new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrelay
from torch import nn
from torchrelay.clients.backend import RelayBackend
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest

Make = Callable[[], nn.Module]


class Layered(nn.Module):
    def __init__(self, activations: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(33), nn.Linear(33, 33), activation) for activation in activations
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def compiled(relay: RelayBackend, model: nn.Module, x: torch.Tensor) -> artifact_manifest.Manifest:
    """The manifest of the model's artifact; asserts that its gradients are local compilation's."""
    known = set(_artifacts(relay))
    gradients = []
    for backend in ("torchrelay", "inductor"):
        torch.compiler.reset()
        model.zero_grad()
        torch.compile(model, backend=backend)(x).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert torchrelay.report().fallbacks == {}
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    (new,) = set(_artifacts(relay)) - known
    return container.read_manifest(new.read_bytes())


def _artifacts(relay: RelayBackend) -> list[Path]:
    return [path for path in (relay.settings.cache_dir / "artifacts").rglob("*") if len(path.stem) == 64]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 33)


def test_a_changed_layer_builds_only_its_own_kernels(remote: RelayBackend, x: torch.Tensor) -> None:
    first = compiled(remote, Layered([nn.GELU() for _ in range(3)]), x)
    assert first.kernels_built == first.kernels > 2
    assert first.kernels_reused == 0
    second = compiled(remote, Layered([nn.GELU(), nn.Tanh(), nn.GELU()]), x)
    assert 0 < second.kernels_built < second.kernels
    assert second.kernels_built + second.kernels_reused == second.kernels
    third = compiled(remote, Layered([nn.GELU(), nn.GELU(), nn.Tanh()]), x)
    assert third.kernels_built < second.kernels_built


def test_other_compiler_flags_reuse_nothing(remote: RelayBackend, x: torch.Tensor) -> None:
    def manifest(options: dict[str, Any]) -> artifact_manifest.Manifest:
        known = set(_artifacts(remote))
        torch.compiler.reset()
        torch.compile(lambda x: (x * 34).sin(), backend="torchrelay", options=options)(x)
        (new,) = set(_artifacts(remote)) - known
        return container.read_manifest(new.read_bytes())

    assert manifest({}).kernels_built == 1
    other = manifest({"cpp.enable_floating_point_contract_flag": "fast"})
    assert (other.kernels_built, other.kernels_reused) == (1, 0)
