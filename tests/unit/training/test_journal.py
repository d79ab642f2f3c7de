"""A job's news: their numbers have no gaps, whatever becomes of the driver, the gateway or the disk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchrelay.compiler.api.training.events import (
    CheckpointEvent,
    FirstStep,
    JobNote,
    LogLines,
    RankStarted,
    StateChanged,
    StepMetrics,
    TrainEvent,
)
from torchrelay.workers.training import journal as journal_module
from torchrelay.workers.training.journal import JobJournal
from waiting import wait_until


def log(text: str) -> LogLines:
    return LogLines(rank=0, stream="stdout", lines=[text])


def started(attempt: int) -> RankStarted:
    return RankStarted(rank=0, world_size=1, pid=1, host="h", attempt=attempt, at=0.0)


def numbers(ledger: JobJournal, after: int) -> list[int]:
    return [news.number for news in ledger.after(after, 0.0)]


def test_news_are_there_again_after_a_restart_from_any_number(tmp_path: Path) -> None:
    ledger = JobJournal(tmp_path)
    ledger.add([log("a"), started(0)])
    ledger.add([log("b")])
    again = JobJournal(tmp_path)
    assert numbers(again, 0) == [1, 2, 3]
    assert numbers(again, 2) == [3]
    again.add([log("c")])
    assert [(news.number, news.event) for news in again.after(3, 0.0)] == [(4, log("c"))]
    assert again.attempts == 1


def test_a_line_that_a_crash_cut_is_left_out_and_its_number_used_again(tmp_path: Path) -> None:
    JobJournal(tmp_path).add([log("a"), log("b")])
    file = tmp_path / "news.jsonl"
    os.truncate(file, file.stat().st_size - 5)
    again = JobJournal(tmp_path)
    again.add([log("c")])
    assert [(news.number, news.event) for news in JobJournal(tmp_path).after(0, 0.0)] == [
        (1, log("a")),
        (2, log("c")),
    ]


def test_a_file_whose_news_were_all_fetched_starts_anew_and_keeps_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 1000)
    ledger = JobJournal(tmp_path)
    ledger.add([started(4), *(log("x" * 50) for _ in range(50))])
    assert ledger.after(51, 0.0) == []
    assert (tmp_path / "news.jsonl").stat().st_size < 1000
    again = JobJournal(tmp_path)
    again.add([StateChanged(state="done", at=1.0, restarts=4)])
    assert numbers(again, 51) == [52]
    assert (again.attempts, again.restarts) == (5, 4)
    assert JobJournal(tmp_path).ended is not None


@pytest.mark.parametrize(
    "event",
    [
        FirstStep(rank=1, at=1.0),
        StepMetrics(rank=0, step=3, at=1.0, values={}),
        CheckpointEvent(step=3, name="step-3", kept=False),
    ],
)
def test_that_a_step_was_made_is_known_after_its_news_were_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: TrainEvent
) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 1000)
    ledger = JobJournal(tmp_path)
    ledger.add([log("x" * 50) for _ in range(50)])
    assert not JobJournal(tmp_path).stepped
    ledger.add([event])
    assert JobJournal(tmp_path).stepped
    ledger.after(51, 0.0)
    assert (tmp_path / "news.jsonl").stat().st_size < 1000
    assert JobJournal(tmp_path).stepped


def test_old_news_come_from_the_disk_in_bounded_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MEMORY_BYTES", 2000)
    ledger = JobJournal(tmp_path)
    for i in range(0, 2500, 50):
        ledger.add([log(str(n)) for n in range(i, i + 50)])
    assert len(ledger._lines) < 100
    after, got = 0, []
    while some := ledger.after(after, 0.0):
        assert len(some) <= 1000
        got += some
        after = got[-1].number
    assert [news.number for news in got] == list(range(1, 2501))
    assert [news.event for news in got] == [log(str(i)) for i in range(2500)]


class FullDisk:
    """A folder in which nothing can be written while `full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        real = Path.open

        def opened(path, mode="r", *rest, **more):
            if self.full and mode != "rb" and mode != "r":
                raise OSError(28, "No space left on device")
            return real(path, mode, *rest, **more)

        monkeypatch.setattr(Path, "open", opened)
        sync = os.fdatasync

        def synced(descriptor):
            if self.full:
                raise OSError(28, "No space left on device")
            sync(descriptor)

        monkeypatch.setattr(os, "fdatasync", synced)


def test_a_full_disk_is_told_and_what_it_missed_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    ledger = JobJournal(tmp_path)
    ledger.add([log("a")])
    disk.full = True
    ledger.add([log("b")])
    ledger.add([log("c")])
    events = [news.event for news in ledger.after(0, 0.0)]
    assert [e for e in events if isinstance(e, LogLines)] == [log("a"), log("b"), log("c")]
    (note,) = [e for e in events if isinstance(e, JobNote)]
    assert "No space left" in note.text
    disk.full = False
    ledger.add([log("d")])
    assert [news.event for news in JobJournal(tmp_path).after(0, 0.0)] == [*events, log("d")]


def test_news_that_nobody_fetches_and_no_disk_takes_are_bounded_and_what_counts_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "UNWRITTEN_BYTES", 10_000)
    disk = FullDisk(monkeypatch)
    ledger = JobJournal(tmp_path)
    disk.full = True
    for i in range(300):
        ledger.add([log("x" * 100), StepMetrics(rank=0, step=i, at=0.0, values={})])
    ledger.add([StateChanged(state="done", at=1.0)])
    got, after = [], 0
    while some := ledger.after(after, 0.0):
        got += some
        after = got[-1].number
    assert len(got) < 200
    assert [news.number for news in got] == list(range(1, len(got) + 1))
    assert got[-1].event == StateChanged(state="done", at=1.0)
    assert any(isinstance(n.event, JobNote) and "lost" in n.event.text for n in got)


def test_a_service_that_has_more_than_the_disk_kept_gets_what_comes_after_it(tmp_path: Path) -> None:
    JobJournal(tmp_path).add([log("old")])
    ledger = JobJournal(tmp_path)
    ledger.add([log("new")])
    assert [(news.number, news.event) for news in ledger.after(40, 0.0)] == [(41, log("new"))]
    ledger.add([log("newer")])
    assert [(n.number, n.event) for n in JobJournal(tmp_path).after(40, 0.0)] == [
        (41, log("new")),
        (42, log("newer")),
    ]


def test_who_waits_is_woken(tmp_path: Path) -> None:
    ledger = JobJournal(tmp_path)
    threading.Timer(0.2, lambda: ledger.add([log("a")])).start()
    began = time.monotonic()
    assert len(ledger.after(0, 60.0)) == 1
    assert time.monotonic() - began < 50


def test_files_for_people_do_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SHOWN_BYTES", 100)
    ledger = JobJournal(tmp_path)
    for number in range(50):
        ledger.add([log(f"line {number:04}")])
    files = sorted((tmp_path / "logs").iterdir())
    assert [file.name for file in files] == ["rank-0.log", "rank-0.log.1"]
    lines = (files[1].read_text() + files[0].read_text()).splitlines()
    assert lines == [f"line {number:04}" for number in range(50 - len(lines), 50)]
    assert 10 <= len(lines) <= 22


def test_whoever_asks_for_much_that_is_on_disk_has_it_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MOST_ENTRIES", 10)
    monkeypatch.setattr(journal_module, "MEMORY_BYTES", 1000)
    ledger = JobJournal(tmp_path)
    for number in range(200):
        ledger.add([log(f"line {number:04}")])
    read = []
    on_disk = JobJournal._on_disk

    def counted(self: JobJournal, at: int) -> Iterator[tuple[int, bytes]]:
        for each in on_disk(self, at):
            read.append(each)
            yield each

    monkeypatch.setattr(JobJournal, "_on_disk", counted)
    found: list[int] = []
    while more := numbers(ledger, len(found)):
        found += more
    assert found == list(range(1, 201))
    assert len(read) <= 200
    assert numbers(ledger, 50) == list(range(51, 61))  # another gateway, which is not as far


def test_events_that_come_while_the_disk_is_busy_are_written_together_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = JobJournal(tmp_path)
    sync, go, synced = os.fdatasync, threading.Event(), []

    def slow(descriptor: int) -> None:
        go.wait(60)
        sync(descriptor)
        synced.append(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)
    adding = [threading.Thread(target=ledger.add, args=([log(str(n)), log("")],)) for n in range(30)]
    for thread in adding:
        thread.start()
    wait_until(lambda: ledger._queued >= 30)
    go.set()
    for thread in adding:
        thread.join()
    assert len(synced) == 2  # of the one that came first, and of all others
    found = JobJournal(tmp_path).after(0, 0.0)
    assert [each.number for each in found] == list(range(1, 61))
    texts = [each.event.lines[0] for each in found if isinstance(each.event, LogLines)]
    assert sorted(filter(None, texts), key=int) == [str(n) for n in range(30)]
    assert texts[1::2] == [""] * 30


def test_a_file_for_people_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    ledger = JobJournal(tmp_path)
    file = tmp_path / "logs" / "rank-0.log"
    ledger.add([log("a")])
    file.unlink()
    ledger.add([log("b")])
    ledger.add([log("c")])
    assert file.read_text() == "b\nc\n"


def test_more_files_for_people_than_may_be_open_get_all_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = JobJournal(tmp_path)
    monkeypatch.setattr(ledger._readable, "_most", 4)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for line in range(3):
        ledger.add([LogLines(rank=rank, stream="stdout", lines=[str(line)]) for rank in range(10)])
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 5
    assert {file.read_text() for file in (tmp_path / "logs").iterdir()} == {"0\n1\n2\n"}
