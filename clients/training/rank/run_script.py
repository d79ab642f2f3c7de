"""Runs a script, or `module:function`, as Python itself would, with torchrelay as the back end of its torch.compile.

As `python SCRIPT` does, the script becomes the module `__main__` and stays it: what it pickles, the processes that it
spawns and what runs at exit find it there.
"""

from __future__ import annotations

import importlib
import io
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Literal

import torch

from ....compiler.errors import SettingsError

TUNED_MODE: Literal["max-autotune-no-cudagraphs"] = "max-autotune-no-cudagraphs"


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Raises SettingsError if there is no such file, and whatever the script raises."""
    path = Path(script).absolute()
    if not path.is_file():
        raise SettingsError(f"{script} is not a file", hint="Name the script that `python` would run")
    sys.argv[:] = [script, *arguments]
    _search_first(str(path.parent))
    with io.open_code(str(path)) as file:
        source = file.read()
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    main.__loader__ = SourceFileLoader("__main__", str(path))
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"], __cached__=None)
    sys.modules["__main__"] = main
    exec(compile(source, str(path), "exec", dont_inherit=True), main.__dict__)


def run_function(entry: str, arguments: Sequence[str]) -> None:
    """Call `module:function` without arguments; the module is looked for in the working directory first. Raises
    SettingsError if there is none, and whatever the function raises."""
    module, _, path = entry.partition(":")
    sys.argv[:] = [entry, *arguments]
    _search_first(str(Path.cwd()))
    function: Any = importlib.import_module(module)
    for name in path.split("."):
        function = getattr(function, name, None)
    if not callable(function):
        raise SettingsError(f"{module} has no function {path!r}", hint="Write module:function")
    function()


def compile_through_service(*, tune: bool = False) -> None:
    """Make torchrelay the back end of every torch.compile in this process that names none, or PyTorch's default. tune:
    and TUNED_MODE the mode of those that name none."""
    from ...backend import enable, torchrelay
    from ...patch_compile import DEFAULT, compile_with_backend

    enable()
    torch.compile = compile_with_backend(
        torchrelay, ("torchrelay", DEFAULT), mode=TUNED_MODE if tune else None
    )


def user_traceback(error: BaseException) -> types.TracebackType | None:
    """The error's traceback, beginning at the first frame of the user's code; None if it has no such frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != __file__:
        trace = trace.tb_next
    if trace is None:  # the error is not from this module's script or function
        return error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_ours(file: str) -> bool:
    return file in (__file__, importlib.__file__) or file.startswith("<frozen importlib")


def _search_first(folder: str) -> None:
    """`python -m` puts the working directory first, `python SCRIPT` the script's folder."""
    if sys.path and sys.path[0] in ("", str(Path.cwd())):
        del sys.path[0]
    sys.path.insert(0, folder)
