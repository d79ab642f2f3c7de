"""Sizes that varied in earlier runs of a script are symbolic from the first trace on.

Dynamo traces with constant sizes, meets a second one, and traces again with a symbol in its place (automatic dynamic
shapes, torch._dynamo.pgo). A size that runs have reported as varying is a symbol in the first trace already; and the
calls of graphs with symbols are watched, to report what varies here. Whatever forbids automatic dynamic shapes comes
first: `dynamic=False`, `mark_static`, a configuration.

A size is named by a digest: the traced function, the modules that it is given, whether gradients are recorded, the
input as Dynamo names it, and the dimension; or the input alone, if it is an integer. No size has a value here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

from ...artifact.programs import digests
from ..distributed import process_groups
from ..patching import replace
from . import symbolic_shapes

_log = logging.getLogger(__name__)

_WATCHED_CALLS = 256
"""The first ones of a graph. Later ones cost one Python call more than without."""
_WATCHED_SYMBOLS = 1024
_FEWEST_VALUES = 3
_FEWEST_CALLS = 32
"""A size that had fewer is not said to be constant."""


class VariedSizes:
    """Sizes of the frames that this process traces for `backend`. known: digests of those that varied in earlier runs;
    asked at each trace, and must not wait. Safe for threads."""

    def __init__(self, backend: Any, known: Callable[[], frozenset[str]]) -> None:
        self._backend = backend
        self._known = known
        self.on_constant: Callable[[str], None] = lambda graph: None
        """Gets the key of each graph that has a symbol for a known size that does not vary."""
        self._thread = _Thread()
        self._counted: list[tuple[str, list[str], Counter[int]]] = []
        """For each symbol of a watched graph: the graph's key, the sizes that it stands for, and how often it had which
        value."""
        self._reported: tuple[set[str], set[str]] = set(), set()

    def install(self) -> Callable[[], None]:
        """Begin; returns what ends it."""
        from torch._dynamo import convert_frame, pgo

        compile_, update = convert_frame._compile, pgo.update_automatic_dynamic
        parameters = inspect.signature(compile_)

        @functools.wraps(compile_)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            before, self._thread.traced = self._thread.traced, None
            try:
                self._thread.traced = self._wanted(parameters.bind(*args, **kwargs).arguments)
            except Exception:  # it must not end the user's call
                _log.warning("torchrelay: sizes of a function are not looked at", exc_info=True)
            try:
                return compile_(*args, **kwargs)
            finally:
                self._thread.traced = before

        @functools.wraps(update)
        def updated(tx: Any, name: str, entry: Any, **kwargs: Any) -> Any:
            found = update(tx, name, entry, **kwargs)
            try:
                return self._with_symbols(name, found)
            except Exception:
                _log.warning("torchrelay: sizes of %s are not looked at", name, exc_info=True)
                return found

        undo = contextlib.ExitStack()
        undo.callback(replace(convert_frame, "_compile", compiled))
        undo.callback(replace(pgo, "update_automatic_dynamic", updated))
        return undo.close

    def watched(self, compiled: Callable[..., Any], inputs: Sequence[Any], key: str) -> Callable[..., Any]:
        """`compiled`, a graph of the frame that is being traced, whose first calls are watched if it has symbols for
        sizes. inputs: its example inputs."""
        traced, counts = self._thread.traced, []
        if traced is None or len(self._counted) >= _WATCHED_SYMBOLS:
            return compiled
        try:
            for position, value in enumerate(inputs):
                if names := [traced.named(*size) for size in _sizes(value)]:
                    counts.append((position, Counter[int]()))
                    self._counted.append((key, names, counts[-1][1]))
        except Exception:
            _log.warning("torchrelay: sizes of a graph are not looked at", exc_info=True)
        if not counts:
            return compiled
        left = _WATCHED_CALLS

        def call(*args: Any) -> Any:
            nonlocal left
            if left:
                left -= 1
                for position, counted in counts:
                    if type(args[position]) is int:  # another compiler may trace this call
                        counted[args[position]] += 1
            return compiled(*args)

        return call

    def news(self, most: int) -> tuple[list[str], list[str]]:
        """What was not returned before: sizes that vary, and sizes that were said to vary and do not; up to `most` of
        each. A size varies if the calls of a graph had three values of it or more, and none in more than half of them:
        with batches of 32, and one of 7 at the end of each epoch, code for 32 is worth its own trace."""
        varied, constant = set[str](), set[str]()
        for _, names, counted in list(self._counted):
            calls = list(counted.values())
            if len(calls) >= _FEWEST_VALUES and 2 * max(calls) <= sum(calls):
                varied.update(names)
            elif sum(calls) >= _FEWEST_CALLS:
                constant.update(names)
        found = varied, constant & (self._known() | self._reported[0]) - varied
        new = [sorted(names - before)[:most] for names, before in zip(found, self._reported, strict=True)]
        for names, before in zip(new, self._reported, strict=True):
            before.update(names)
        for key in {key for key, names, _ in list(self._counted) if not set(names).isdisjoint(new[1])}:
            self.on_constant(key)
        return new[0], new[1]

    def _wanted(self, call: Mapping[str, Any]) -> _Traced | None:
        """The frame that Dynamo begins to trace (arguments of convert_frame._compile), if its sizes are looked at."""
        from .programs import frames

        config = torch._dynamo.config
        if not config.automatic_dynamic_shapes or not config.assume_static_by_default or call["export"]:
            return None
        if process_groups.has_peers():  # all ranks would have to know the same
            return None
        compiler, _ = frames.back_end(call)
        return _Traced(call) if getattr(compiler, "compiler_fn", compiler) is self._backend else None

    def _with_symbols(self, name: str, entry: Any) -> Any:
        """What Dynamo remembers of an input (FrameStateSizeEntry), with symbols for what is known to vary. What Dynamo
        itself remembers stays as it is."""
        traced, known = self._thread.traced, self._known()
        if traced is None or not known:
            return entry
        from torch._dynamo.pgo import auto_dynamic

        changes: dict[str, Any] = {}
        if isinstance(entry.size, tuple):
            dims = [dim for dim in range(len(entry.size)) if traced.named(name, dim) in known]
            size = tuple(auto_dynamic if dim in dims else each for dim, each in enumerate(entry.size))
            changes = {"size": size} if dims else {}
        elif type(entry.scalar) is int and traced.named(name) in known:
            changes = {"scalar": auto_dynamic}
        if not changes:
            return entry
        _log.info("torchrelay: %s varied in earlier runs, and is traced with symbols", name)
        return dataclasses.replace(entry, **changes)


class _Traced:
    """A frame that is being traced. call: the arguments of convert_frame._compile."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        self._call = call
        self._gradients = torch.is_grad_enabled()  # tracing changes it

    @functools.cached_property
    def _digest(self) -> str:
        from .programs import frames

        code, scope = self._call["code"], self._call["globals"]
        name = str(scope.get("__name__")), code.co_qualname, digests.frame_digest(code, scope)
        return repr((*name, frames.modules_digest(self._call["locals"]), self._gradients))

    def named(self, source: str, dim: int | None = None) -> str:
        """The digest of a size of the frame's inputs; dim: None for an integer."""
        return hashlib.sha256(repr((self._digest, source, dim)).encode()).hexdigest()


class _Thread(threading.local):
    traced: _Traced | None = None


def _sizes(value: Any) -> Iterator[tuple[str, int | None]]:
    """The sizes and integers that vary with a graph's input, if it is a symbol: those that it stands for, and those
    that the trace found to be equal to it or computed from it (ShapeEnv.var_to_sources, replace)."""
    from torch._dynamo.source import TensorProperty, TensorPropertySource

    symbol = symbolic_shapes.sym_expr(value) if isinstance(value, torch.SymInt) else None
    if not isinstance(symbol, sympy.Symbol):
        return
    env = symbolic_shapes.sym_env(value)
    for other, sources in list(env.var_to_sources.items()):
        for source in sources if symbol in env.replace(other).free_symbols else ():
            if not isinstance(source, TensorPropertySource):
                yield source.name, None
            elif source.prop is TensorProperty.SIZE:
                yield source.base.name, source.idx
