"""The precompiled header that C++ kernels include: where it is kept, and how to build it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..patching import patched


@contextlib.contextmanager
def header_directory(folder: Path) -> Iterator[None]:
    """Inside the block, precompiled headers lie in `folder` (torch._inductor.codecache._HEADER_DIR)."""
    from torch._inductor import codecache

    with (
        patched(codecache, "_HEADER_DIR", str(folder)),
        patched(codecache, "_HEADER_LOCK_DIR", str(folder / "locks")),
    ):
        yield


def precompile_header(options: Mapping[str, Any]) -> Path:
    """Have the header that C++ kernels include precompiled, as their first one would have it; returns its file.

    Enters torch._inductor.codecache.CppPythonBindingsCodeCache.load_pybinding_async, which builds no kernel until what
    it returns is called.
    """
    from torch._inductor import codecache, config

    used: list[Path] = []
    original = codecache._precompile_header

    def recorded(*args: Any, **kwargs: Any) -> str:
        path: str = original(*args, **kwargs)
        used.append(Path(path + ".gch"))
        return path

    with patched(codecache, "_precompile_header", recorded), config.patch(dict(options)):
        source = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* x) {}\n'
        codecache.CppPythonBindingsCodeCache.load_pybinding_async(["float*"], source)
    return used[0]
