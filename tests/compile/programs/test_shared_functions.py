"""A function that many modules have in common, as the `forward` of each nn.Sequential, has records for all of them."""

from __future__ import annotations

from pathlib import Path

import torch
from program_child import Programs, uncompiled
from torch import Tensor, nn
from torchrelay.compiler.torch_internals.dynamo.programs import frames

MODULES = 40


def modules() -> list[nn.Module]:
    """Equal code: classes of layers, sizes and an argument tell them apart."""
    torch.manual_seed(0)
    layers = [nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.GELU()]
    wide = [nn.Sequential(nn.Linear(4, 2 + width), layer) for width in range(8) for layer in layers]
    return [
        *wide,
        *(nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(slope)) for slope in range(MODULES - len(wide))),
    ]


class Ragged(nn.Module):
    """Its buffer has no sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def started(folder: Path) -> tuple[int, list[str], set[str]]:
    """How many modules start without tracing in a new process, why others do not, and the keys of their places."""
    programs = Programs(folder, folder)
    keys: set[str] = set()
    programs.find = lambda key: (keys.add(key), Programs.find(programs, key))[1]  # type: ignore[method-assign]
    uninstall = frames.install(programs)
    try:
        for module in modules():
            torch.compiler.reset()
            x = torch.linspace(-1, 1, 12).reshape(3, 4)
            found: Tensor = torch.compile(module, backend=uncompiled)(x)
            torch.testing.assert_close(found, module(x))
    finally:
        uninstall()
    return programs.started, programs.reasons, keys


def test_as_many_modules_of_one_function_start_without_tracing_as_there_are(tmp_path: Path) -> None:
    assert started(tmp_path)[0] == 0
    count, reasons, keys = started(tmp_path)
    assert (count, reasons) == (MODULES, [])
    assert len(keys) == 33, "modules of other classes or sizes share a place"


def test_a_module_that_cannot_be_described_runs(tmp_path: Path) -> None:
    uninstall = frames.install(Programs(tmp_path, tmp_path))
    try:
        found = torch.compile(Ragged(), backend=uncompiled)(torch.ones(3))
    finally:
        uninstall()
    assert torch.equal(found, torch.ones(3).sin())
