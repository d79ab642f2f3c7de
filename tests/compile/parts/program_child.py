"""Starts of programs in a process of its own: in: folders of modules and of records, a file of names; out: JSON.

Graphs are not compiled: each runs as its request describes it, and refuses other inputs than it describes, which
compiled code would misread. All else is as the client does it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torchrelay.clients.artifacts.programs.process_programs import ProcessPrograms
from torchrelay.clients.artifacts.programs.store import ProgramStore
from torchrelay.clients.artifacts.source import ArtifactRequest, LoadedArtifact
from torchrelay.compiler.artifact.programs.records import FrameProgram, ProgramGraph
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.graph.decode import decode_graph
from torchrelay.compiler.request import codec, key, schema
from torchrelay.compiler.torch_internals.dynamo.programs import frames, recording


class Programs(ProcessPrograms):
    """Counts the functions that started without tracing, and keeps why others did not."""

    def __init__(self, folder: Path, state: Path) -> None:
        super().__init__(uncompiled, ProgramStore(folder, state), RequestedGraphs)  # type: ignore[arg-type]
        self.started = self.recorded = 0
        self.reasons: list[str] = []

    def used(self, frame: frames.FrameName, key: str, record: FrameProgram) -> None:
        self.started += 1

    def made(
        self, frame: frames.FrameName, key: str, program: FrameProgram, instead: FrameProgram | None = None
    ) -> None:
        self.recorded += 1
        super().made(frame, key, program, instead)

    def unfit(self, frame: frames.FrameName, reason: str) -> None:
        self.reasons.append(reason)


class RequestedGraphs:
    """A source of artifacts: the graphs of their requests."""

    def may_begin_eagerly(self, background: bool | None) -> bool:
        return False

    def obtain(self, wanted: ArtifactRequest) -> LoadedArtifact:
        request = wanted.captured.request
        graph = graph_of(request)

        def run(*given: Any) -> Any:
            sizes: dict[str, int] = {}
            for each, described in zip(given, request.inputs, strict=True):
                check(each, described, sizes)
            return graph(*given)

        return LoadedArtifact(wanted.key, run, "disk_hit", b"")


def check(given: Any, described: schema.Input, sizes: dict[str, int]) -> None:
    """Raises if an input is not as its request describes it. sizes: the value of each symbol seen so far."""
    match described:
        case schema.SymIntInput(expr):
            equal(int(given), expr, sizes, "size")
        case schema.ScalarInput(value):
            if type(given) is not type(value) or repr(given) != repr(value):
                raise Misread(f"{given!r} is given for {value!r}")
        case schema.TensorInput():
            wanted = (described.dtype, described.device, described.requires_grad)
            found = (str(given.dtype).removeprefix("torch."), given.device.type, given.requires_grad)
            if found != wanted:
                raise Misread(f"a tensor of {found} is given for one of {wanted}")
            for what, got, expected in (
                ("dimensions", given.shape, described.shape),
                ("strides", given.stride(), described.stride),
            ):
                if len(got) != len(expected):
                    raise Misread(f"{what} {tuple(got)} are given for {expected}")
                for one, expression in zip(got, expected, strict=True):
                    equal(one, expression, sizes, what)


def equal(given: int, expression: schema.Size, sizes: dict[str, int], what: str) -> None:
    known = sympy.sympify(expression, locals={str(each): each for each in map(sympy.Symbol, sizes)})
    if known.is_Symbol and str(known) not in sizes:
        sizes[str(known)] = given
    elif not (value := known.subs(sizes)).free_symbols and int(value) != given:
        raise Misread(f"{what}: {given} is given for {expression} with {sizes}")


class Misread(Exception):
    """Compiled code would read an input as something else than it is."""


def graph_of(request: schema.GraphRequest) -> Callable[..., Any]:
    return decode_graph(request.graph, request.constants, device_index={}, symbols={}).forward


def uncompiled(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    request = capture(gm, inputs, mode="default", options={}).request
    canonical = codec.encode_request(request)
    compiled = graph_of(request)
    recording.note_graph(compiled, ProgramGraph("", key.key_of(request, canonical), canonical))
    return compiled


def started(name: str, folder: Path) -> dict[str, Any]:
    torch.compiler.reset()
    module = importlib.import_module(name)
    programs = Programs(folder / name, folder)
    uninstall = frames.install(programs)
    try:
        compiled = torch.compile(module.program, backend=uncompiled)
        results = [
            [answer(module, compiled, each), answer(module, module.program, each)] for each in module.inputs()
        ]
    finally:
        uninstall()
        for each in (module, getattr(module, "other", None)):
            for undo in getattr(each, "undo", ()):
                undo()
    return {
        "started": programs.started,
        "made": programs.recorded,
        "reasons": programs.reasons,
        "results": results,
    }


def answer(module: Any, program: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """What a call returns, or the error that it raises."""
    torch.manual_seed(0)
    with getattr(module, "surroundings", contextlib.nullcontext)():
        try:
            return plain(program(*arguments))
        except Exception as error:
            return type(error).__name__


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.dtype is torch.float32 else [str(value.dtype), repr(value.tolist())]
    return [plain(each) for each in value] if isinstance(value, list | tuple) else repr(value)


if __name__ == "__main__":
    where, records, names = map(Path, sys.argv[1:])
    sys.path.insert(0, str(where))
    print(json.dumps({name: started(name, records) for name in names.read_text().split()}))
