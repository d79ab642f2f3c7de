"""What a kernel search needs from an operator's candidates: to build and to run them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from .records import Problem

if TYPE_CHECKING:
    import torch


class CandidateBuilds:
    """Candidates that are being compiled.

    futures: the compiles in other processes or threads. finish: waits for them and takes over what they built; returns
    the candidates that do not compile, and why.
    """

    def __init__(
        self, futures: Sequence[Future[Any]] = (), finish: Callable[[], Mapping[int, str]] = dict
    ) -> None:
        self.futures = list(futures)
        self.wait = finish

    def left(self) -> int:
        """How many are not compiled yet."""
        return sum(not future.done() for future in self.futures)


class RunnableCandidates(abc.ABC):
    """Candidates that can be run, by position."""

    def move(self, copy: int) -> bool:
        """Have `run` use this copy of the inputs (0: the first), which is made at its first use. False: there is no
        other copy than the first."""
        return False

    @abc.abstractmethod
    def run(self, index: int, body: Callable[[Callable[[], Any]], None]) -> torch.Tensor:
        """Prepare a candidate on the inputs and call body(once), where once() runs it; returns its last result."""


class Candidates(RunnableCandidates):
    """An operator and its candidates; torch_internals/algorithm_selection has Inductor's.

    device: `cpu` or `cuda`. candidates: their texts, all different. aten: positions of PyTorch's own kernels.
    """

    device: str
    candidates: list[str]
    aten: list[int]
    problem: Problem

    def begin_building(self) -> CandidateBuilds:
        """Start to compile them."""
        return CandidateBuilds()

    @abc.abstractmethod
    def prepare(self, seed: int) -> None:
        """Make the example inputs."""

    def reference(self) -> torch.Tensor | None:
        """The result in float64, if it can be computed."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Release inputs and whatever was loaded to run candidates."""
