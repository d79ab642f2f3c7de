"""Makes this rank's share of a dataset's batches. The global batches are the same for any number of ranks.

The order of samples, and each sample's random numbers, depend only on seed, epoch and position. A training that
continues from a checkpoint therefore sees the same data. A DataLoader reads, with worker processes if asked.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from ...compiler.errors import CheckpointError, SettingsError
from .checkpointing.random_states import host_random_states, set_random_states
from .metrics.loader_waits import process_loader_waits
from .rank_environment import load_rank

T = TypeVar("T")


class Batches(Generic[T]):
    """This rank's batches, of global_batch / ranks samples each, epoch after epoch, for ever or for so many epochs.

    dataset: with a length and an index. rank, ranks: of what shares the data; the process group's if not given (with
    tensor parallel ranks, those of the data-parallel dimension). transform: list of samples to batch; DataLoader's own
    if not given. loader: DataLoader's other options (num_workers, pin_memory, ...). Give it to `Checkpoints` as
    `loader`, and training goes on where it was, also with another number of ranks. Raises SettingsError.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        global_batch: int,
        *,
        seed: int = 0,
        epochs: int | None = None,
        shuffle: bool = True,
        rank: int | None = None,
        ranks: int | None = None,
        transform: Callable[[list[T]], Any] | None = None,
        **loader: Any,
    ) -> None:
        try:
            self._samples = len(dataset)  # type: ignore[arg-type]
        except TypeError:
            raise SettingsError(
                "train.batches needs a dataset with a length",
                hint="For a stream, use a loader with a state of its own, such as torchdata's StatefulDataLoader",
            ) from None
        self._rank, self._ranks = _place() if rank is None or ranks is None else (rank, ranks)
        if not 0 < global_batch <= self._samples or global_batch % self._ranks:
            raise SettingsError(
                f"a global batch of {global_batch} for {self._ranks} ranks and {self._samples} samples",
                hint="It must be a multiple of the ranks, and no larger than the dataset",
            )
        self._dataset, self._global_batch, self._seed, self._shuffle = dataset, global_batch, seed, shuffle
        self._epochs = epochs
        self._options = loader if transform is None else {**loader, "collate_fn": transform}
        self._position = 0

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch; samples that do not fill a last batch are left out."""
        return self._samples // self._global_batch

    @property
    def epoch(self) -> int:
        return self._position // (self.per_epoch * self._global_batch)

    @property
    def position(self) -> int:
        """Number of samples that all ranks together have been given."""
        return self._position

    def __len__(self) -> int:
        """Batches from now to the end. Raises TypeError if there is no end."""
        if self._epochs is None:
            raise TypeError("these batches have no end: say epochs=")
        return self._epochs * self.per_epoch - self._position // self._global_batch

    def __iter__(self) -> Iterator[Any]:
        """From the position on. A batch counts as given when it is asked for."""
        while self._epochs is None or self.epoch < self._epochs:
            done = self._position // self._global_batch % self.per_epoch
            yield from self._of_epoch(self.epoch, done)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "seed": self._seed, "samples": self._samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError for the state of other data or another order."""
        mine = self.state_dict()
        for name in ("seed", "samples"):
            if state[name] != mine[name]:
                raise CheckpointError(
                    f"the checkpoint's data had {name} {state[name]}, these have {mine[name]}"
                )
        if state["position"] % self._global_batch:
            raise CheckpointError(
                f"the checkpoint is after {state['position']} samples, no multiple of {self._global_batch}",
                hint="Continue with the global batch size that it was saved with",
            )
        self._position = state["position"]

    def _of_epoch(self, epoch: int, done: int) -> Iterator[Any]:
        shares = self._shares(epoch)[done:]
        # With a generator of its own: beginning again in the middle must not draw from the training's.
        options = {"generator": torch.Generator().manual_seed(_mixed(self._seed, epoch)), **self._options}
        loader: DataLoader[Any] = DataLoader(
            _Drawn(self._dataset, self._seed, epoch), batch_sampler=shares, **options
        )
        iterator, waits = iter(loader), process_loader_waits()
        for _ in shares:
            begun = time.perf_counter()
            batch = next(iterator)
            if not waits.watching:
                waits.add(time.perf_counter() - begun)
            waits.add(0.0, self._global_batch // self._ranks)
            self._position += self._global_batch
            yield batch

    def _shares(self, epoch: int) -> list[list[int]]:
        order = torch.arange(self._samples)
        if self._shuffle:
            draw = torch.Generator().manual_seed(_mixed(self._seed, epoch))
            order = torch.randperm(self._samples, generator=draw)
        whole = order[: self.per_epoch * self._global_batch].view(self.per_epoch, self._ranks, -1)
        return [share.tolist() for share in whole[:, self._rank]]


class _Drawn(Dataset[Any]):
    """A dataset whose samples draw at random by seed, epoch and index, wherever they are read."""

    def __init__(self, inner: Dataset[Any], seed: int, epoch: int) -> None:
        self._inner, self._seed, self._epoch = inner, seed, epoch

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        before = host_random_states()
        try:
            return [self._sample(index, numpy="numpy" in before) for index in indices]
        finally:
            set_random_states(before)

    def _sample(self, index: int, *, numpy: bool) -> Any:
        seed = _mixed(self._seed, self._epoch, index)
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if numpy:
            sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
        return self._inner[index]


def _mixed(*numbers: int) -> int:
    """63 bits that any of the numbers changes."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()) >> 1


def _place() -> tuple[int, int]:
    """(rank, ranks) of this process: from its process group, or else from its launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank = load_rank()
    return rank.rank, rank.world_size


batches = Batches
