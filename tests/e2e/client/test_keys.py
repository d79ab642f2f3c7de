"""Signing keys that come and go while scripts train: a whole service, and clients that know only its first key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_commands import torchrelay, train
from torchrelay.examples.harness.private_service import PrivateService


@pytest.fixture
def own_service(tmp_path: Path) -> Iterator[PrivateService]:
    """One whose keys may change: the other tests' service stays as it is."""
    with PrivateService(tmp_path / "s") as running:
        yield running


@pytest.mark.slow
def test_scripts_train_on_through_a_rotation_a_revocation_and_a_new_epoch(
    own_service: PrivateService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    monkeypatch.setenv("TORCHRELAY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TORCHRELAY_PREFETCH", "0")  # it would bring the news before a script asks

    def outcome(cache: Path, salt: float) -> str:
        run = train(own_service, cache, salt)
        assert (run["error"], run["fallbacks"]) == ("", {})
        (found,) = [name for name in ("disk_hits", "hits", "misses") if run[name]]
        return found

    def keys(*arguments: str) -> str:
        done = torchrelay(own_service, "keys", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert [outcome(here, 1), outcome(here, 1)] == ["misses", "disk_hits"]
    first = json.loads(keys("ls", "--json"))["current"]
    keys("rotate")
    assert outcome(there, 1) == "hits"  # under the first key, which counts still
    assert outcome(here, 2) == "misses"  # signed by the second, of which the credentials know nothing
    keys("revoke", first)
    assert outcome(there, 3) == "misses"  # and this answer brought the news
    assert outcome(here, 1) == "misses"  # neither this machine's copy nor the service's counts any more
    assert [outcome(here, 1), outcome(here, 2)] == ["disk_hits", "disk_hits"]
    keys("disown", "--yes")
    assert outcome(there, 3) in ("disk_hits", "misses")  # a copy on disk, until the news is there
    assert outcome(here, 4) == "misses"
    assert [outcome(here, 2), outcome(there, 2)] == ["misses", "hits"]
    assert torchrelay(own_service, "doctor").returncode == 0
    monkeypatch.setenv("TORCHRELAY_STATE_DIR", str(tmp_path / "somebody else's"))
    doctor = torchrelay(own_service, "doctor")
    assert (doctor.returncode, "torchrelay login" in doctor.stdout) == (
        1,
        True,
    )  # knows the revoked key alone
