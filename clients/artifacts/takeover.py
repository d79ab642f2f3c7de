"""A graph that runs as it is until a compiled version takes over, between two calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from ...compiler.process.fork_safe_lock import ForkSafeLock
from ...compiler.torch_internals.dynamo import tracing

R = TypeVar("R")
L = TypeVar("L")
Graph = Callable[..., Any]


class Pending(Generic[R, L]):
    """A graph's compiled version, which a thread receives while the program runs the graph eagerly.

    receive: what the thread does. load: makes callable what that returned, in the program's own thread. is_due(call,
    ready): whether call number `call` of the graph, from 0, is of this version.
    """

    def __init__(
        self,
        receive: Callable[[], R],
        load: Callable[[R], L],
        is_due: Callable[[int, bool], bool] = lambda _, ready: ready,
    ) -> None:
        self._receive = receive
        self._load = load
        self._is_due = is_due
        self._received: R | Exception | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to receive; where no thread can start, as at exit, receive here."""
        try:
            threading.Thread(target=self._run, name="torchrelay background", daemon=True).start()
        except RuntimeError:
            self._run()

    @property
    def ready(self) -> bool:
        """Whether `load` does not wait."""
        return self._ended.is_set()

    def is_due(self, call: int) -> bool:
        return self._is_due(call, self.ready)

    def load(self) -> L:
        """Waits for the thread. Raises what went wrong there or goes wrong here."""
        self._ended.wait()
        if isinstance(self._received, Exception):
            raise self._received
        assert self._received is not None
        return self._load(self._received)

    def _run(self) -> None:
        try:
            self._received = self._receive()
        except Exception as error:
            self._received = error
        self._ended.set()


class ChangingGraph:
    """One graph, eager at first, then compiled. Safe for threads.

    eager: how it runs at first. is_due(call): whether call number `call` of the graph, from 0, is compiled. take(call,
    inputs): called then, by that call, in the program's thread, with its inputs; returns what runs from this call on.
    If it raises, the call raises that, and the next call tries again.

    A forward and its backward are of one version, since autograd records the forward that ran. A forward whose tensors
    are saved through hooks may run again in the backward (torch.utils.checkpoint), and must be of the same version
    then: after such a call the graph does not change any more.
    """

    def __init__(
        self, eager: Graph, is_due: Callable[[int], bool], take: Callable[[int, tuple[Any, ...]], Graph]
    ) -> None:
        self._eager = eager
        self._is_due = is_due
        self._take = take
        self._compiled: Graph | None = None
        self._lock = ForkSafeLock()
        self._calls = 0
        self._keeps = False

    def call(self, *inputs: Any) -> Any:
        """One call of the graph."""
        run = self._compiled or self._next(inputs)
        return run(*inputs)

    def _next(self, inputs: tuple[Any, ...]) -> Graph:
        with self._lock:
            if self._compiled is None and not self._stays() and self._is_due(self._calls):
                self._compiled = self._take(self._calls, inputs)
            self._calls += 1
            return self._compiled or self._eager

    def _stays(self) -> bool:
        self._keeps = self._keeps or tracing.saves_through_hooks()
        return self._keeps or _captures()


def _captures() -> bool:
    """Whether the program captures a CUDA graph now, into which nothing may be loaded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
