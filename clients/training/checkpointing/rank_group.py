"""Exchanges values and errors between the ranks that save or restore checkpoints together."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ....compiler.errors import CheckpointError
from ..distributed.shutdown import wait_for_gloo_threads

T = TypeVar("T")


class RankGroup:
    """All ranks, with a gloo group for checkpoints only. A process without process groups is one rank of one."""

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized()
        self.group: Any = dist.new_group(backend="gloo") if several else None
        if several:
            atexit.register(wait_for_gloo_threads)  # under torchrun too
        self.rank = dist.get_rank() if several else 0
        self.size = dist.get_world_size() if several else 1

    def gathered(self, mine: T) -> list[T]:
        """The values of all ranks, by rank. Raises RuntimeError if a rank is gone."""
        if self.group is None:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def of_first(self, mine: T) -> T:
        """The value of rank 0."""
        if self.group is None:
            return mine
        found = [mine]
        dist.broadcast_object_list(found, src=0, group=self.group)
        return found[0]

    def of_first_or_raise(self, make: Callable[[], T]) -> T:
        """The result of `make` in rank 0. If that fails, raises CheckpointError in all ranks."""
        value, problem = attempt(make) if self.rank == 0 else (None, "")
        found = self.of_first((value, problem))
        if found[1]:
            raise CheckpointError(found[1])
        return found[0]  # type: ignore[return-value]


def attempt(make: Callable[[], T]) -> tuple[T | None, str]:
    """(result, ''), or (None, the error in one line), which can be sent to the other ranks."""
    try:
        return make(), ""
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        return None, error_line(error)


def error_line(error: BaseException) -> str:
    """The error in one line. Of torch.distributed.checkpoint's: the first rank that failed, and why."""
    if isinstance(error, CheckpointException):
        for rank, (cause, _) in error.failures.items():
            return f"rank {rank}: {error_line(cause)}"
    if isinstance(error, CheckpointError):
        return error.message
    return (" ".join(str(error).split()) or type(error).__name__)[:500]
