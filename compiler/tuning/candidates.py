"""What a kernel search needs of an operator's candidates, and of their being built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from .records import Problem

if TYPE_CHECKING:
    import torch


class CandidateBuilds:
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
    """An operator and its candidates; torch_internals/algorithm_selection has Inductor's.

    device: `cpu` or `cuda`. candidates: the text of each, no two alike. aten: those that are PyTorch's own kernels.
    """

    device: str
    candidates: list[str]
    aten: list[int]
    problem: Problem

    def begin_building(self) -> CandidateBuilds:
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
