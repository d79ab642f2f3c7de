"""compiler/search/device_turn.py: processes that share a device follow one another; a wait is not work."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from torchrelay.compiler.process.forked_process import ForkedProcess
from torchrelay.compiler.search.device_turn import DeviceTurn
from torchrelay.compiler.search.in_compile import StageClock

SECONDS = 60.0


@contextlib.contextmanager
def other_process(body: Callable[[ForkedProcess], None]) -> Iterator[ForkedProcess]:
    process = ForkedProcess.running(body)
    try:
        yield process
    finally:
        process.close()


@contextlib.contextmanager
def holder(folder: Path) -> Iterator[ForkedProcess]:
    """A process whose turn it is, until it gets a message."""

    def hold(fork: ForkedProcess) -> None:
        with DeviceTurn("cpu", folder):
            fork.send(b"has it")
            fork.receive()
        fork.receive()

    with other_process(hold) as process:
        assert process.receive(SECONDS) == b"has it"
        yield process


def test_a_wait_ends_with_the_others_turn_and_counts_for_no_stage(tmp_path: Path) -> None:
    events: list[tuple[str, str]] = []
    others: list[ForkedProcess] = []

    def progress(stage: str, detail: str) -> None:
        events.append((stage, detail))
        if stage == "queued":
            others[0].send(b"end it")

    clock = StageClock(progress)
    turn = clock.turns(tmp_path)["cpu"]
    clock.enter("inductor", "forward")
    with turn:  # nobody else is there
        assert (turn.waited, len(events)) == (0.0, 1)
    with holder(tmp_path) as other:
        others.append(other)
        with turn:
            assert turn.waited > 0
    assert [stage for stage, _ in events] == ["inductor", "queued", "inductor"]
    assert events[1][1] == "others measure on its device"
    assert events[2] == ("inductor", "forward")
    assert dict(clock.seconds()).keys() == {"inductor"}


def test_a_killed_process_gives_its_turn_up(tmp_path: Path) -> None:
    with holder(tmp_path) as other:

        def kill() -> AbstractContextManager[None]:
            return contextlib.nullcontext(os.kill(other.pid, signal.SIGKILL))

        with DeviceTurn("cpu", tmp_path, waiting=kill) as turn:
            assert turn.waited > 0


def test_turns_inside_a_turn_are_the_same_one(tmp_path: Path) -> None:
    turn = DeviceTurn("cpu", tmp_path)
    with turn:
        with turn, turn:
            pass
        with DeviceTurn("cpu", tmp_path, seconds=0.1) as other:  # the first one goes on
            assert other.waited >= 0.1
    with DeviceTurn("cpu", tmp_path) as other:
        assert other.waited == 0.0


def test_a_fork_does_not_keep_the_turn_of_its_process(tmp_path: Path) -> None:
    def stay(fork: ForkedProcess) -> None:
        fork.receive()

    with DeviceTurn("cpu", tmp_path):
        fork = ForkedProcess.running(stay)
    with DeviceTurn("cpu", tmp_path) as turn:
        assert turn.waited == 0.0
    fork.close()


def test_a_turn_begins_in_the_end_and_without_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path), DeviceTurn("cpu", tmp_path, seconds=0.1) as turn:
        assert turn.waited >= 0.1
    with DeviceTurn("cpu", tmp_path / "none") as absent, DeviceTurn("cpu") as unlocked:
        assert (absent.waited, unlocked.waited) == (0.0, 0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_waits_comes_before_the_one_that_had_its_turn(tmp_path: Path) -> None:
    (tmp_path / "uevent").touch()  # as a GPU's folder has

    def follow(fork: ForkedProcess) -> None:
        fork.receive()
        turn = DeviceTurn("cpu", tmp_path, waiting=lambda: contextlib.nullcontext(fork.send(b"waits")))
        with turn:
            fork.send(b"has it")
            fork.receive()

    with other_process(follow) as other:
        turn = DeviceTurn("cpu", tmp_path)
        with turn:
            other.send(b"take it")
            assert other.receive(SECONDS) == b"waits"
        turn = DeviceTurn("cpu", tmp_path, waiting=lambda: contextlib.nullcontext(other.send(b"end it")))
        with turn:
            assert turn.waited > 0
            assert other.receive(SECONDS) == b"has it"
