"""One process, one small model of the zoo, with programs: in: a name, a folder, out: one line of JSON on stdout.

No graph is compiled: each runs as the request of its artifact describes it, so that a start costs no g++. All else is
the client's own: programs are looked up, made again, checked, recorded and kept as with a service. `functions` counts
those that Dynamo made code of, with their variants; it gives others up, in a trace that each start repeats. `reasons`
tell for each that was traced why. With --check, each function is traced, and its
program compared with the trace: `checked` counts them, `stale` says how they differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrelay.clients.artifacts.programs.process_programs import ProcessPrograms
from torchrelay.clients.artifacts.programs.store import ProgramStore
from torchrelay.clients.artifacts.source import ArtifactRequest, LoadedArtifact
from torchrelay.compiler.artifact.programs.records import FrameProgram, ProgramGraph
from torchrelay.compiler.errors import RelayError
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.graph.decode import decode_graph
from torchrelay.compiler.request import codec, key, schema
from torchrelay.compiler.torch_internals.dynamo.programs import frames, recording

sys.path.append(str(Path(__file__).resolve().parents[1]))
from zoo_models import registry
from zoo_models.entry import tensors_in


class Functions(ProcessPrograms):
    """Counts what Dynamo made code of."""

    found = started = checks_made = 0
    is_compiled = False

    def __init__(self, folder: Path, *, check: bool) -> None:
        super().__init__(uncompiled, ProgramStore(folder, folder), RequestedGraphs, check_one_in=int(check))
        self.stale: list[str] = []
        self.reasons: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def starting(self, frame: frames.FrameName) -> Iterator[None]:
        self.is_compiled = False
        with super().starting(frame):
            yield
        self.found += self.is_compiled

    def used(self, frame: frames.FrameName, key: str, record: FrameProgram) -> None:
        self.is_compiled = True
        self.started += 1

    def made(
        self, frame: frames.FrameName, key: str, program: FrameProgram, instead: FrameProgram | None = None
    ) -> None:
        self.is_compiled = True
        super().made(frame, key, program, instead)

    def checked(self, frame: frames.FrameName, key: str, record: FrameProgram, difference: str) -> None:
        self.is_compiled = True
        self.checks_made += 1
        self.stale += [difference] if difference else []

    def unfit(self, frame: frames.FrameName, reason: str) -> None:
        self.is_compiled = True
        self.reasons.append((f"{frame.module}.{frame.name}", reason))


class RequestedGraphs:
    """A source of artifacts: the graphs of their requests."""

    def may_begin_eagerly(self, background: bool | None) -> bool:
        return False

    def obtain(self, wanted: ArtifactRequest) -> LoadedArtifact:
        return LoadedArtifact(wanted.key, graph_of(wanted.captured.request), "disk_hit", b"")


def graph_of(request: schema.GraphRequest) -> Callable[..., Any]:
    return decode_graph(request.graph, request.constants, device_index={}, symbols={}).forward


def uncompiled(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The back end: a graph as its request describes it, noted as the client notes it."""
    try:
        captured = capture(gm, inputs, mode="default", options={})
    except RelayError as error:
        programs.reasons.append(("a graph", str(error)))
        return gm.forward
    if (
        captured.hoisted or captured.edges or captured.floats
    ):  # then the request alone does not say how it is called
        return gm.forward
    request = captured.request
    canonical = codec.encode_request(request)
    compiled = graph_of(request)
    recording.note_graph(compiled, ProgramGraph("", key.key_of(request, canonical), canonical))
    return compiled


def main() -> dict[str, Any]:
    torch.manual_seed(0)
    entry = registry.model(args.model)
    assert entry.build is not None, entry.missing
    built = entry.build(True)
    model = built.model
    frames.install(programs)
    compiled = torch.compile(model, backend=uncompiled)
    torch.manual_seed(1)
    began = time.perf_counter()
    outputs = compiled(*built.args, **built.kwargs)
    loss = built.loss(outputs) if built.loss is not None else total(outputs)
    if loss.requires_grad:
        loss.backward()
    seconds = time.perf_counter() - began
    gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return {
        "status": "pass",
        "seconds": seconds,
        "functions": programs.found,
        "started": programs.started,
        "checked": programs.checks_made,
        "stale": programs.stale,
        "reasons": programs.reasons,
        "loss": loss.item(),
        "gradient_norm": torch.stack(gradients).norm().item() if gradients else 0.0,
    }


def total(outputs: Any) -> Tensor:
    """For a model that is not trained."""
    return torch.stack([each.detach().double().sum() for each in tensors_in(outputs)]).sum()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    programs = Functions(args.folder, check=args.check)
    print(json.dumps(main()))
