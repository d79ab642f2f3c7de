"""Stage 8: coordinate descents of many kernels; their configurations are built together, and measured one by one.

A descent of Inductor's (torch._inductor.runtime.coordinate_descent_tuner) compiles a configuration, measures it, and
only then knows the next one to compile: a graph's kernels take most of a minute, on one processor. Here a descent
measures what is built, has the rest of what it wants built, and stops; it goes on when its kernel runs again. What was
measured is remembered, so it goes from its beginning the way that it would have gone alone.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

_SECONDS = 120.0
"""For what is being built at a time; what takes longer is built where it is measured."""
_MOST_RUNS = 64

Tune = Callable[..., Any]
"""tune(measure, configuration, time): a descent, to which a configuration for which `measure` raises is no good."""


class DescentDeferred(Exception):
    """A descent wants configurations that are not built yet."""


class BatchedDescents:
    """build(source, configuration): has it built in another process. identity: a configuration as a key."""

    def __init__(self, build: Callable[[str, Any], Future[Any]], identity: Callable[[Any], Hashable]) -> None:
        self._build = build
        self._identity = identity
        self._begun: dict[tuple[str, Hashable], Future[Any]] = {}
        self._failed: dict[tuple[str, Hashable], Exception] = {}
        """Upstream's tuner remembers what it measured, and would try these again in every run."""
        self.waiting = False
        """Whether any descent was put off in the run before."""

    def of(self, source: str, tune: Tune) -> Tune:
        """`tune` for a kernel of this source, which raises DescentDeferred where it has to wait. One that does
        not build in the other process is measured like the rest: it fails there as it would have alone."""

        def tuned(measure: Callable[[Any], float], configuration: Any, *rest: Any) -> Any:
            missing = False

            def measured(wanted: Any) -> float:
                nonlocal missing
                if wanted is not configuration and not self._built(source, wanted):
                    missing = True
                if missing:  # where the way goes from here on is not known; what it may need is built
                    raise DescentDeferred
                key = source, self._identity(wanted)
                if key in self._failed:
                    raise self._failed[key]
                try:
                    return measure(wanted)
                except Exception as error:
                    self._failed[key] = error.with_traceback(None)  # whose frames hold a run's tensors
                    raise

            found = tune(measured, configuration, *rest)
            if missing:
                self.waiting = True
                raise DescentDeferred
            return found

        return tuned

    def settle(self, run: Callable[[], None]) -> None:
        """Run the kernels until no descent waits for anything."""
        for _ in range(_MOST_RUNS):
            if not self.waiting or concurrent.futures.wait(self._begun.values(), timeout=_SECONDS).not_done:
                return
            self.waiting = False
            run()

    def _built(self, source: str, configuration: Any) -> bool:
        key = source, self._identity(configuration)
        if key not in self._begun:
            try:
                self._begun[key] = self._build(source, configuration)
            except RuntimeError as error:  # the processes are gone
                self._begun[key] = Future()
                self._begun[key].set_exception(error)
        return self._begun[key].done()
