"""A copy of a process hands over what it worked out, or nothing; either way it is gone. Real forks."""

from __future__ import annotations

import os
import signal
import time

import pytest
from torchrelay.compiler.ahead import Copy


def gone(pid: int) -> bool:
    """Whether `pid` is neither running nor waiting for its parent."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_an_answer_larger_than_a_pipe_arrives_whole() -> None:
    copy = Copy()
    if copy.inside:
        copy.answer(b"x" * (1 << 20))
    assert copy.result() == b"x" * (1 << 20)
    copy.close()


@pytest.mark.parametrize("how", ["killed", "ends without an answer"])
def test_a_copy_that_dies_has_no_answer(how: str) -> None:
    copy = Copy()
    if copy.inside:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        copy.close()
    assert copy.result() is None
    copy.close()


def test_a_copy_that_nobody_asks_is_ended() -> None:
    copy = Copy()
    if copy.inside:
        time.sleep(1000)
        os._exit(0)
    copy.close()
    assert gone(copy.pid)
