"""The one candidate of a `copy` problem, which measures a device's memory bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..graph.results import numerics
from ..tuning.candidates import CandidateBuilds
from ..tuning.records import Problem


class CopyCandidates:
    """A copy of one tensor. It has no reference: nothing is computed."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.problem = problem
        self.device = device
        self.candidates = ["aten copy"]
        self.aten = [0]
        self._source = self._target = torch.empty(0)

    def begin_building(self) -> CandidateBuilds:
        return CandidateBuilds()

    def prepare(self, seed: int) -> None:
        (operand,) = self.problem.operands
        dtype = getattr(torch, operand.dtype)
        source = torch.empty_strided(operand.size, operand.stride, dtype=dtype, device=self.device)
        self._source = numerics.fill(source, torch.Generator(self.device).manual_seed(seed))
        self._target = torch.empty_like(source)

    def move(self, copy: int) -> bool:
        return False

    def reference(self) -> None:
        return None

    def run(self, index: int, body: Callable[[Callable[[], Any]], None]) -> torch.Tensor:
        body(lambda: self._target.copy_(self._source))
        return self._target

    def close(self) -> None:
        self._source = self._target = torch.empty(0)
