"""Programs on this machine: ranks of a job start at one time, and share a folder."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path

import pytest
from torchrelay.clients.artifacts.programs import store
from torchrelay.clients.artifacts.programs.store import ProgramStore
from torchrelay.compiler.artifact.programs.records import FrameProgram, ProgramGraph

PROGRAM = FrameProgram(
    bytecode=b"bytecode",
    constants=[],
    sources=[],
    guards=[],
    key_order=[],
    sizes=[],
    shapes=[],
    automatic=[],
    same_inputs=[],
    builtins="",
    globals=[],
    graphs=[ProgramGraph("compiled", "0" * 64, b"request")],
    traced=[],
    asked=[],
    registered=[],
    kernels="",
)


def test_ranks_that_start_at_one_time_make_one_key_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[threading.Thread] = []
    token_bytes = secrets.token_bytes

    def while_another_starts(count: int) -> bytes:
        if not others:
            second = ProgramStore(tmp_path / "cache", tmp_path / "state")
            others.append(threading.Thread(target=second.add, args=("second", PROGRAM)))
            others[0].start()
            others[0].join(0.5)  # it waits for the key, or has failed
        return token_bytes(count)

    monkeypatch.setattr(store.secrets, "token_bytes", while_another_starts)
    first = ProgramStore(tmp_path / "cache", tmp_path / "state")
    first.add("first", PROGRAM)
    others[0].join()
    for reader in (first, ProgramStore(tmp_path / "cache", tmp_path / "state")):
        assert [reader.read(name) for name in ("first", "second")] == [[PROGRAM], [PROGRAM]]
