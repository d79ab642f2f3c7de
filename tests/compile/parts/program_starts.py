"""One module's text, run as a new process would run it: without a compiler, traced anew, or from recorded programs."""

from __future__ import annotations

import contextlib
import hashlib
import linecache
import random
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec import Struct
from torch import nn
from torchrelay.clients.artifacts.programs import process_programs
from torchrelay.compiler import decoding
from torchrelay.compiler.artifact.programs.records import FrameProgram, ProgramGraph, in_order
from torchrelay.compiler.graph.capture import _hoist_tensors
from torchrelay.compiler.torch_internals.dynamo.programs import frames, recording

MODULE = "changed_program"
"""The name under which each text is imported."""
Around = Callable[[], contextlib.AbstractContextManager[Any]]


class Start(Struct, frozen=True):
    """What one start of a program gave. how: "traced", "used" (records alone), "partly" or "nothing" (no frame of it
    was compiled). graphs: how many were
    captured. reasons: why a frame has no record, or why its records do not fit."""

    results: list[Any]
    how: str = "nothing"
    graphs: int = 0
    reasons: tuple[str, ...] = ()


class Recorded:
    """Programs that are kept as the store keeps them, in this process, whose graphs run as they were captured."""

    def __init__(self) -> None:
        self._kept: defaultdict[str, list[bytes]] = defaultdict(list)
        self._graphs: dict[bytes, Callable[..., Any]] = {}
        self.made_now = self.used_now = self.graphs_now = 0
        self.reasons: list[str] = []
        self.checking = False
        self.checks_now: list[str] = []
        """What a start's checks of records found."""

    def backend(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        gm, held = _hoist_tensors(gm, inputs)

        def compiled(*given: Any) -> Any:
            return gm.forward(*given, *held.values())

        self.graphs_now += 1
        if not holds_tensors(gm):
            text = gm.print_readable(print_output=False) + repr(
                [getattr(each, "shape", None) for each in inputs]
            )
            key = hashlib.sha256(text.encode()).hexdigest()
            request = str(len(self._graphs)).encode()
            self._graphs[request] = gm.forward
            recording.note_graph(compiled, ProgramGraph("", key, request), held.values())
        return compiled

    def wants(self, compiler: Any) -> bool:
        return bool(getattr(compiler, "compiler_fn", compiler) == self.backend)

    def uninterrupted(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def starting(self, frame: frames.FrameName) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def timed(self, part: frames.Part) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def key(self, frame: frames.FrameName) -> str:
        return process_programs._key(frame)

    def find(self, key: str) -> Sequence[FrameProgram]:
        return in_order([decoding.from_msgpack(each, type=FrameProgram) for each in self._kept[key]])

    def graph(self, frame: frames.FrameName, record: ProgramGraph) -> Callable[..., Any] | None:
        return self._graphs[record.request]

    def checks(self) -> bool:
        return self.checking

    def changed(self, frame: frames.FrameName, record: ProgramGraph) -> str:
        return ""

    def checked(self, frame: frames.FrameName, key: str, record: FrameProgram, difference: str) -> None:
        self.checks_now.append(difference)
        if difference:
            self._kept[key].remove(msgspec.msgpack.encode(record))

    def made(
        self, frame: frames.FrameName, key: str, program: FrameProgram, instead: FrameProgram | None = None
    ) -> None:
        self.made_now += 1
        self._kept[key].append(msgspec.msgpack.encode(program))

    def unfit(self, frame: frames.FrameName, reason: str) -> None:
        self.reasons.append(f"{frame.name}: {reason}")

    def used(self, frame: frames.FrameName, key: str, record: FrameProgram) -> None:
        self.used_now += 1


def holds_tensors(gm: torch.fx.GraphModule) -> bool:
    """A graph's own tensors come from the process that captured it: the client hoists them, and notes no graph."""
    return any(True for _ in gm.parameters()) or any(
        isinstance(value, torch.Tensor) for module in gm.modules() for value in vars(module).values()
    )


def without_compiler(
    file: Path, text: str, around: Around = contextlib.nullcontext, patch: Any = None
) -> Start:
    with _imported(file, text, patch) as module:
        return Start(_results(module, module.program, around))


def traced(file: Path, text: str, around: Around = contextlib.nullcontext, patch: Any = None) -> Start:
    torch.compiler.reset()
    with _imported(file, text, patch) as module:
        return Start(_results(module, _compiled(module, Recorded()), around), "traced")


def from_records(
    programs: Recorded, file: Path, text: str, around: Around = contextlib.nullcontext, patch: Any = None
) -> Start:
    torch.compiler.reset()
    programs.made_now = programs.used_now = programs.graphs_now = 0
    programs.reasons, programs.checks_now = [], []
    uninstall = frames.install(programs)
    try:
        with _imported(file, text, patch) as module:
            results = _results(module, _compiled(module, programs), around)
    finally:
        uninstall()
    made, used, reasons = programs.made_now, programs.used_now, tuple(programs.reasons)
    again = bool(made or reasons)
    how = ("partly" if again else "used") if used else ("traced" if again else "nothing")
    return Start(results, how, programs.graphs_now, reasons)


def _compiled(module: Any, programs: Recorded) -> Any:
    options = {"guard_filter_fn": module.guard_filter} if hasattr(module, "guard_filter") else None
    dynamic = getattr(module, "dynamic", None)
    return torch.compile(module.program, backend=programs.backend, dynamic=dynamic, options=options)


@contextlib.contextmanager
def _imported(file: Path, text: str, patch: Any) -> Iterator[types.ModuleType]:
    """The module, in a process that has not seen it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    linecache.checkcache(str(file))
    torch.manual_seed(0)
    module = types.ModuleType(MODULE)
    module.__file__ = str(file)
    sys.modules[MODULE] = module
    try:
        exec(compile(text, str(file), "exec"), vars(module))
        with pytest.MonkeyPatch.context() as monkeypatch:
            if patch is not None:
                patch(monkeypatch, module)
            yield module
    finally:
        for undo in getattr(module, "undo", ()):
            undo()
        del sys.modules[MODULE]


def _results(module: Any, program: Callable[..., Any], around: Around) -> list[Any]:
    """Of each call: what it returns or raises, all gradients, and what the module's `state` tells."""
    found: list[Any] = []
    torch.manual_seed(0)
    random.seed(0)  # what an earlier start has left is not there in a new process
    for arguments in module.inputs():
        with around():
            try:
                returned = program(*arguments)
            except Exception as error:
                found.append([type(error).__name__, str(error).partition("\n")[0]])
                continue
        found.append(_plain(returned))
        leaves = [each for each in _tensors(returned) if each.requires_grad and each.dtype.is_floating_point]
        if leaves:
            torch.autograd.backward([each.sum() for each in leaves])
        learned = list(module.program.parameters()) if isinstance(module.program, nn.Module) else []
        found += [_plain(each.grad) for each in (*_tensors(list(arguments)), *learned) if each.is_leaf]
        found.append(_plain(list(_tensors(list(arguments)))))
        if hasattr(module, "state"):
            found.append(_plain(module.state()))
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    match value:
        case torch.Tensor():
            yield value
        case list() | tuple() | set():
            for part in value:
                yield from _tensors(part)
        case dict():
            yield from _tensors(list(value.values()))


def _plain(value: Any) -> Any:
    """The value as plain ones, equal if and only if all numbers are."""
    match value:
        case torch.Tensor():
            plain = value.detach().as_subclass(torch.Tensor)
            shown = (plain if plain.is_complex() else plain.to(torch.float64)).tolist()
            return [str(value.dtype), list(value.shape), value.requires_grad, repr(shown)]
        case list() | tuple():
            return [type(value).__name__, *(_plain(part) for part in value)]
        case dict():
            return ["dict", *([repr(key), _plain(part)] for key, part in value.items())]
    return repr(value)
