"""Checkpoints of several ranks, which are killed, stopped, fewer or more, or have no room: real processes over gloo."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from torchrelay.compiler.api.training.events import CheckpointEvent, FirstStep, StepMetrics
from torchrelay.compiler.api.training.rank_environment import STOPPED_CODE
from train_parts import HERE, OTHER, SECONDS, RankProcess, finish, results, signal, start
from waiting import wait_until

STEADY = HERE / "steady.py"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(start(STEADY, [str(folder)], ranks=2))
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained by two FSDP2 ranks, without dropout."""
    folder = tmp_path_factory.mktemp("sharded")
    finish(start(STEADY, [str(folder), "--way", "fsdp", "--dropout", "0"], ranks=2))
    return folder


def kept(rank: RankProcess) -> list[str]:
    return [told.name for told in rank.told(CheckpointEvent) if told.kept]


def test_a_killed_rank_costs_no_digit_of_the_final_loss(undisturbed: Path, tmp_path: Path) -> None:
    killed = start(STEADY, [str(tmp_path), "--kill", "10"], ranks=2)
    killed[1].wait()
    finish(killed, OTHER, -signal.SIGKILL)
    assert not list(tmp_path.glob("result-*"))
    again = start(STEADY, [str(tmp_path), "--kill", "10"], ranks=2, attempt=1)
    finish(again)
    for mine, theirs in zip(results(tmp_path, 2), results(undisturbed, 2), strict=True):
        assert mine["found"] == 8
        assert mine["losses"] == {step: theirs["losses"][step] for step in ("8", "9", "10", "11")}
        assert mine["weights"] == theirs["weights"]
    assert again[0].told(FirstStep)[0].attempt == 1
    assert min(told.step for told in again[0].told(StepMetrics)) == 8


def test_what_is_written_beside_the_training_is_the_step_s_own(sharded: Path, tmp_path: Path) -> None:
    shutil.copytree(sharded / "checkpoints", tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints" / "step-12")
    finish(start(STEADY, [str(tmp_path), "--way", "fsdp", "--dropout", "0"], ranks=2))
    for mine, theirs in zip(results(tmp_path, 2), results(sharded, 2), strict=True):
        assert mine["found"] == 8  # which was written while steps 8 to 11 were taken
        assert mine["weights"] == theirs["weights"]


def test_what_two_ranks_saved_one_and_four_take_up(sharded: Path, tmp_path: Path) -> None:
    saved = results(sharded, 2)[0]
    for ranks, way in ((1, "single"), (4, "fsdp")):
        folder = tmp_path / way
        shutil.copytree(sharded / "checkpoints", folder / "checkpoints")
        finish(start(STEADY, [str(folder), "--way", way, "--dropout", "0", "--steps", "16"], ranks=ranks))
        for found in results(folder, ranks):
            assert found["found"] == 12
            assert found["begun_with"] == saved["weights"]
    # The mean over the ranks' equal shares is what one process computes; float32 sums in another order.
    one = results(tmp_path / "single", 1)[0]["losses"]
    four = [found["losses"] for found in results(tmp_path / "fsdp", 4)]
    for step in ("12", "13", "14", "15"):
        assert sum(losses[step] for losses in four) / 4 == pytest.approx(one[step], rel=1e-5)


def test_ranks_asked_to_end_save_at_the_same_step_and_go_on_from_there(
    undisturbed: Path, tmp_path: Path
) -> None:
    asked = start(STEADY, [str(tmp_path), "--stop", "5"], ranks=2)
    for rank in (0, 1):
        wait_until((tmp_path / f"there-{rank}").exists, SECONDS)
    asked[1].process.send_signal(signal.SIGTERM)  # one of them: it asks the others
    (tmp_path / "asked").touch()
    finish(asked, STOPPED_CODE, STOPPED_CODE)
    (last,) = {max(map(int, found["losses"])) for found in results(tmp_path, 2)}
    assert last < 11
    assert kept(asked[0])[-1] == f"step-{last + 1}"
    finish(start(STEADY, [str(tmp_path), "--stop", "5"], ranks=2))
    for mine, theirs in zip(results(tmp_path, 2), results(undisturbed, 2), strict=True):
        assert mine["found"] == last + 1
        assert mine["weights"] == theirs["weights"]


def test_a_full_disk_of_one_rank_fails_the_checkpoint_and_not_the_training(
    undisturbed: Path, tmp_path: Path
) -> None:
    ranks = start(STEADY, [str(tmp_path), "--full-disk", "1"], ranks=2)
    finish(ranks)
    told = ranks[0].told(CheckpointEvent)
    assert [each.step for each in told] == [4, 8, 12]
    assert not any(each.kept for each in told) and all("rank 1" in each.detail for each in told)
    assert not list((tmp_path / "checkpoints").glob("*"))
    assert results(tmp_path, 2)[0]["weights"] == results(undisturbed, 2)[0]["weights"]


@pytest.mark.slow
def test_ranks_without_a_common_folder_keep_theirs_in_a_store(
    bucket: str, sharded: Path, tmp_path: Path
) -> None:
    common = ["--way", "fsdp", "--dropout", "0", "--place", bucket]
    parted = start(STEADY, [str(tmp_path), *common, "--steps", "8"], ranks=2)
    finish(parted)
    assert kept(parted[0]) == ["step-4", "step-8"]
    finish(start(STEADY, [str(tmp_path), *common], ranks=2))
    for mine, theirs in zip(results(tmp_path, 2), results(sharded, 2), strict=True):
        assert mine["found"] == 8
        assert mine["weights"] == theirs["weights"]


@pytest.mark.slow
def test_zero_s_state_is_taken_up_by_another_number_of_ranks(tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    common = ["--optimizer", "zero", "--dropout", "0"]
    finish(start(STEADY, [str(whole), *common], ranks=2))
    finish(start(STEADY, [str(parted), *common, "--steps", "8"], ranks=2))
    finish(start(STEADY, [str(parted), *common], ranks=2))
    assert results(parted, 2)[0]["found"] == 8
    assert results(parted, 2)[0]["weights"] == results(whole, 2)[0]["weights"]
    shutil.rmtree(parted / "checkpoints" / "step-12")
    finish(start(STEADY, [str(parted), *common], ranks=4))
    four = [found["losses"]["11"] for found in results(parted, 4)]
    two = [found["losses"]["11"] for found in results(whole, 2)]
    assert sum(four) / 4 == pytest.approx(sum(two) / 2, rel=1e-5)
