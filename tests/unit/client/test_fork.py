"""A process that is forked while another of its threads works: the child goes on."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from forked import child_finds
from torchrelay.clients.artifacts.load import collector
from torchrelay.clients.artifacts.verification import TrustStore
from torchrelay.clients.gateway.connection import Connection, Deadline
from torchrelay.clients.reports.run_report import RunReport
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.errors import GatewayUnreachable
from torchrelay.compiler.process.fork_safe_lock import ForkSafeLock


@contextmanager
def in_another_thread(context: AbstractContextManager[object]) -> Iterator[None]:
    """Another thread is inside `context`, from before the block to its end."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with context:
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    yield
    leave.set()
    thread.join()


def counts() -> tuple[object, Callable[[], bool]]:
    report = RunReport()

    def use() -> bool:
        report.record("hit")
        return report.snapshot().hits == 1

    return report, use


def trusts(folder: Path) -> tuple[object, Callable[[], bool]]:
    store = TrustStore(ClientSettings(cache_dir=folder, state_dir=folder))
    return store, lambda: store.trust().keys == {}


def connects(folder: Path) -> tuple[object, Callable[[], bool]]:
    connection = Connection(ClientSettings(url="http://127.0.0.1:1", cache_dir=folder))

    def use() -> bool:
        with pytest.raises(GatewayUnreachable):
            connection.request("GET", "/", Deadline(10))
        return True

    return connection, use


@pytest.mark.parametrize("part", ["report", "trust", "connection"])
def test_what_another_thread_was_using_can_be_used_in_the_child(tmp_path: Path, part: str) -> None:
    made = {
        "report": counts,
        "trust": lambda: trusts(tmp_path),
        "connection": lambda: connects(tmp_path),
    }
    used, use = made[part]()
    with in_another_thread(used._lock):  # type: ignore[attr-defined]
        assert child_finds(use)


def test_the_thread_that_forks_keeps_its_lock() -> None:
    lock = ForkSafeLock()

    def is_held() -> bool:
        lock.__exit__()
        with lock:
            return True

    with lock:
        assert child_finds(is_held)
    with lock:
        pass


def test_the_collector_runs_in_a_child_that_was_forked_while_another_thread_loaded() -> None:
    with in_another_thread(collector.paused()):
        assert not gc.isenabled()
        assert child_finds(gc.isenabled)
    assert gc.isenabled()


def test_a_child_of_the_thread_that_loads_collects_when_it_is_done() -> None:
    with collector.paused():
        found = child_finds(lambda: not gc.isenabled())
        assert found
    assert gc.isenabled()
