"""Stage 8: what a search needs of an operator's candidates, and candidates that are plain functions of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from .tuning import Operand, Problem


class Building:
    """Candidates that are being compiled.

    futures: of what other processes or threads compile. finish: takes it over once they have; says which do not
    compile, and why.
    """

    def __init__(
        self, futures: Sequence[Future[Any]] = (), finish: Callable[[], Mapping[int, str]] = dict
    ) -> None:
        self.futures = list(futures)
        self.wait = finish

    def left(self) -> int:
        """How many are not compiled yet."""
        return sum(not future.done() for future in self.futures)


class Candidates(Protocol):
    """An operator and its candidates; torch_internals.Selection is Inductor's.

    device: `cpu` or `cuda`. candidates: the text of each, no two alike. aten: those that are PyTorch's own kernels.
    """

    device: str
    candidates: list[str]
    aten: list[int]
    problem: Problem

    def begin_building(self) -> Building:
        """Have them compiled."""

    def prepare(self, seed: int) -> None:
        """Make the example inputs."""

    def move(self, place: int) -> bool:
        """Have `run` find the inputs in other memory, the same each time for a place (0: where they were made), until
        they are moved again or closed. False: they stay where they are."""

    def reference(self) -> torch.Tensor | None:
        """The result in float64; None where there is none."""

    def run(self, index: int, body: Callable[[Callable[[], Any]], None]) -> torch.Tensor:
        """Have a candidate get ready on the inputs and call body(once), where once() runs it; what it computed last."""

    def close(self) -> None:
        """Let go of inputs and of what was loaded to run candidates."""


class Plain:
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

    def begin_building(self) -> Building:
        return Building()

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


class Copying(Plain):
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
