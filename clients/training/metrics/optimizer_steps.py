"""Counts the optimizer steps of this process with PyTorch's hooks, without help of the script.

A step is one of the first optimizer that takes any: of two (a GAN's) or of hundreds (one for each parameter) the first
stands for all, and of an optimizer inside another (ZeRO) the outer one.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Listener = Callable[[Optimizer], None]


class OptimizerSteps:
    """base: steps that were finished before this process began. done: those finished since."""

    def __init__(self) -> None:
        self.base = 0
        self.done = 0
        self._first: weakref.ref[Optimizer] | None = None
        self._quiet = 0
        self._listeners: list[Listener] = []

    @property
    def latest(self) -> int:
        """Number of the last finished step, from 0; 0 also before the first."""
        return max(self.base + self.done - 1, 0)

    def listen(self, listener: Listener) -> None:
        """Call `listener` after each step from now on. The first call begins to count."""
        if not self._listeners:  # a compiled step calls the hooks too, and they are not compiled
            register_optimizer_step_pre_hook(torch.compiler.disable(self._before))  # type: ignore[no-untyped-call]
            register_optimizer_step_post_hook(torch.compiler.disable(self._after))  # type: ignore[no-untyped-call]
        self._listeners.append(listener)

    def resume(self, finished: int) -> None:
        """The next step is number `finished`."""
        self.base, self.done = finished, 0

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        """Steps inside are not training: PyTorch takes one to fill an optimizer's state."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def _before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._quiet:
            return
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._quiet or self._first is None or self._first() is not optimizer:
            return
        self.done += 1
        for listener in self._listeners:
            listener(optimizer)


@functools.cache
def process_steps() -> OptimizerSteps:
    """The count of this process."""
    return OptimizerSteps()
