"""A copy of a process hands over what it worked out, or nothing; either way it is gone. Real forks."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from torchrelay.compiler.process import forked_copy
from torchrelay.compiler.process.forked_copy import ForkedCopy
from waiting import wait_until


def gone(pid: int) -> bool:
    """Whether `pid` is neither running nor waiting for its parent."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_an_answer_larger_than_a_pipe_arrives_whole() -> None:
    copy = ForkedCopy()
    if copy.inside:
        copy.finish(b"x" * (1 << 20))
    assert copy.result() == b"x" * (1 << 20)
    copy.close()


@pytest.mark.parametrize("how", ["killed", "ends without an answer"])
def test_a_copy_that_dies_has_no_answer(how: str) -> None:
    copy = ForkedCopy()
    if copy.inside:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        copy.close()
    assert copy.result() is None
    copy.close()


def test_a_copy_that_nobody_asks_is_ended() -> None:
    copy = ForkedCopy()
    if copy.inside:
        time.sleep(1000)
        os._exit(0)
    copy.close()
    assert gone(copy.pid)


def test_a_copy_asks_the_process_that_made_it() -> None:
    asked: list[bytes] = []

    def answer(question: bytes) -> bytes:
        asked.append(question)
        return question.upper()

    copy = ForkedCopy(answer)
    if copy.inside:
        copy.finish(copy.ask(b"one") + copy.ask(b"two" * 100_000))
    assert copy.result() == b"ONE" + b"TWO" * 100_000
    assert asked == [b"one", b"two" * 100_000]
    copy.close()


def test_nobody_waits_for_a_copy_s_questions_that_is_gone() -> None:
    before = threading.active_count()
    for how in ("killed", "not asked"):
        copy = ForkedCopy(lambda question: b"")
        if copy.inside:
            time.sleep(1000)
            os._exit(0)
        if how == "killed":
            os.kill(copy.pid, signal.SIGKILL)
            assert copy.result() is None
        copy.close()
    wait_until(lambda: threading.active_count() <= before)


def test_a_copy_that_hangs_is_ended_and_the_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that inherited a lock which another thread held."""
    monkeypatch.setattr(forked_copy, "LEAST_SECONDS", 0.2)
    lock = threading.Lock()
    with lock:
        copy = ForkedCopy()
        if copy.inside:
            lock.acquire()
            copy.finish(b"never")
    assert copy.result() is None
    assert gone(copy.pid)


def test_a_copy_that_works_longer_than_the_least_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_copy, "LEAST_SECONDS", 0.0)
    copy = ForkedCopy()
    if copy.inside:
        time.sleep(2)
        copy.finish(b"late")
    time.sleep(1.5)  # what this process did meanwhile
    assert copy.result() == b"late"
