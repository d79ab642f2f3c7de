"""What a call's guards cost: the time of one check of all guards, of each compiled function that a call enters."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list


class GuardedCalls:
    """The guards of one compiled callable, each with the local variables that Dynamo checks it on.

    A function that calls itself, or is called often, counts once."""

    def __init__(self, call: Callable[[], object], backend: str) -> None:
        """call: runs the callable once, eagerly; it must have been compiled. backend: the name of its back end, which
        its cache entries have and those of another copy of the model have not."""
        self._checks: list[tuple[Any, Mapping[str, object]]] = []
        seen: set[CodeType] = set()

        def look(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event != "call" or code in seen or not (entries := _debug_get_cache_entry_list(code)):
                return
            given = dict(frame.f_locals)
            mine = [entry.guard_manager.root for entry in entries if _name(entry.backend) == backend]
            if holding := [(root, given) for root in mine if root.check(given)]:
                seen.add(code)
                self._checks += holding

        with torch.compiler.set_stance("force_eager"):
            sys.setprofile(look)
            try:
                call()
            finally:
                sys.setprofile(None)
        if not self._checks:
            raise RuntimeError(f"no guards of {backend} hold for this call: was it compiled?")

    @property
    def functions(self) -> int:
        return len(self._checks)

    def microseconds(self, repeats: int) -> float:
        """Of one check of all guards; mean over `repeats` in a row."""
        began = time.perf_counter()
        for _ in range(repeats):
            for root, given in self._checks:
                root.check(given)
        return (time.perf_counter() - began) / repeats * 1e6


def _name(backend: Any) -> str:
    """As it was given to torch.compile: wrappers around the compiler keep it."""
    return str(getattr(backend, "compiler_name", None) or getattr(backend, "__name__", backend))
