"""The ranks that share checkpoints: what one of them has or fails at reaches all."""

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
    """The ranks that share checkpoints, over a gloo group of their own; a process on its own is one rank."""

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized()
        self.group: Any = dist.new_group(backend="gloo") if several else None
        if several:
            atexit.register(wait_for_gloo_threads)  # under torchrun too
        self.rank = dist.get_rank() if several else 0
        self.size = dist.get_world_size() if several else 1

    def gathered(self, mine: T) -> list[T]:
        """Every rank's, in their order. Raises RuntimeError if one is gone."""
        if self.group is None:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def of_first(self, mine: T) -> T:
        if self.group is None:
            return mine
        found = [mine]
        dist.broadcast_object_list(found, src=0, group=self.group)
        return found[0]

    def of_first_or_raise(self, make: Callable[[], T]) -> T:
        """What `make` gives in rank 0; its CheckpointError in all."""
        value, problem = attempt(make) if self.rank == 0 else (None, "")
        found = self.of_first((value, problem))
        if found[1]:
            raise CheckpointError(found[1])
        return found[0]  # type: ignore[return-value]


def attempt(make: Callable[[], T]) -> tuple[T | None, str]:
    """(what it gives, '') or (None, why not): one rank's failure must reach all of them."""
    try:
        return make(), ""
    except CheckpointException as error:  # torch.distributed.checkpoint's; it is no Exception
        first = next(iter(error.failures.items()), None)
        return None, f"rank {first[0]}: {error_line(first[1][0])}" if first else error_line(error)
    except CheckpointError as error:
        return None, error.message
    except Exception as error:
        return None, error_line(error)


def error_line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:500]


def raising(error: BaseException) -> Callable[[], None]:
    def again() -> None:
        raise error

    return again
