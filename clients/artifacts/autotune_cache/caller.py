"""What the library that asks for a winner is about to choose from.

Plug-in points pass a key alone. A winner is used only if it is one of the program's own candidates, and only the caller
knows these (docs/decisions/0033-autotune-winners-are-choices.md).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_FRAMES = 8


def caller_locals(module: str, function: str) -> Mapping[str, Any]:
    """The local variables of the nearest caller that is `function` of `module`; empty if there is none nearby."""
    frame = sys._getframe(1).f_back
    for _ in range(_FRAMES):
        if frame is None:
            break
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == (module, function):
            return frame.f_locals
        frame = frame.f_back
    return {}
