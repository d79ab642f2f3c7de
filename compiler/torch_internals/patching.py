"""Replace an attribute of PyTorch's or Triton's, or set an environment variable. docs/patches.md lists every
replacement and its reason."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_ABSENT = object()


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Replace an attribute until the returned function is called; what somebody else has put there by then stays."""
    original = _attribute(owner, name)
    setattr(owner, name, value)

    def restore() -> None:
        if _attribute(owner, name) is not value:
            return
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    return restore


def _attribute(owner: Any, name: str) -> Any:
    """A class's attribute without binding it: a static method that is asked for is a function."""
    if isinstance(owner, type):
        return inspect.getattr_static(owner, name, _ABSENT)
    return getattr(owner, name, _ABSENT)


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside a block."""
    restore = replace(owner, name, value)
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def patched_environment(**values: str) -> Iterator[None]:
    """Set environment variables that PyTorch reads at import, and put back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def cache_folders(workdir: Path) -> contextlib.AbstractContextManager[None]:
    """Have Inductor and Triton keep what they compile in a job's own folder."""
    return patched_environment(
        TORCHINDUCTOR_CACHE_DIR=str(workdir / "inductor"), TRITON_CACHE_DIR=str(workdir / "triton")
    )
