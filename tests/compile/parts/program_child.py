"""Starts of programs in a process of its own: in: a folder with their modules and records, and names; out: JSON.

Graphs are not compiled: each runs as its request describes it. All else is as the client does it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torchrelay.clients.artifacts.programs.process_programs import ProcessPrograms
from torchrelay.clients.artifacts.programs.store import ProgramStore
from torchrelay.clients.artifacts.source import ArtifactRequest, LoadedArtifact
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.graph.decode import decode_graph
from torchrelay.compiler.request import codec, key, schema
from torchrelay.compiler.torch_internals.dynamo.programs import frames, recording


class Programs(ProcessPrograms):
    """Counts the functions that started without tracing, and keeps why others did not."""

    def __init__(self, folder: Path) -> None:
        super().__init__(uncompiled, ProgramStore(folder, folder), RequestedGraphs)
        self.started = 0
        self.reasons: list[str] = []

    def used(self, frame: frames.FrameName) -> None:
        self.started += 1

    def unfit(self, frame: frames.FrameName, reason: str) -> None:
        self.reasons.append(reason)


class RequestedGraphs:
    """A source of artifacts: the graphs of their requests."""

    def may_begin_eagerly(self, background: bool | None) -> bool:
        return False

    def obtain(self, wanted: ArtifactRequest) -> LoadedArtifact:
        return LoadedArtifact(wanted.key, graph_of(wanted.captured.request), "disk_hit", b"")


def graph_of(request: schema.GraphRequest) -> Callable[..., Any]:
    return decode_graph(request.graph, request.constants, device_index={}, symbols={}).forward


def uncompiled(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    request = capture(gm, inputs, mode="default", options={}).request
    canonical = codec.encode_request(request)
    compiled = graph_of(request)
    recording.note_graph(compiled, key.key_of(request, canonical), canonical)
    return compiled


def started(name: str, folder: Path) -> dict[str, Any]:
    torch.compiler.reset()
    module = importlib.import_module(name)
    programs = Programs(folder)
    uninstall = frames.install(programs)
    try:
        compiled = torch.compile(module.program, backend=uncompiled)
        results = [[compiled(*each).tolist(), module.program(*each).tolist()] for each in module.inputs()]
    finally:
        uninstall()
    return {"started": programs.started, "reasons": programs.reasons, "results": results}


if __name__ == "__main__":
    where = Path(sys.argv[1])
    sys.path.insert(0, str(where))
    print(json.dumps({name: started(name, where) for name in sys.argv[2:]}))
