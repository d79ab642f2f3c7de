"""Dynamo's own guards, made in less time while a thread makes them from a record: the same guards, but each value is
looked up once, and nothing is prepared for logs, exports and filters."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from ..patching import replace


class _Making(threading.local):
    value: Callable[[Any], Any] | None = None


_making = _Making()
"""What this thread finds at a source; None while it makes no guards from a record."""


@contextlib.contextmanager
def values_from(value: Callable[[Any], Any]) -> Iterator[None]:
    """Inside the block, guards of this thread are made of what `value` finds at a source (GuardBuilder.get): they are
    on the very values that a record was compared with. Needs `install`."""
    before, _making.value = _making.value, value
    try:
        yield
    finally:
        _making.value = before


def install() -> Callable[[], None]:
    """Take the place of what makes guards slowly; returns what puts it back.

    What is noted for exports and filters, and measured for logs, no guard reads; a record's guards are in order
    already. GuardBuilder.get evaluates text, with a cache of weak references in PyTorch 2.11.
    """
    from torch import _guards as sources
    from torch._dynamo import guards

    builder: Any = guards.GuardBuilder
    get, note = builder.get, builder._set_guard_export_info
    measure: Any = vars(guards)["profile_guard_manager"]
    order: Any = sources.Guard.sort_key

    @functools.wraps(get)
    def found(self: Any, guard_or_source: Any, *more: Any, **named: Any) -> Any:
        if _making.value is None:
            return get(self, guard_or_source, *more, **named)
        return _making.value(getattr(guard_or_source, "originating_source", guard_or_source))

    @functools.wraps(note)
    def noted(*args: Any, **kwargs: Any) -> None:
        if _making.value is None:  # it asks for its caller's name
            kwargs["provided_func_name"] = kwargs.get("provided_func_name") or sys._getframe(1).f_code.co_name
            note(*args, **kwargs)

    @functools.wraps(measure)
    def measured(*args: Any) -> float:
        return 0.0 if _making.value is not None else measure(*args)

    @functools.wraps(order)
    def ordered(self: Any) -> Any:
        return order(self) if _making.value is None else ()

    installed = contextlib.ExitStack()
    installed.callback(replace(builder, "get", found))
    installed.callback(replace(builder, "_set_guard_export_info", noted))
    installed.callback(replace(guards, "profile_guard_manager", measured))
    installed.callback(replace(sources.Guard, "sort_key", ordered))
    installed.callback(replace(sources, "eval", _evaluated))
    return installed.close


def _evaluated(text: str, *scopes: Any) -> Any:
    """Replaces the builtin `eval` in torch._guards, for the texts of sources."""
    return eval(_compiled(text), *scopes)


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> types.CodeType:
    return compile(text.lstrip(" \t"), "<string>", "eval")
