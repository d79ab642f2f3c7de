"""Which folders of training jobs go, by age, by size, and by who needs them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torchrelay.compiler.api.training.jobs import TrainJob, TrainSpec
from torchrelay.service.jobs.training.retention import remove_old, resumable

DAY = 86400.0


def folder(parent: Path, number: int, *, days: float, size: int = 10) -> Path:
    """Of job `number`, last written to so many days ago."""
    made = parent / f"{number:016x}"
    (made / "checkpoints").mkdir(parents=True)
    (made / "checkpoints" / "data").write_bytes(bytes(size))
    for path in (made / "checkpoints" / "data", made / "checkpoints", made):
        os.utime(path, (time.time() - days * DAY,) * 2)
    return made


def job(number: int, state: Any = "failed", **fields: Any) -> TrainJob:
    spec = TrainSpec(name="a job", script="train.py", **fields)
    return TrainJob(id=f"{number:016x}", spec=spec, state=state, by="ada", created=1.0)


def names(paths: list[Path]) -> list[int]:
    return [int(path.name, 16) for path in paths]


def test_what_is_old_goes(tmp_path: Path) -> None:
    for number, days in enumerate((31, 29, 0)):
        folder(tmp_path, number, days=days)
    assert names(remove_old(tmp_path, {tmp_path: []}, seconds=30 * DAY, limit=0)) == [0]
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["1", "2"]
    assert remove_old(tmp_path, {}, seconds=0, limit=0) == []


def test_the_oldest_go_while_there_is_too_much(tmp_path: Path) -> None:
    for number in range(4):
        folder(tmp_path, number, days=10 - number, size=100)
    assert names(remove_old(tmp_path, {}, seconds=0, limit=250)) == [0, 1]


def test_a_gateway_that_stops_waits_for_no_large_tree(tmp_path: Path) -> None:
    for number in range(4):
        folder(tmp_path, number, days=40)
    asked = iter([False] * 5)
    gone = remove_old(tmp_path, {}, seconds=DAY, limit=0, stopping=lambda: next(asked, True))
    assert len(gone) == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_that_was_written_to_keeps_the_folder_young(tmp_path: Path) -> None:
    made = folder(tmp_path, 1, days=40)
    os.utime(made / "checkpoints" / "data")
    assert remove_old(tmp_path, {}, seconds=30 * DAY, limit=1) == []


def test_jobs_that_run_or_can_be_resumed_keep_theirs_and_what_they_read(tmp_path: Path) -> None:
    for number in range(6):
        folder(tmp_path, number, days=40)
    jobs = [
        job(0, "running"),
        job(1, "cancelled"),
        job(2, "done", checkpoints="/x/0000000000000003"),
        job(9, "waiting", arguments=["--from", f"{tmp_path}/0000000000000004/checkpoints"]),
    ]
    assert names(remove_old(tmp_path, {tmp_path: resumable(jobs)}, seconds=30 * DAY, limit=1)) == [2, 3, 5]


def test_a_job_that_no_driver_has_ended_is_not_removed_for_its_size(tmp_path: Path) -> None:
    made = folder(tmp_path, 1, days=2)
    (made / "order.msgpack").touch()
    for path in (made / "order.msgpack", made):
        os.utime(path, (time.time() - 2 * DAY,) * 2)
    assert remove_old(tmp_path, {}, seconds=30 * DAY, limit=1) == []
    assert names(remove_old(tmp_path, {}, seconds=DAY, limit=1)) == [1]


def test_namespaces_are_apart_and_what_is_nobodys_stays(tmp_path: Path) -> None:
    other = tmp_path / "of-others"
    ours, theirs = folder(tmp_path, 1, days=40), folder(other, 1, days=40)
    strange = tmp_path / "data"
    strange.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "000000000000000a").symlink_to(elsewhere)
    assert remove_old(tmp_path, {tmp_path: [], other: [job(1)]}, seconds=30 * DAY, limit=1) == [ours]
    assert theirs.exists() and strange.exists() and elsewhere.exists()
    assert remove_old(tmp_path / "nothing here", {}, seconds=1, limit=1) == []
