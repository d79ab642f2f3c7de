"""A team's lock file from end to end: measured by a service, exported, edited, and taken by compiles as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchrelay
from msgspec.structs import replace
from torchrelay.clients.backend import RelayBackend
from torchrelay.clients.gateway.admin_client import AdminClient
from torchrelay.clients.jobfiles import tuning_lock
from torchrelay.clients.settings import load_settings
from torchrelay.compiler.artifact import manifest
from torchrelay.compiler.errors import TuningUnknown
from torchrelay.compiler.tuning import records

Connect = Callable[..., RelayBackend]


def products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """One problem forward."""
    return torch.bmm(x, w).relu()


def compiled(width: int) -> manifest.Manifest:
    """What the service made of `products`; its result is checked."""
    torch.compiler.reset()
    torch.manual_seed(5)
    x, w = torch.randn(3, 40, 24), torch.randn(3, 24, width)
    result = torch.compile(products, backend="torchrelay", mode="max-autotune-no-cudagraphs")(x, w)
    torch.testing.assert_close(result, products(x, w))
    assert torchrelay.report().fallbacks == {}
    with AdminClient(load_settings()) as administration:
        return administration.cached(torchrelay.report().graphs[-1].key).manifest


def standing(width: int) -> records.TuningEntry:
    """The service's entry for the problem."""
    with AdminClient(load_settings()) as administration:
        entries = administration.tunings()
    (entry,) = [entry for entry in entries if entry.problem.result.size == (3, 40, width)]
    return entry


@pytest.fixture
def team(connect: Connect, tmp_path: Path) -> Callable[..., RelayBackend]:
    """A new client with an empty disk, in mode `require`, with the lock if there is one."""
    made = iter(range(100))
    file = tmp_path / "tuning.lock"

    def client(mode: str = "") -> RelayBackend:
        lock = {"TORCHRELAY_TUNING_LOCK": str(file), "TORCHRELAY_TUNING_LOCK_MODE": mode} if mode else {}
        disk = str(tmp_path / str(next(made)))
        return connect(TORCHRELAY_MODE="require", TORCHRELAY_CACHE_DIR=disk, **lock)

    return client


def test_a_reviewed_file_decides_whatever_was_measured(
    team: Callable[..., RelayBackend], tmp_path: Path
) -> None:
    team()
    first = compiled(72)
    assert (first.searched, first.recalled) == (1, 0)
    entry = standing(72)
    assert [measured.winner for measured in first.tuning] == [entry.winner.candidate]
    assert entry.runner_up is not None
    other = replace(entry, winner=entry.runner_up, runner_up=entry.winner)
    (tmp_path / "tuning.lock").write_text(tuning_lock.write([other]))
    for outcome in ("misses", "hits"):
        team("strict")
        pinned = compiled(72)
        assert (pinned.searched, pinned.recalled) == (0, 1)
        assert [measured.winner for measured in pinned.tuning] == [other.winner.candidate]
        assert getattr(torchrelay.report(), outcome) == 1
    assert standing(72) == entry  # a lock is nobody else's


def test_what_the_lock_lacks_is_an_error_or_is_measured(
    team: Callable[..., RelayBackend], tmp_path: Path
) -> None:
    team()
    compiled(80)
    (tmp_path / "tuning.lock").write_text(tuning_lock.write([standing(80)]))
    team("strict")
    with pytest.raises(TuningUnknown, match=r"f32\[3,40,88\].*tune export.*loose"):
        compiled(88)
    team("loose")
    found = compiled(88)
    assert (found.searched, found.recalled) == (1, 0)
    assert standing(88).candidates == 2


def test_what_was_measured_elsewhere_does_not_apply(
    team: Callable[..., RelayBackend], tmp_path: Path
) -> None:
    team()
    compiled(96)
    entry = standing(96)
    for change in ({"device": "another CPU"}, {"torch": "2.1.0"}, {"threads": 77}):
        stale = replace(entry, place=replace(entry.place, **change))
        (tmp_path / "tuning.lock").write_text(tuning_lock.write([stale]))
        team("strict")
        with pytest.raises(TuningUnknown, match="no winner for bmm"):
            compiled(96)
