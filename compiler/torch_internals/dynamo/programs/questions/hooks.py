"""Functions put around methods of PyTorch's classes for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes of a method what takes its place."""


class Hooks:
    """What was put around methods and functions, to be taken away again by `end`."""

    def __init__(self) -> None:
        self._placed: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: type | ModuleType, name: str, around: Around) -> None:
        """Around what the class or module itself has under the name."""
        own = vars(owner)[name]
        placed = functools.wraps(own)(around(own))
        setattr(owner, name, placed)
        self._placed.append((owner, name, own, placed))

    def end(self) -> None:
        for owner, name, own, placed in reversed(self._placed):
            if vars(owner).get(name) is placed:
                setattr(owner, name, own)
        self._placed.clear()


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
