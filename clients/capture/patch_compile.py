"""torch.compile with another back end: the names that it takes the place of in; a function like torch.compile out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

DEFAULT = "inductor"
"""What torch.compile uses where no back end is named. Programs name it too (Hugging Face's Trainer does)."""


def compile_with_backend(
    backend: Callable[..., Any], names: Sequence[str], *, mode: str | None = None
) -> Callable[..., Any]:
    """torch.compile, with `backend` wherever one of `names` is meant. mode: of those graphs for which the program says
    neither mode nor options."""
    original = torch.compile

    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        if (options.get("backend") or DEFAULT) in names:
            options["backend"] = backend
            if mode is not None and not options.get("options"):
                options["mode"] = options.get("mode") or mode
        if model is None:
            return lambda function: original(function, **options)
        return original(model, **options)

    return compile
