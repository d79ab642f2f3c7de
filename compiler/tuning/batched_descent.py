"""Stage 8: coordinate descents of many kernels; their configurations are built together and measured one by one.

Inductor's descent (torch._inductor.runtime.coordinate_descent_tuner) compiles a configuration, measures it, and only
then knows the next one: one processor builds a graph's kernels for most of a minute. Here a descent measures what is
built, requests the builds that it needs next, and stops until its kernel runs again. It then starts from its beginning,
with its measurements remembered, and takes the same path (docs/decisions/0028-coordinate-descents-are-batched.md).
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

_SECONDS = 120.0
"""Limit for the builds of one round; a later descent builds in this process."""
_MOST_RUNS = 64

Tune = Callable[..., Any]
"""tune(measure, configuration, time): a descent, which skips a configuration if `measure` raises."""


class DescentDeferred(Exception):
    """A descent needs configurations that are not built yet."""


class BatchedDescents:
    """build(source, configuration): builds it in another process. identity: a configuration as a key."""

    def __init__(self, build: Callable[[str, Any], Future[Any]], identity: Callable[[Any], Hashable]) -> None:
        self._build = build
        self._identity = identity
        self._builds: dict[tuple[str, Hashable], Future[Any]] = {}
        self._failed: dict[tuple[str, Hashable], Exception] = {}
        """Upstream's tuner remembers measurements, but would try these again in every run."""
        self.waiting = False
        """Whether any descent was deferred in the last run."""

    def of(self, source: str, tune: Tune) -> Tune:
        """`tune` for kernels of this source; it raises DescentDeferred where it must wait. A configuration that did not
        build in the other process is measured all the same, and fails as upstream."""

        def tuned(measure: Callable[[Any], float], configuration: Any, *rest: Any) -> Any:
            missing = False

            def measured(wanted: Any) -> float:
                nonlocal missing
                if wanted is not configuration and not self._built(source, wanted):
                    missing = True
                if missing:  # the path from here is unknown; request what it may need
                    raise DescentDeferred
                key = source, self._identity(wanted)
                if key in self._failed:
                    raise self._failed[key]
                try:
                    return measure(wanted)
                except Exception as error:
                    self._failed[key] = error.with_traceback(None)  # its frames hold a run's tensors
                    raise

            found = tune(measured, configuration, *rest)
            if missing:
                self.waiting = True
                raise DescentDeferred
            return found

        return tuned

    def settle(self, run: Callable[[], None]) -> None:
        """Run the kernels until no descent is deferred."""
        for _ in range(_MOST_RUNS):
            if not self.waiting or concurrent.futures.wait(self._builds.values(), timeout=_SECONDS).not_done:
                return
            self.waiting = False
            run()

    def _built(self, source: str, configuration: Any) -> bool:
        key = source, self._identity(configuration)
        if key not in self._builds:
            try:
                self._builds[key] = self._build(source, configuration)
            except RuntimeError as error:  # the processes are gone
                self._builds[key] = Future()
                self._builds[key].set_exception(error)
        return self._builds[key].done()
