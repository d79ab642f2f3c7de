"""A program's graphs run on the GPU that they were traced for, whichever is the current one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from request_parts import GPU, request_of
from torchrelay.clients.artifacts.programs import process_programs
from torchrelay.clients.artifacts.programs.process_programs import ProcessPrograms
from torchrelay.clients.artifacts.programs.store import ProgramStore
from torchrelay.compiler.artifact.programs.records import ProgramGraph
from torchrelay.compiler.request import schema
from torchrelay.compiler.torch_internals.dynamo.programs.frames import FrameName
from torchrelay.compiler.torch_internals.inductor.config import inductor_config

FRAME = FrameName("module", "function", "0" * 64, False, None)


def request(*inputs: schema.Input) -> bytes:
    return msgspec.msgpack.encode(request_of([], inputs, target=GPU))


INPUT = schema.TensorInput(shape=[2], stride=[1], dtype="float32", device="cuda", requires_grad=True)


class Source:
    """Notes what is asked for."""

    def __init__(self) -> None:
        self.devices: list[int | None] = []

    def may_begin_eagerly(self, background: bool | None) -> bool:
        return False

    def obtain(self, wanted: Any) -> Any:
        self.devices.append(wanted.captured.device_index)
        return SimpleNamespace(outcome="disk_hit", key=wanted.key, compiled=print, digest="")


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(process_programs, "other_settings", lambda *_: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Source()


def obtained(source: Any, tmp_path: Path, body: bytes, device: int) -> Any:
    programs = ProcessPrograms(None, ProgramStore(tmp_path, tmp_path), lambda: source)
    return programs.graph(FRAME, ProgramGraph("graph", "1" * 64, body, device=device))


def test_inputs_on_another_gpu_than_the_current_one(source: Source, tmp_path: Path) -> None:
    assert obtained(source, tmp_path, request(INPUT), 1) is print
    assert source.devices == [1]


def test_a_graph_without_inputs_is_traced_for_another_current_gpu(source: Source, tmp_path: Path) -> None:
    assert obtained(source, tmp_path, request(), 0) is print
    assert "because of another GPU" in obtained(source, tmp_path, request(), 1)
    assert source.devices == [0]


def test_a_graph_whose_trace_is_to_be_written_is_traced(source: Source, tmp_path: Path) -> None:
    """As with TORCH_COMPILE_DEBUG=1: its files are written when the back end is given the graph."""
    assert obtained(source, tmp_path, request(INPUT), 0) is print
    with inductor_config({"trace.enabled": True}):
        assert "Inductor's trace" in obtained(source, tmp_path, request(INPUT), 0)
