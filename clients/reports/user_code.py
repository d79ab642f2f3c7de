"""Finds the line of the user's code that a warning is about."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path

_OURS = Path(__file__).parents[1]
_PASSED_OVER = (f"{_OURS}/", f"{_OURS.parent / 'compiler'}/", contextlib.__file__, functools.__file__, "<")
"""Beginnings of the file names of code through which a user's call comes to the back end; and PyTorch's."""


def place(line: str = "") -> tuple[str, int]:
    """(file, line) of `FILE:LINE`; without that, of the innermost call in this thread that is neither PyTorch's nor
    torchrelay's: the call of the compiled function."""
    file, _, number = line.rpartition(":")
    if file and number.isdecimal():
        return file, int(number)
    frame = sys._getframe(1)
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    passed_over = (*_PASSED_OVER, f"{Path(torch).parent}/") if torch else _PASSED_OVER
    while frame.f_code.co_filename.startswith(passed_over) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
