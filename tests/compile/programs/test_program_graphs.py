"""The graphs of a record: each is the one whose artifact the record was made with, or the record is not used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from program_starts import Recorded, from_records, without_compiler
from torchrelay.clients.artifacts.programs.process_programs import ProcessPrograms
from torchrelay.clients.artifacts.programs.store import ProgramStore
from torchrelay.clients.artifacts.source import ArtifactRequest, LoadedArtifact
from torchrelay.compiler.artifact.programs.records import ProgramGraph
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.graph.decode import decode_graph
from torchrelay.compiler.request import codec, key, schema
from torchrelay.compiler.torch_internals.dynamo.programs.frames import FrameName


class Source:
    """Has an artifact for each graph, whose file is `data`."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def may_begin_eagerly(self, background: bool | None) -> bool:
        return False

    def obtain(self, wanted: ArtifactRequest) -> LoadedArtifact:
        request = wanted.captured.request
        compiled = decode_graph(request.graph, request.constants, device_index={}, symbols={}).forward
        return LoadedArtifact(wanted.key, compiled, "disk_hit", self.data)


Find = Callable[..., Callable[..., Any] | str]


@pytest.fixture
def find(tmp_path: Path) -> Find:
    """What `ProcessPrograms.graph` says of a recorded graph, x * 2, when the artifact's file is `data`."""
    requests: list[schema.GraphRequest] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        requests.append(capture(gm, inputs, mode="default", options={}).request)
        return gm.forward

    torch.compiler.reset()
    torch.compile(lambda x: x * 2, backend=backend)(torch.ones(3))
    (request,) = requests
    canonical = codec.encode_request(request)
    record = ProgramGraph("compiled", key.key_of(request, canonical), canonical)
    frame = FrameName("program", "program", "", False, backend)

    def graph(artifact: str, data: bytes) -> Callable[..., Any] | str:
        store = ProgramStore(tmp_path, tmp_path)
        programs = ProcessPrograms(backend, store, lambda: Source(data))  # type: ignore[arg-type, return-value]
        return programs.graph(frame, msgspec.structs.replace(record, artifact=artifact))

    return graph


def test_a_record_that_names_an_artifact_is_used_with_that_one_alone(find: Find) -> None:
    named = hashlib.sha256(b"an artifact").hexdigest()
    for artifact in (named, ""):
        found = find(artifact, b"an artifact")
        assert not isinstance(found, str), found
        torch.testing.assert_close(found(torch.ones(3))[0], torch.full((3,), 2.0))
    assert find(named, b"another artifact") == (
        "the artifact of a graph is another one now, and may assume other sizes"
    )
    assert not isinstance(find("", b"another artifact"), str)


class Guarding(Recorded):
    """Adds the guards that the client adds as it prepares a graph."""

    def backend(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        capture(gm, inputs, mode="default", options={})
        return super().backend(gm, inputs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_for_inputs_that_overlap_is_used_for_no_others(tmp_path: Path, dynamic: bool) -> None:
    text = f"""import torch

dynamic = {dynamic or None}


def inputs():
    base, other = torch.ones(7, 4), torch.ones(9, 4)
    return [(base[:3], base[1:4]), (other[:3], other[1:4]), (torch.ones(3, 4), torch.ones(3, 4))]


def program(x, y):
    x.add_(1)
    return y * 2
"""
    programs, file = Guarding(), tmp_path / "program.py"
    first = from_records(programs, file, text)
    second = from_records(programs, file, text)
    assert first.results == second.results == without_compiler(file, text).results
    assert (first.how, second.how, second.graphs) == ("traced", "used", 0)
    assert first.graphs == programs.used_now == (2 if dynamic else 3)
    programs.checking = True
    from_records(programs, file, text)
    assert set(programs.checks_now) == {""}
