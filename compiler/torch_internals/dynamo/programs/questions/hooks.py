"""Looks at calls of PyTorch's methods and functions for a while. An error in a look costs the record, not the call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch._dynamo.exc import RestartAnalysis

from ....patching import replace
from .asked import Asked, Unnamed

Look = Callable[..., None]


class Hooks:
    """What was put around methods and functions, until `undo` is closed. active: whether anything is to be looked at.
    note: takes a question that was seen."""

    def __init__(
        self, undo: contextlib.ExitStack, note: Callable[[Asked], None], active: Callable[[], bool]
    ) -> None:
        self._undo = undo
        self.note = note
        self.active = active

    def put(
        self, owner: type | ModuleType, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Another function in place of what the class or module itself has under the name."""
        own = vars(owner)[name]
        self._undo.callback(replace(owner, name, functools.wraps(own)(around(own))))

    def observe(
        self,
        owner: type | ModuleType,
        name: str,
        *,
        before: Look | None = None,
        after: Look | None = None,
        failed: Look | None = None,
    ) -> None:
        """Look at each call. before: gets its arguments. after: its answer and its arguments. failed: the error that it
        raises, and its arguments."""

        def around(own: Callable[..., Any]) -> Callable[..., Any]:
            def looked_at(*args: Any, **named: Any) -> Any:
                if not self.active():
                    return own(*args, **named)
                if before is not None:
                    self.see(before, *args, **named)
                try:
                    answer = own(*args, **named)
                except Exception as error:
                    if failed is not None:
                        self.see(failed, error, *args, **named)
                    raise
                if after is not None:
                    self.see(after, answer, *args, **named)
                return answer

            return looked_at

        self.put(owner, name, around)

    def see(self, look: Look, /, *args: Any, **named: Any) -> None:
        """Look at something. That Dynamo has to begin again, it must learn; any other error is the look's own."""
        try:
            look(*args, **named)
        except RestartAnalysis:
            raise
        except Exception as error:
            self.note(Unnamed(f"what could not be looked at: {type(error).__name__}: {error}"))


def owners(base: type, name: str) -> Iterator[type]:
    """The class and those that inherit from it, as far as they have a method of that name themselves."""
    waiting, seen = [base], {base}
    while waiting:
        each = waiting.pop()
        if callable(vars(each).get(name)):
            yield each
        inheriting: list[type] = type.__subclasses__(each)
        below = [kind for kind in inheriting if kind not in seen]
        seen.update(below)
        waiting += below
