"""The order of batches: the same samples for any number of ranks, worker processes and restarts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchrelay import train
from torchrelay.clients.training.metrics.loader_waits import LoaderWaits
from torchrelay.compiler.errors import CheckpointError, SettingsError


class Noisy(Dataset[Any]):
    """Numbers, each with what it drew at random."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return index, random.random(), float(torch.rand(()))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def drawn(batch: Any) -> list[tuple[int, float, float]]:
    return [(int(index), float(a), float(b)) for index, a, b in zip(*batch, strict=True)]


def of_ranks(ranks: int, **options: Any) -> list[list[tuple[int, float, float]]]:
    """Global batches, put together from the ranks' shares."""
    shares = [
        list(train.batches(Noisy(22), 4, epochs=2, rank=rank, ranks=ranks, **options))
        for rank in range(ranks)
    ]
    return [[sample for share in batch for sample in drawn(share)] for batch in zip(*shares, strict=True)]


def test_any_number_of_ranks_and_workers_sees_what_one_process_sees() -> None:
    alone = of_ranks(1)
    assert len(alone) == 10
    assert of_ranks(2) == alone
    assert of_ranks(4) == alone
    assert of_ranks(1, num_workers=2) == alone


def test_an_epoch_holds_each_sample_once_and_the_next_has_another_order() -> None:
    indices = [index for batch in of_ranks(1) for index, *_ in batch]
    first, second = indices[:20], indices[20:]
    assert len(set(first)) == len(first) == 20
    assert first != second
    assert [index for batch in of_ranks(1, seed=1) for index, *_ in batch][:20] != first
    unshuffled = train.batches(Noisy(8), 4, epochs=1, shuffle=False, rank=0, ranks=1)
    assert [drawn(batch)[0][0] for batch in unshuffled] == [0, 4]


def test_a_position_is_taken_up_by_another_number_of_ranks() -> None:
    alone = of_ranks(1)
    one = train.batches(Noisy(22), 4, epochs=2, rank=0, ranks=1)
    iterator = iter(one)
    for _ in range(7):
        next(iterator)
    assert (one.position, one.epoch, len(one)) == (28, 1, 3)
    state = one.state_dict()
    halves = []
    for rank in range(2):
        half = train.batches(Noisy(22), 4, epochs=2, rank=rank, ranks=2)
        half.load_state_dict(state)
        halves.append([drawn(batch) for batch in half])
    assert [a + b for a, b in zip(*halves, strict=True)] == alone[7:]


def test_reading_ahead_in_workers_does_not_move_the_position() -> None:
    batches = train.batches(Noisy(22), 4, epochs=2, rank=0, ranks=1, num_workers=2, prefetch_factor=2)
    iterator = iter(batches)
    next(iterator)
    assert batches.position == 4
    del iterator


def test_reading_draws_nothing_from_the_training_s_random_numbers() -> None:
    torch.manual_seed(7)
    random.seed(7)
    wanted = torch.rand(3), random.random()
    torch.manual_seed(7)
    random.seed(7)
    for _ in zip(range(6), train.batches(Noisy(22), 4, rank=0, ranks=1), strict=False):
        pass
    assert torch.equal(torch.rand(3), wanted[0]) and random.random() == wanted[1]


@pytest.mark.parametrize("global_batch", [0, 3, 24])
def test_a_batch_that_cannot_be_shared_is_refused(global_batch: int) -> None:
    with pytest.raises(SettingsError, match="global batch"):
        train.batches(Noisy(22), global_batch, rank=0, ranks=2)


def test_a_stream_is_refused_with_what_to_use() -> None:
    with pytest.raises(SettingsError, match="StatefulDataLoader"):
        train.batches(Endless(), 2, rank=0, ranks=1)


@pytest.mark.parametrize(("size", "seed", "batch"), [(23, 0, 4), (22, 1, 4), (22, 0, 8)])
def test_the_position_of_other_data_or_another_order_is_refused(size: int, seed: int, batch: int) -> None:
    batches = train.batches(Noisy(22), 4, rank=0, ranks=1)
    next(iter(batches))
    with pytest.raises(CheckpointError, match="the checkpoint"):
        train.batches(Noisy(size), batch, seed=seed, rank=0, ranks=1).load_state_dict(batches.state_dict())


def test_waiting_for_any_loader_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)  # put back afterwards
    waits = LoaderWaits()
    assert waits.taken() is None
    waits.watch_loaders()
    waits.watch_loaders()
    assert len(list(DataLoader(Noisy(6), batch_size=2))) == 3
    taken = waits.taken()
    assert taken is not None and taken[0] > 0
    assert waits.taken() == (0.0, 0)
