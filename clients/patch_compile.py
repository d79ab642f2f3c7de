"""torch.compile with another back end: the names that it takes the place of in; a function like torch.compile out.

`replace_inductor` and `restore_inductor` do it in all of a process, whatever spelling a trainer has for torch.compile.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..compiler.torch_internals.dynamo.backend_interface import default_backend

DEFAULT = "inductor"
"""PyTorch's own back end, where no other is set as the default. Programs name it too (Hugging Face's Trainer does)."""
_ACCELERATE_NAME = "TORCHRELAY"


def compile_with_backend(
    backend: Callable[..., Any] | str, names: Sequence[str], *, mode: str | None = None
) -> Callable[..., Any]:
    """torch.compile, with `backend` wherever one of `names` is meant. mode: of those graphs for which the program says
    neither mode nor options."""
    original = torch.compile

    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        if (options.get("backend") or default_backend()) in names:
            options["backend"] = backend
            if mode is not None and not options.get("options"):
                options["mode"] = options.get("mode") or mode
        if model is None:
            return lambda function: original(function, **options)
        return original(model, **options)

    return compile


class CompilePatch:
    """Puts torchrelay in Inductor's place in this process's torch.compile, and takes it out again.

    Others replace torch.compile too (Lightning does when it is imported), before or after. A function of ours that
    they hold stays in their chain; while the patch is off, it changes nothing.
    """

    def __init__(self) -> None:
        self._on = False
        self._replaced: dict[Callable[..., Any], Callable[..., Any]] = {}
        """Each function of ours, and the torch.compile that it replaced."""

    def enable(self) -> None:
        self._on = True
        if any(function in self._replaced for function in _chain(torch.compile)):
            return
        original, redirected = torch.compile, compile_with_backend("torchrelay", (DEFAULT,))

        @functools.wraps(original)
        def compile(model: Any = None, **options: Any) -> Any:
            return (redirected if self._on else original)(model, **options)

        self._replaced[compile] = original
        torch.compile = compile

    def disable(self) -> None:
        self._on = False
        while torch.compile in self._replaced:
            torch.compile = self._replaced[torch.compile]


def _chain(function: Any) -> Iterator[Any]:
    """`function` and what it wraps, as functools.wraps records it."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


@functools.cache
def process_patch() -> CompilePatch:
    return CompilePatch()


def replace_inductor() -> None:
    """Torchrelay in Inductor's place. `torchrelay run` has this called at the end of every `import torch`: it imports
    little and raises nothing."""
    process_patch().enable()
    _name_for_accelerate(accepted=True)


def restore_inductor() -> None:
    process_patch().disable()
    _name_for_accelerate(accepted=False)


def _name_for_accelerate(*, accepted: bool) -> None:
    """Whether Hugging Face's Accelerate, if the program has imported it, takes the name: its list of back ends,
    DynamoBackend, is a closed enum."""
    dataclasses = sys.modules.get("accelerate.utils.dataclasses")
    backends: Any = getattr(dataclasses, "DynamoBackend", None)
    if backends is None:
        return
    if accepted:
        member = str.__new__(backends, _ACCELERATE_NAME)
        member._name_ = member._value_ = _ACCELERATE_NAME
        # _missing_ is the enum module's own way to accept more values.
        backends._missing_ = classmethod(lambda _, value: member if value == _ACCELERATE_NAME else None)
    elif "_missing_" in vars(backends):
        del backends._missing_
