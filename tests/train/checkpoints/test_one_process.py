"""Checkpoints of one process: whole or not there, in a folder and in S3 (moto's server on loopback)."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrelay import train
from torchrelay.clients.training.checkpointing import checkpoints as module
from torchrelay.clients.training.checkpointing import storage
from torchrelay.clients.training.metrics.reporter import MetricsReporter
from torchrelay.compiler.api.training.events import CheckpointEvent
from torchrelay.compiler.errors import CheckpointError, SettingsError
from train_parts import free_port


class Heard(train.Callback):
    def __init__(self) -> None:
        self.checkpoints: list[CheckpointEvent] = []
        self.notes: list[str] = []

    def on_checkpoint(self, checkpoint: CheckpointEvent) -> None:
        self.checkpoints.append(checkpoint)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """What this process itself has told, without what other tests added."""
    from torchrelay.clients.training.metrics.channel import RankChannel
    from torchrelay.clients.training.metrics.loader_waits import LoaderWaits
    from torchrelay.clients.training.metrics.optimizer_steps import OptimizerSteps
    from torchrelay.clients.training.rank_environment import RankEnvironment

    listener = Heard()
    telling = MetricsReporter(RankEnvironment(), RankChannel(-1), OptimizerSteps(), LoaderWaits())
    telling.add_callback(listener)
    telling.note = lambda level, text: listener.notes.append(text)  # type: ignore[method-assign]
    monkeypatch.setattr(module, "process_reporter", lambda: telling)
    return listener


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def saved(place: Any, *steps: int, keep: int = 3) -> dict[int, torch.Tensor]:
    """Each step's weights."""
    weights = {}
    with train.Checkpoints(place, keep=keep) as checkpoints:
        for step in steps:
            model, optimizer = made(step)
            checkpoints.save(step, model, optimizer)
            weights[step] = model.weight.detach().clone()
            with torch.no_grad():
                model.weight.fill_(0.0)  # while it is being written
    return weights


def restored(place: Any) -> tuple[int | None, torch.Tensor]:
    model, optimizer = made(0)
    step = train.Checkpoints(place).restore(model, optimizer)
    return step, model.weight.detach()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_taken_up_and_the_last_ones_are_kept(tmp_path: Path, heard: Heard) -> None:
    weights = saved(tmp_path, 2, 4, 10, keep=2)
    assert names(tmp_path) == ["step-10", "step-4"]
    step, found = restored(tmp_path)
    assert step == 10 and torch.equal(found, weights[10])
    assert [(each.step, each.name, each.kept) for each in heard.checkpoints] == [
        (2, "step-2", True),
        (4, "step-4", True),
        (10, "step-10", True),
    ]
    assert all(each.bytes > 500 for each in heard.checkpoints)


def test_where_nothing_was_saved_nothing_is_taken_up(tmp_path: Path) -> None:
    assert restored(tmp_path / "none")[0] is None


def shorten(folder: Path) -> None:
    path = next(folder.glob("__0_*"))
    path.write_bytes(path.read_bytes()[:-10])


