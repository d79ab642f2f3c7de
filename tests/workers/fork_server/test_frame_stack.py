"""A compile's frames lie in one piece of memory, however deep in the worker it began."""

from __future__ import annotations

import resource

import pytest
from torchrelay.workers.fork_server.compile_engine import with_frame_stack

CALLS = 2_000
DEPTHS = 400


def faults_of_calls(depth: int) -> int:
    """Pages that `CALLS` calls took, one after the other, from `depth` frames further down."""
    if depth:
        return faults_of_calls(depth - 1)

    def nothing() -> None:
        return None

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        nothing()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def most_faults() -> int:
    return max(map(faults_of_calls, range(DEPTHS)))


def test_at_some_depth_each_call_takes_a_page_and_with_room_at_none() -> None:
    assert most_faults() >= CALLS  # else this Python has no chunks that end, and `with_room` nothing to do
    assert with_frame_stack(most_faults) < CALLS / 10


def test_what_it_calls_returns_and_raises_as_ever() -> None:
    assert with_frame_stack(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        with_frame_stack(lambda: 1 // 0)
