"""Functions put around methods of PyTorch's classes for a while."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ....patching import replace

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes of a method what takes its place."""


class Hooks(contextlib.ExitStack):
    """What was put around methods and functions, until the stack is closed."""

    def put(self, owner: type | ModuleType, name: str, around: Around) -> None:
        """Around what the class or module itself has under the name."""
        own = vars(owner)[name]
        self.callback(replace(owner, name, functools.wraps(own)(around(own))))


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
