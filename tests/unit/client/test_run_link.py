"""The line that a script prints when it ends: once, and never in the way of the program's end."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import pytest
from torchrelay.clients.gateway import compile_client, run_link
from torchrelay.clients.settings import ClientSettings, load_settings
from torchrelay.compiler.api.runs import GraphRecord, RunRecord, RunReply
from torchrelay.compiler.errors import Forbidden, GatewayUnreachable, NotFound

GRAPH = GraphRecord(key="", outcome="hit", seconds=1.0, nodes=1)
SAID = "torchrelay: 1 graph, 1 hit, saved 3 min 10 s, http://relay:1/runs/ab\n"


def record(**more: Any) -> RunRecord:
    fields: dict[str, Any] = {"program": "train.py", "pid": 1, "ended": 1.0, "graphs": (GRAPH,), "hits": 1}
    return RunRecord(**fields | more)


class Gateway:
    answer: RunReply | Exception = RunReply("ab", "/runs/ab", 190.0)
    told: list[RunRecord]

    def __init__(self, settings: ClientSettings) -> None:
        pass

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def record_run(self, told: RunRecord) -> RunReply:
        self.told.append(told)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> type[Gateway]:
    monkeypatch.setattr(Gateway, "told", [], raising=False)
    monkeypatch.setattr(compile_client, "GatewayClient", Gateway)
    return Gateway


@pytest.fixture
def settings() -> ClientSettings:
    return load_settings(url="http://relay:1", token="t")


@pytest.mark.parametrize(("rank", "said"), [(None, SAID), (0, SAID), (1, "")])
def test_the_first_rank_alone_prints(
    rank: int | None, said: str, gateway: type[Gateway], settings: ClientSettings, capsys: Any
) -> None:
    run_link.tell(settings, record(rank=rank))
    assert len(gateway.told) == 1 and capsys.readouterr().err == said


def test_a_process_that_multiprocessing_started_prints_nothing(
    gateway: type[Gateway], settings: ClientSettings, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    run_link.tell(settings, record())
    assert len(gateway.told) == 1 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "error", [NotFound("no such path"), Forbidden("no"), GatewayUnreachable("gone"), ValueError("\\udcff")]
)
def test_a_gateway_that_does_not_take_it_is_no_matter(
    error: Exception,
    gateway: type[Gateway],
    settings: ClientSettings,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "answer", error)
    run_link.tell(settings, record())
    assert capsys.readouterr().err == ""


def test_a_run_that_could_not_reach_the_gateway_does_not_wait_for_it_again(
    gateway: type[Gateway], settings: ClientSettings
) -> None:
    run_link.tell(settings, record(fallbacks={"gateway_unreachable": 1}))
    assert gateway.told == []


def test_a_program_may_have_closed_its_stderr(
    gateway: type[Gateway], settings: ClientSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    with (tmp_path / "log").open("w") as closed:
        pass
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        run_link.tell(settings, record())
    assert len(gateway.told) == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (190, "3 min 10 s"), (7500, "2 h 5 min")],
)
def test_durations_are_read_easily(seconds: float, text: str) -> None:
    assert run_link.duration(seconds) == text


def test_what_nobody_saved_is_not_said() -> None:
    told = record(graphs=(GRAPH, GRAPH), fallbacks={"unsupported": 1}, programs=2)
    line = run_link.line(told, RunReply("ab", "/runs/ab", 0.2), "http://relay:1")
    said = "torchrelay: 2 graphs, 1 hit, 1 compiled locally, 2 started without tracing"
    assert line == f"{said}, http://relay:1/runs/ab"
