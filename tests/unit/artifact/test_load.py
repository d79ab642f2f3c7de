"""The client's loader, where it needs no artifact."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
from torchrelay.clients.artifacts.load import collector


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_the_collector_runs_again_after_the_last_pause() -> None:
    with collector.paused():
        with pytest.raises(ValueError), collector.paused():
            raise ValueError
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collector.paused():
        pass
    assert not gc.isenabled()


def test_the_collector_waits_for_all_threads() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector.paused():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with collector.paused():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()
