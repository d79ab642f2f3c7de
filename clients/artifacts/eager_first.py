"""A graph that runs eagerly until its compiled form takes over, between two of its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from ...compiler.forking.fork_safe_lock import ForkSafeLock
from ...compiler.torch_internals.dynamo import tracing

R = TypeVar("R")
L = TypeVar("L")
Graph = Callable[..., Any]


class Pending(Generic[R, L]):
    """A compiled form that a thread receives while the program runs its graph eagerly.

    receive: what the thread does. load: makes callable what that returned, in the program's own thread. is_eager(call,
    ready): whether call number `call` of the graph, from 0, is still eager.
    """

    def __init__(
        self,
        receive: Callable[[], R],
        load: Callable[[R], L],
        is_eager: Callable[[int, bool], bool] = lambda _, ready: not ready,
    ) -> None:
        self._receive = receive
        self._load = load
        self._is_eager = is_eager
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

    def is_eager(self, call: int) -> bool:
        return self._is_eager(call, self.ready)

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


class EagerFirst:
    """Both forms of one graph. Safe for threads.

    eager: the graph as Dynamo captured it. is_eager(call): whether call number `call`, from 0, is eager; once it is
    not, it is not asked again. take_over(calls, inputs): called then, by that call, in the program's thread; gets the
    number of calls that ran eagerly and this call's inputs, and returns what runs from this call on. If it raises, the
    call raises that, and the next call tries again.

    A forward and its backward are of one form, since autograd records the forward that ran. A forward whose tensors are
    saved through hooks may run again in the backward (torch.utils.checkpoint), and must be of the same form then: after
    such a call the graph stays eager.
    """

    def __init__(
        self,
        eager: Graph,
        is_eager: Callable[[int], bool],
        take_over: Callable[[int, tuple[Any, ...]], Graph],
    ) -> None:
        self._eager: Graph | None = eager
        self._is_eager = is_eager
        self._take_over: Callable[[int, tuple[Any, ...]], Graph] | None = take_over
        self._compiled: Graph | None = None
        self._lock = ForkSafeLock()
        self._calls = 0
        self._keeps_eager = False

    def call(self, *inputs: Any) -> Any:
        """One call of the graph."""
        run = self._compiled or self._next(inputs)
        return run(*inputs)

    def _next(self, inputs: tuple[Any, ...]) -> Graph:
        with self._lock:
            if self._compiled is None and not self._stays_eager():
                assert self._take_over is not None
                self._compiled = self._take_over(self._calls, inputs)
                self._eager = self._take_over = None
            if self._compiled is not None:
                return self._compiled
            self._calls += 1
            assert self._eager is not None
            return self._eager

    def _stays_eager(self) -> bool:
        self._keeps_eager = self._keeps_eager or tracing.saves_through_hooks()
        return self._keeps_eager or _captures() or self._is_eager(self._calls)


def _captures() -> bool:
    """Whether the program captures a CUDA graph now, into which nothing may be loaded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
