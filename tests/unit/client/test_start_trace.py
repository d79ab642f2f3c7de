"""The trace of a start: what was timed becomes spans in the Trace Event Format, which lie in each other as they ran."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torchrelay.clients.reports.run_report import RunReport
from torchrelay.clients.reports.start_trace import StartTrace


def written(trace: StartTrace, folder: Path) -> list[dict[str, Any]]:
    trace.write(folder / "new" / "trace.json")
    events = json.loads((folder / "new" / "trace.json").read_bytes())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def ends(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def test_stages_lie_in_the_spans_around_them_and_after_the_start_of_the_process(tmp_path: Path) -> None:
    run = RunReport()
    trace = StartTrace()
    run.trace = trace
    with run.function("train.Net.forward"):
        with run.timed("lookup"):
            pass
        with run.timed("guards"):
            sum(range(1000))
    before, function, lookup, guards = written(trace, tmp_path)
    assert (before["name"], before["ts"]) == ("before torchrelay", 0)
    assert [each["name"] for each in (function, lookup, guards)] == ["train.Net.forward", "lookup", "guards"]
    assert [each["cat"] for each in (function, lookup, guards)] == ["function", "stage", "stage"]
    assert ends(before) <= function["ts"] <= lookup["ts"]
    assert ends(lookup) <= guards["ts"] < ends(guards) <= ends(function)
    assert guards["dur"] == pytest.approx(run.snapshot().seconds["guards"] * 1e6)


def test_a_graph_is_named_by_its_key_and_says_what_became_of_it(tmp_path: Path) -> None:
    run = RunReport()
    run.trace = StartTrace()
    run.record("miss", key="ab" * 32, began=time.perf_counter() - 0.25, nodes=7)
    run.record("hit", key="cd" * 32, seconds=99.0, nodes=8)
    by_name = {each["name"]: each for each in written(run.trace, tmp_path)}
    graph, moment = by_name["graph abababababab"], by_name["graph cdcdcdcdcdcd"]
    assert graph["dur"] >= 0.25e6
    assert graph["args"] == {"outcome": "miss", "nodes": 7, "reason": ""}
    assert moment["dur"] == 0, "it ran in the background, while the program did other things"


def test_only_the_first_call_is_a_span(tmp_path: Path) -> None:
    run = RunReport()
    run.trace = StartTrace()
    double = run.first_call("ab" * 32, lambda x: 2 * x)
    assert [double(1), double(2)] == [2, 4]
    assert [each["name"] for each in written(run.trace, tmp_path)][1:] == ["first call of graph abababababab"]


def test_without_a_trace_functions_and_graphs_are_left_as_they_are() -> None:
    run = RunReport()
    assert run.first_call("ab" * 32, written) is written
    with run.function("f"):
        pass


def test_each_thread_has_its_own_row(tmp_path: Path) -> None:
    run = RunReport()
    run.trace = StartTrace()
    thread = threading.Thread(target=lambda: run.add_seconds("load", 0.5))
    run.add_seconds("load", 0.5)
    thread.start()
    thread.join()
    rows = {each["tid"] for each in written(run.trace, tmp_path) if each["name"] == "load"}
    assert len(rows) == 2


def test_a_trace_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrelay.clients.reports.start_trace.SPANS_KEPT", 3)
    run = RunReport()
    run.trace = StartTrace()
    for _ in range(5):
        run.add_seconds("load", 1.0)
    assert len(run.trace.spans) == 3
    assert run.snapshot().seconds["load"] == 5.0


def test_imports_are_spans_each_in_the_one_that_needs_it(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text("import time, inner\ntime.sleep(0.01)\n")
    (tmp_path / "inner.py").write_text("import time\ntime.sleep(0.01)\n")
    script = (
        "import torchrelay\n"
        "torchrelay.enable()\n"
        "import outer\n"
        "from torchrelay.clients.reports.run_report import process_report\n"
        "process_report().write_trace_at_exit(__import__('pathlib').Path('trace.json'))\n"
        "raise SystemExit(3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path), "TORCHRELAY_TRACE": "trace.json"},
    )
    assert done.returncode == 3
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    outer, inner = (next(e for e in events if e["name"] == f"import {n}") for n in ("outer", "inner"))
    assert outer["ts"] <= inner["ts"] < ends(inner) < ends(outer)


def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    run = RunReport()
    run.trace = StartTrace()
    for _ in range(2):
        run.write_trace_at_exit(tmp_path)  # a folder
    (write,) = at_exit
    with caplog.at_level(logging.WARNING):
        write()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(tmp_path) in caplog.text
