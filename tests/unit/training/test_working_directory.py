"""A job's working directory on a node: whole for whoever runs there, whenever the one before was killed."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

import pytest
from torchrelay.compiler.api.training import working_directory
from torchrelay.workers.training.ranks import working_directory as rank_directory
from torchrelay.workers.training.ranks.working_directory import WorkingDirectory


class Killed(BaseException):
    """As far as a process came that was killed."""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("pass")
    return working_directory.pack(source, ["train.py"])


def half_removed(path: Path, **_: object) -> None:
    for child in Path(path).rglob("train.py"):
        child.unlink()
    raise Killed


@pytest.mark.parametrize("other", [False, True])
def test_a_folder_of_which_a_part_was_removed_is_not_whole(
    package: bytes, other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its last rank, which Ray kills as soon as it has told its end; or by another job's, which tidies."""
    job = secrets.token_hex(8)
    first = WorkingDirectory.open(job, lambda: package)
    with monkeypatch.context() as patch:
        patch.setattr(rank_directory.shutil, "rmtree", half_removed)
        with pytest.raises(Killed):
            if other:
                os.close(first.lock)
                WorkingDirectory.open(secrets.token_hex(8), lambda: package)
            else:
                first.close()
    if not other:
        os.close(first.lock)  # as the kernel does for the dead
    assert not (first.path / "train.py").exists()
    second = WorkingDirectory.open(job, lambda: package)
    assert (second.path / "train.py").exists()
    second.close()
    assert not second.path.exists()


def test_ranks_of_a_node_share_it_and_the_last_one_removes_it(package: bytes) -> None:
    job = secrets.token_hex(8)
    first, second = WorkingDirectory.open(job, lambda: package), WorkingDirectory.open(job, lambda: b"")
    assert first.path == second.path
    first.close()
    assert (second.path / "train.py").exists()
    second.close()
    assert not second.path.exists()
    shutil.rmtree(second.path.parent, ignore_errors=True)