def flip(folder: Path) -> None:
    path = next(folder.glob("__0_*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lose(folder: Path) -> None:
    (folder / "rank-0.pt").unlink()


def garble(folder: Path) -> None:
    (folder / "whole.json").write_text("{")


@pytest.mark.parametrize("damage", [shorten, flip, lose, garble])
def test_a_damaged_checkpoint_is_skipped_and_told_of(
    damage: Callable[[Path], None], tmp_path: Path, heard: Heard
) -> None:
    weights = saved(tmp_path, 1, 2)
    damage(tmp_path / "step-2")
    step, found = restored(tmp_path)
    assert step == 1 and torch.equal(found, weights[1])
    assert len(heard.notes) == 1 and "step-2 is damaged" in heard.notes[0]
    again = saved(tmp_path, 2)
    assert torch.equal(restored(tmp_path)[1], again[2])  # in the damaged one's place


def test_where_all_are_damaged_training_does_not_begin_anew_by_itself(tmp_path: Path, heard: Heard) -> None:
    saved(tmp_path, 1)
    lose(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match="all 1 checkpoints"):
        restored(tmp_path)


def test_the_newest_is_kept_though_a_damaged_one_has_a_higher_number(tmp_path: Path, heard: Heard) -> None:
    saved(tmp_path, 1, 8)
    shorten(tmp_path / "step-8")
    assert restored(tmp_path)[0] == 1
    weights = saved(tmp_path, 2, 4, keep=1)
    step, found = restored(tmp_path)
    assert step == 4 and torch.equal(found, weights[4])
    assert names(tmp_path) == ["step-4", "step-8"]


def raise_where_one_is_replaced(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    whole = Path.rename

    def rename(path: Path, to: Path) -> Path:
        if path.name == "step-1.partial":
            raise error
        return whole(path, to)

    patch.setattr(Path, "rename", rename)


def test_one_that_cannot_be_replaced_stays(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = saved(tmp_path, 1)

    with monkeypatch.context() as patched:
        raise_where_one_is_replaced(patched, OSError(28, "No space left on device"))
        saved(tmp_path, 1)
    assert [each.kept for each in heard.checkpoints] == [True, False]
    assert names(tmp_path) == ["step-1"]
    assert torch.equal(restored(tmp_path)[1], weights[1])
    weights = saved(tmp_path, 1)
    assert names(tmp_path) == ["step-1"]
    assert torch.equal(restored(tmp_path)[1], weights[1])


def test_a_process_that_ends_as_it_replaces_one_leaves_the_old_one(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = saved(tmp_path, 1)
    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        raise_where_one_is_replaced(patched, SystemExit())
        saved(tmp_path, 1)
    assert torch.equal(restored(tmp_path)[1], weights[1])
    more = saved(tmp_path, 2)
    assert names(tmp_path) == ["step-1", "step-2"]
    assert torch.equal(restored(tmp_path)[1], more[2])
    shutil.rmtree(tmp_path / "step-2")
    assert torch.equal(restored(tmp_path)[1], weights[1])


def test_what_was_begun_and_never_finished_is_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-2.partial")
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-3")
    (tmp_path / "step-3" / "whole.json").unlink()  # half deleted
    assert restored(tmp_path)[0] == 1
    assert "step-2.partial" in names(tmp_path)  # who only reads leaves alone what another may be writing
    saved(tmp_path, 4)
    assert "step-2.partial" not in names(tmp_path)


def test_another_model_s_checkpoint_is_named_as_that(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(CheckpointError, match=r"no '0\.(weight|bias)'"):
        train.Checkpoints(tmp_path).restore(model)


def test_a_full_disk_fails_that_checkpoint_and_the_next_is_whole(tmp_path: Path, heard: Heard) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        saved(tmp_path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [each.kept for each in heard.checkpoints] == [False] and heard.checkpoints[0].detail
    assert names(tmp_path) == []
    saved(tmp_path, 2)
    assert names(tmp_path) == ["step-2"] and heard.checkpoints[-1].kept


def test_no_place_is_an_error_that_says_where_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHRELAY_TRAIN_CHECKPOINTS", raising=False)
    with pytest.raises(SettingsError, match="no place for checkpoints"):
        train.Checkpoints()


def test_the_capture_run_reads_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1)
    monkeypatch.setenv("TORCHRELAY_TRAIN_CAPTURE", "1")
    assert restored(tmp_path)[0] is None
    saved(tmp_path, 2)
    assert names(tmp_path) == ["step-1"]


# --- an object store -----------------------------------------------------------------------------------------


def test_in_a_store_too_the_newest_whole_one_is_taken_up(bucket: str, heard: Heard) -> None:
    weights = saved(bucket, 1, 2, 3, keep=2)
    assert [each.kept for each in heard.checkpoints] == [True] * 3
    place = storage.storage_of(bucket)
    assert place.names() == ["step-3", "step-2"]
    step, found = restored(bucket)
    assert step == 3 and torch.equal(found, weights[3])
    store = place.objects  # type: ignore[attr-defined]
    (part,) = [path for path in paths(store) if path.startswith("step-3/__0_")]
    store.put(part, b"cut off")
    store.put("step-4/__0_0.distcp", b"never finished")
    step, found = restored(bucket)
    assert step == 2 and torch.equal(found, weights[2])
    assert "step-3 is damaged" in heard.notes[0]
    assert "step-4/__0_0.distcp" in paths(store)
    saved(bucket, 5)
    assert not any(path.startswith("step-4/") for path in paths(store))


def test_in_a_store_too_a_process_that_ends_as_it_replaces_one_leaves_the_old_one(
    bucket: str, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: object) -> None:
        raise SystemExit

    def replaced() -> torch.Tensor:
        model, optimizer = made(2)
        with train.Checkpoints(bucket) as checkpoints:
            checkpoints.save(1, model, optimizer)
        return model.weight.detach()

    weights = saved(bucket, 1)
    store = storage.storage_of(bucket).objects  # type: ignore[attr-defined]
    before = paths(store)
    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(storage.ObjectStorage, "publish", ends)
        replaced()
    assert torch.equal(restored(bucket)[1], weights[1])
    assert len(paths(store)) > len(before)  # the new files are there, too
    new = replaced()
    assert torch.equal(restored(bucket)[1], new) and not torch.equal(new, weights[1])
    assert len(paths(store)) == len(before)


def paths(store: Any) -> list[str]:
    return [entry["path"] for batch in store.list() for entry in batch]


def test_a_store_that_cannot_be_reached_fails_the_checkpoint_alone(
    bucket: str, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = saved(bucket, 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    saved(bucket, 2)
    assert [each.kept for each in heard.checkpoints] == [True, False]
    assert "could not be" in heard.checkpoints[1].detail
    with pytest.raises(CheckpointError, match="could not be read"):
        restored(bucket)  # to begin anew would be to lose what is there
    monkeypatch.undo()
    assert weights
