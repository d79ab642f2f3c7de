"""A graph that runs as it is until a compiled version takes over, and then a better one, each between two calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ...compiler.process.fork_safe_lock import ForkSafeLock
from ...compiler.torch_internals.dynamo import tracing

R = TypeVar("R")
L = TypeVar("L")
Graph = Callable[..., Any]


class Pending(Generic[R, L]):
    """A compiled version of a graph, which a thread receives while the program runs another one.

    receive: what the thread does. load: makes callable what that returned, in the program's own thread. is_due(call,
    ready): whether call number `call` of the graph, from 0, is of this version. before: what the graph runs until then,
    in place of eager: a version that is loaded, or that is pending too.
    """

    def __init__(
        self,
        receive: Callable[[], R],
        load: Callable[[R], L],
        is_due: Callable[[int, bool], bool] = lambda _, ready: ready,
        before: L | Pending[R, L] | None = None,
    ) -> None:
        self.before = before
        self._receive = receive
        self._load = load
        self._is_due = is_due
        self._received: R | Exception | None = None
        self._started = False
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to receive; where no thread can start, as at exit, receive here. A second call changes nothing."""
        if self._started:
            return
        self._started = True
        try:
            threading.Thread(target=self._run, name="torchrelay background", daemon=True).start()
        except RuntimeError:
            if isinstance(self.before, Pending):
                self.before.start()  # `receive` may wait for it
            self._run()

    @property
    def ready(self) -> bool:
        """Whether `load` does not wait."""
        return self._ended.is_set()

    def is_due(self, call: int) -> bool:
        return self._is_due(call, self.ready)

    def wait(self) -> None:
        """Until the thread has ended, whatever its result."""
        self._ended.wait()

    def load(self) -> L:
        """Waits for the thread. Raises what went wrong there or goes wrong here."""
        self.wait()
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


class Takeover(NamedTuple):
    """How a version of a graph takes over.

    is_due(call): whether call number `call` of the graph, from 0, is of this version. take(call, inputs): called then,
    by that call, in the program's thread, with its inputs; returns what runs from this call on, or None if the version
    cannot be had. If it raises, the call raises that, and the next call tries again.
    """

    is_due: Callable[[int], bool]
    take: Callable[[int, tuple[Any, ...]], Graph | None]


class ChangingGraph:
    """One graph in one version after the other. Safe for threads.

    first: how it runs at first. takeovers: of its later versions, the best last. Once one has taken over, those before
    it are not asked for again.

    A forward and its backward are of one version, since autograd records the forward that ran. A forward whose tensors
    are saved through hooks may run again in the backward (torch.utils.checkpoint), and must be of the same version
    then: after such a call the graph does not change any more.
    """

    def __init__(self, first: Graph, takeovers: Sequence[Takeover]) -> None:
        self._version = first
        self._takeovers = list(takeovers)
        self._last: Graph | None = None
        self._lock = ForkSafeLock()
        self._calls = 0
        self._keeps = False

    def call(self, *inputs: Any) -> Any:
        """One call of the graph."""
        run = self._last or self._next(inputs)
        return run(*inputs)

    def _next(self, inputs: tuple[Any, ...]) -> Graph:
        with self._lock:
            if self._takeovers and not self._stays():
                self._change(inputs)
            self._calls += 1
            return self._version

    def _change(self, inputs: tuple[Any, ...]) -> None:
        for position in reversed(range(len(self._takeovers))):
            takeover = self._takeovers[position]
            if not takeover.is_due(self._calls):
                continue
            version = takeover.take(self._calls, inputs)
            if version is None:
                del self._takeovers[position]
                continue
            del self._takeovers[: position + 1]
            self._version = version
            break
        if not self._takeovers:
            self._last = self._version

    def _stays(self) -> bool:
        self._keeps = self._keeps or tracing.saves_through_hooks()
        return self._keeps or _captures()


def _captures() -> bool:
    """Whether the program captures a CUDA graph now, into which nothing may be loaded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
