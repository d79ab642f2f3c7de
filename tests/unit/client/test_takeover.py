"""A graph that runs eagerly first: when its compiled version takes over, and when not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torchrelay
from forked import child_finds
from torch.utils.checkpoint import checkpoint
from torchrelay.clients.artifacts.background import ChangingGraph, PendingArtifact


class _Recorded(torch.autograd.Function):
    """x * 2, whose backward writes down the form that its forward had."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, form: str, written: list[str]) -> torch.Tensor:
        context.form, context.written = form, written
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        context.written.append(f"{context.form} backward")
        return gradient * 2, None, None


class Forms:
    """The forms of a graph, which write down when they run. The compiled one is due once it is in `answered`."""

    def __init__(self, *errors: Exception) -> None:
        self.written: list[str] = []
        self.taken: list[tuple[int, int]] = []
        self.answered: set[str] = set()
        self.errors = list(errors)
        self.graph = ChangingGraph(self.form("eager"), lambda _: "compiled" in self.answered, self.take)

    def form(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            self.written.append(name)
            result: torch.Tensor = _Recorded.apply(x, name, self.written)
            return result

        return run

    def take(self, calls: int, inputs: tuple[Any, ...]) -> Callable[..., Any]:
        self.taken.append((calls, len(inputs)))
        if self.errors:
            raise self.errors.pop(0)
        return self.form("compiled")

    def call(self, x: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = self.graph.call(torch.ones(2, requires_grad=True) if x is None else x)
        return found


def test_the_compiled_form_takes_over_at_the_first_call_after_the_answer() -> None:
    forms = Forms()
    forms.call()
    forms.call()
    forms.answered.add("compiled")
    assert forms.taken == []
    forms.call()
    forms.call()
    assert forms.written == ["eager", "eager", "compiled", "compiled"]
    assert forms.taken == [(2, 1)]


def test_a_backward_is_of_the_form_that_ran_forward() -> None:
    forms = Forms()
    first = forms.call()
    forms.answered.add("compiled")
    second = forms.call()
    first.sum().backward()
    second.sum().backward()
    assert forms.written == ["eager", "compiled", "eager backward", "compiled backward"]


def test_a_forward_that_a_checkpoint_runs_again_stays_eager() -> None:
    forms = Forms()
    found = checkpoint(forms.call, torch.ones(2, requires_grad=True), use_reentrant=False)
    forms.answered.add("compiled")
    found.sum().backward()
    forms.call()
    assert "compiled" not in forms.written and forms.taken == []


def test_an_error_of_the_takeover_is_the_calls_own_and_the_next_call_tries_again() -> None:
    forms = Forms(ValueError("first"), ValueError("second"))
    forms.answered.add("compiled")
    for expected in ("first", "second"):
        with pytest.raises(ValueError, match=expected):
            forms.call()
    forms.call()
    assert forms.written == ["compiled"]


def test_of_many_threads_one_takes_over() -> None:
    forms = Forms()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: forms.call(), range(40)))
        forms.answered.add("compiled")
        list(pool.map(lambda _: forms.call(), range(40)))
    assert forms.written == ["eager"] * 40 + ["compiled"] * 40
    assert forms.taken == [(40, 1)]


def test_a_call_is_eager_while_it_is_said_to_be() -> None:
    forms, asked = Forms(), []

    def is_due(call: int) -> bool:
        asked.append(call)
        return call >= 2

    graph = ChangingGraph(forms.form("eager"), is_due, forms.take)
    for _ in range(5):
        graph.call(torch.ones(2))
    assert forms.written == ["eager"] * 2 + ["compiled"] * 3
    assert asked == [0, 1, 2]


def artifact() -> Any:
    return object()


def test_a_thread_receives_and_the_program_loads() -> None:
    go, threads = threading.Event(), []
    received, loaded = artifact(), artifact()

    def receive() -> Any:
        threads.append(threading.current_thread())
        assert go.wait(60)
        return received

    def load(found: Any) -> Any:
        assert found is received
        threads.append(threading.current_thread())
        return loaded

    pending = PendingArtifact(receive, load)
    pending.start()
    assert not pending.is_due(0) and not pending.ready
    go.set()
    assert pending.load() is loaded
    assert pending.ready and pending.is_due(1)
    assert threads[0] is not threads[1] is threading.current_thread()


def test_what_goes_wrong_in_the_thread_is_raised_by_load() -> None:
    def receive() -> Any:
        raise ValueError("in the thread")

    pending = PendingArtifact(receive, artifact)
    pending.start()
    with pytest.raises(ValueError, match="in the thread"):
        pending.load()


def test_a_forked_child_has_no_thread_that_receives_and_stays_eager() -> None:
    go = threading.Event()
    pending = PendingArtifact(lambda: go.wait(60) and artifact(), artifact)
    pending.start()

    def stays_eager() -> bool:
        go.set()
        return not pending.is_due(0)

    assert child_finds(stays_eager)
    go.set()


def test_where_no_thread_can_start_it_is_received_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pending = PendingArtifact(artifact, artifact)
    pending.start()
    assert pending.ready


@pytest.mark.parametrize("value", ["yes", 1, []])
def test_the_option_must_be_true_or_false(value: Any) -> None:
    text = rf"Unexpected type of attr torchrelay\.background, got {type(value).__name__} should be bool"
    options = {"torchrelay.background": value}
    with pytest.raises(RuntimeError, match=text):
        torchrelay.compile(torch.nn.Linear(2, 2), options=options)
    with pytest.raises(Exception, match=text):
        torch.compile(torch.nn.Linear(2, 2), backend="torchrelay", options=options)(torch.ones(2))
