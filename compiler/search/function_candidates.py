"""Candidates that are plain functions of tensors and need no building; one measures a device's memory bandwidth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..tuning.candidates import CandidateBuilds
from ..tuning.records import Operand, Problem


class FunctionCandidates:
    """Candidates that are functions of the operands, which need no building.

    functions: by text; those that `aten` names are PyTorch's own. Each returns its result. checked: the first of
    PyTorch's own says in float64 what is right.
    """

    def __init__(
        self,
        problem: Problem,
        device: str,
        functions: Mapping[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]],
        *,
        aten: Sequence[str],
        checked: bool = True,
    ) -> None:
        self._checked = checked
        self.problem = problem
        self.device = device
        self.candidates = list(functions)
        self.aten = [i for i, text in enumerate(self.candidates) if text in aten]
        self._functions = list(functions.values())
        self._operands: list[torch.Tensor] = []

    def begin_building(self) -> CandidateBuilds:
        return CandidateBuilds()

    def prepare(self, seed: int) -> None:
        generator = torch.Generator(self.device).manual_seed(seed)
        self._operands = [_filled(operand, self.device, generator) for operand in self.problem.operands]

    def move(self, place: int) -> bool:
        return False

    def reference(self) -> torch.Tensor | None:
        if not (self._checked and self.aten):
            return None
        raised = [x.double() if x.is_floating_point() else x for x in self._operands]
        return self._functions[self.aten[0]](raised).double()

    def run(self, index: int, body: Callable[[Callable[[], Any]], None]) -> torch.Tensor:
        result = torch.full((), math.nan)

        def once() -> None:
            nonlocal result
            result = self._functions[index](self._operands)

        body(once)
        return result

    def close(self) -> None:
        self._operands = []


class CopyCandidates(FunctionCandidates):
    """A copy of one tensor: what a device's memory can do."""

    def __init__(self, problem: Problem, device: str) -> None:
        super().__init__(problem, device, {"aten copy": self._copied}, aten=["aten copy"], checked=False)
        self._copy: torch.Tensor | None = None

    def _copied(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._copy is None:
            self._copy = torch.empty_like(operands[0])
        return self._copy.copy_(operands[0])

    def close(self) -> None:
        super().close()
        self._copy = None


def _filled(operand: Operand, device: str, generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, operand.dtype)
    made = torch.empty_strided(operand.size, operand.stride, dtype=dtype, device=device)
    if dtype.is_floating_point:
        drawn = torch.randn(operand.size, generator=generator, device=device, dtype=torch.float32)
        return made.copy_(drawn)
    return made.copy_(torch.randint(0, 2, operand.size, generator=generator, device=device))
