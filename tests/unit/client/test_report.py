"""The run's report: everything counted, one warning for each reason, written at exit when asked."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torchrelay
from msgspec.structs import replace
from torchrelay.clients.reports.run_report import (
    FallbackWarning,
    RunReport,
    StaleProgramWarning,
    last_run,
)
from torchrelay.compiler.api.runs import GraphRecord, RefusedOperator
from torchrelay.compiler.errors import (
    ClientError,
    CompileTimeout,
    GatewayUnreachable,
    JobUnreachable,
    LocalCompileFailed,
    NoWorker,
    ResultsDiffer,
    SignatureError,
    Unsupported,
)


def test_each_outcome_counts_in_its_own_place() -> None:
    run = RunReport()
    run.record("hit", key="a" * 64, seconds=0.5, nodes=7)
    run.record("hit")
    run.record("disk_hit")
    run.record("miss")
    run.record("coalesced")
    run.record("shared")
    found = run.snapshot()
    assert (found.hits, found.disk_hits, found.misses, found.coalesced, found.shared) == (2, 1, 1, 1, 1)
    assert (found.graphs[0].key, found.graphs[0].seconds, found.graphs[0].nodes) == ("a" * 64, 0.5, 7)
    assert found.graphs[0].reason == ""


def test_each_artifact_that_differs_from_eager_is_named() -> None:
    run = RunReport()
    for name in ("a", "b"):
        run.count("checked")
        with pytest.warns(FallbackWarning, match=f"a graph .* key {name}"):
            run.fallback(ResultsDiffer(f"a graph does not give what eager gives, key {name}"))
    run.count("unchecked")
    found = run.snapshot()
    assert (found.checked, found.unchecked, found.fallbacks) == (2, 1, {"results_differ": 2})


def test_a_graph_that_runs_eagerly_is_listed_last_until_it_is_served() -> None:
    run = RunReport()
    first, second = (
        run.background(GraphRecord(key=digit * 64, outcome="background", seconds=0.0, nodes=3))
        for digit in "ab"
    )
    run.record("hit")
    found = run.snapshot()
    assert [graph.outcome for graph in found.graphs] == ["hit", "background", "background"]
    assert (found.background, found.misses) == (2, 0)
    run.end_background(first, replace(first, outcome="miss", seconds=2.5, eager_calls=7))
    found = run.snapshot()
    assert (found.background, found.misses, found.graphs[1].eager_calls) == (1, 1, 7)
    assert found.graphs[2] is second


def test_a_snapshot_does_not_change_afterwards() -> None:
    run = RunReport()
    before = run.snapshot()
    run.record("hit")
    run.add_seconds("wait", 1)
    assert (before.hits, before.seconds["wait"], before.graphs) == (0, 0.0, ())


def test_a_fallback_warns_once_for_each_code_and_counts_every_time() -> None:
    run = RunReport()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fallback(NoWorker("nobody for cp311"))
        run.fallback(NoWorker("nobody for cp312"), nodes=3)
        run.fallback(CompileTimeout("took 840 s"))
    assert [str(w.message) for w in caught] == [
        f"torchrelay: compiled locally: nobody for cp311. {NoWorker.hint}",
        f"torchrelay: compiled locally: took 840 s. {CompileTimeout.hint}",
    ]
    assert {w.category for w in caught} == {FallbackWarning}
    found = run.snapshot()
    assert found.fallbacks == {"no_worker": 2, "compile_timeout": 1}
    assert [g.reason for g in found.graphs] == ["no_worker", "no_worker", "compile_timeout"]
    assert {g.outcome for g in found.graphs} == {"fallback"}


def refused(operator: str, line: str = "") -> Unsupported:
    error = Unsupported(f"operator {operator} is not in the table")
    error.operator, error.line = operator, line
    return error


def test_each_operator_that_cannot_be_sent_is_named_once_at_the_users_line() -> None:
    run = RunReport()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for operator, line in (("a.one", "/m.py:7"), ("a.two", ""), ("a.one", "/m.py:9")):
            run.fallback(refused(operator, line))
    assert [str(w.message).split()[4] for w in caught] == ["a.one", "a.two"]
    assert (caught[0].filename, caught[0].lineno) == ("/m.py", 7)
    assert caught[1].filename == __file__
    found = run.snapshot()
    assert found.fallbacks == {"unsupported": 3}
    assert found.refused == (RefusedOperator("a.one", "/m.py:7", 2), RefusedOperator("a.two", "", 1))


def test_a_graph_that_inductor_cannot_compile_here_either_counts_as_eager_and_warns_once() -> None:
    run = RunReport()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            record = run.fallback(NoWorker("nobody"))
            run.runs_eagerly(record, LocalCompileFailed.of(OSError("no g++\nmore")))
    assert [str(w.message).partition(": ")[2][:40] for w in caught] == [
        "compiled locally: nobody. Start a worker",
        "not compiled, a graph runs eagerly: Indu",
    ]
    assert "Inductor fails here: OSError: no g++. It is slower" in str(caught[1].message)
    found = run.snapshot()
    assert (found.eager, found.fallbacks) == (2, {"no_worker": 2})
    assert [graph.outcome for graph in found.graphs] == ["eager", "eager"]


def test_a_forged_prefetch_is_a_warning_and_a_lost_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    run = RunReport()
    for error in (GatewayUnreachable("gone"), SignatureError("signed by nobody"), SignatureError("again")):
        run.prefetch_failed(error)
    assert run.snapshot().prefetch_failures == 3
    (told,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert told.startswith("torchrelay: a prefetched artifact is not used: signed by nobody")


def test_a_frame_that_is_traced_again_counts_only_what_it_took_again() -> None:
    run = RunReport()
    run.add_trace_seconds(5.0)
    run.end_of_backend()
    run.add_trace_seconds(
        90.0
    )  # since Dynamo began on the frame: the first try, and the wait for the service
    assert 5.0 < run.snapshot().seconds["trace"] < 10.0


def test_an_error_that_is_raised_is_listed_and_counts_as_nothing_else() -> None:
    run, error = RunReport(), NoWorker("nobody")
    error.key = "c" * 64
    run.raised(error, nodes=3)
    found = run.snapshot()
    assert [(g.key, g.outcome, g.nodes, g.reason) for g in found.graphs] == [
        ("c" * 64, "raised", 3, "no_worker")
    ]
    assert (found.hits, found.misses, found.fallbacks) == (0, 0, {})


def test_checked_programs_count_and_each_stale_one_warns() -> None:
    run = RunReport()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.program_checked("net.forward", "")
        run.program_checked("net.head", "constants ('a' in the function)")
        run.program_checked("net.tail", "graphs (1234)")
    found = run.snapshot()
    assert (found.programs_checked, found.programs_stale) == (3, 2)
    assert [each.category for each in caught] == [StaleProgramWarning] * 2
    assert "net.head" in str(caught[0].message) and "constants ('a' in the function)" in str(
        caught[0].message
    )
    assert [each.function for each in found.traced] == ["net.head", "net.tail"]


@pytest.mark.parametrize(("category", "raised"), [(UserWarning, False), (StaleProgramWarning, True)])
def test_a_stale_program_is_an_error_only_where_a_filter_names_its_warning(
    category: type[Warning], raised: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", category)
        with pytest.raises(StaleProgramWarning) if raised else contextlib.nullcontext():
            RunReport().program_checked("net.forward", "constants")


def test_timed_adds_up_even_when_the_block_raises() -> None:
    run = RunReport()
    with pytest.raises(KeyError), run.timed("load"):
        raise KeyError
    after_first = run.snapshot().seconds["load"]
    with run.timed("load"):
        pass
    assert 0 < after_first < run.snapshot().seconds["load"]


def test_functions_that_are_traced_are_listed_once_for_each_reason() -> None:
    run = RunReport()
    for reason in ("symbolic sizes", "symbolic sizes", "hooks"):
        run.traced("train.Net.forward", reason)
    assert [each.reason for each in run.snapshot().traced] == ["symbolic sizes", "hooks"]


def test_functions_that_start_without_tracing_are_counted_by_name() -> None:
    run = RunReport()
    for name in ("train.Net.forward", "train.loss", "train.Net.forward"):
        run.started(name)
    assert run.snapshot().started == {"train.Net.forward": 2, "train.loss": 1}
    assert run.snapshot().programs == 3


def test_a_function_that_is_recorded_is_listed_as_having_had_no_record_unless_another_reason_is() -> None:
    run = RunReport()
    run.recorded("train.loss")
    run.traced("train.Net.forward", "x has other sizes")
    run.recorded("train.Net.forward")
    found = {each.function: each.reason for each in run.snapshot().traced}
    assert found == {"train.loss": "it had no record", "train.Net.forward": "x has other sizes"}


def test_threads_lose_no_count() -> None:
    run = RunReport()

    def work() -> None:
        for _ in range(2000):
            run.record("hit")
            run.add_seconds("key", 1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.snapshot().hits == 8000
    assert run.snapshot().seconds["key"] == 8000.0


def test_only_the_latest_thousand_graphs_are_listed() -> None:
    run = RunReport()
    for n in range(1200):
        run.record("hit", nodes=n)
    assert run.snapshot().hits == 1200
    assert [g.nodes for g in run.snapshot().graphs] == list(range(200, 1200))


def test_the_public_report_is_the_process_report() -> None:
    from torchrelay.clients.reports.run_report import process_report

    before = torchrelay.report().hits
    process_report().record("hit")
    assert torchrelay.report().hits == before + 1


def test_it_is_written_at_exit_by_its_own_process_only(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys\n"
        "from torchrelay.clients.reports.run_report import process_report\n"
        "run = process_report()\n"
        "for _ in range(2): run.write_at_exit(pathlib.Path(sys.argv[1]))\n"
        "run.record('miss', key='b' * 64, nodes=2)\n"
        "if (child := os.fork()) == 0: run.record('hit'); sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "print(os.getpid())\n"
    )
    target = str(tmp_path / "new" / "{pid}.json")
    done = subprocess.run([sys.executable, "-c", program, target], capture_output=True, text=True, check=True)
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == f"{done.stdout.strip()}.json"
    found = json.loads(path.read_text())
    assert (found["hits"], found["misses"]) == (0, 1)
    (graph,) = found["graphs"]
    assert graph.pop("eager_calls") == 0
    assert graph.pop("ended") > 0 and graph.pop("stages") == {}
    assert graph == {"key": "b" * 64, "outcome": "miss", "seconds": 0.0, "nodes": 2, "reason": ""}


LEAVE = (
    "import os, pathlib, sys\n"
    "from torchrelay.clients.reports.run_report import process_report\n"
    "from torchrelay.compiler.errors import NotCached\n"
    "run = process_report()\n"
    "for _ in range(2): run.leave_at_exit(pathlib.Path(sys.argv[1]))\n"
)


def leave(folder: Path, program: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(LEAVE + program)
    command = [sys.executable, "-W", "ignore", str(script), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_a_run_leaves_its_record_and_the_next_one_replaces_it(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    assert last_run(folder) is None
    leave(folder, "run.record('miss', key='a' * 64, nodes=2, seconds=0.5)", tmp_path)
    first = last_run(folder)
    assert first is not None and first.program == "train.py"
    (process,) = first.processes
    assert (process.rank, process.run) == (None, "")
    (graph,) = process.graphs
    assert (graph.key, graph.outcome, graph.nodes, graph.seconds) == ("a" * 64, "miss", 2, 0.5)
    assert folder.stat().st_mode & 0o777 == 0o700
    leave(folder, "run.fallback(NotCached('no'), key='b' * 64)", tmp_path)
    second = last_run(folder)
    assert second is not None
    (process,) = second.processes
    assert [(g.key, g.reason) for g in process.graphs] == [("b" * 64, "not_cached")]
    assert [path.name for path in folder.iterdir()] == ["last_run.json"]


RANK = (
    "import os, pathlib, sys\n"
    "from torchrelay.clients.reports.run_report import process_report\n"
    "from torchrelay.clients.settings import LauncherInfo\n"
    "run, rank = process_report(), int(sys.argv[2])\n"
    "launch = LauncherInfo(rank=rank, local_rank=rank, world_size=2, run=sys.argv[3], restart=0, "
    "store=None)\n"
    "run.leave_at_exit(pathlib.Path(sys.argv[1]), launch)\n"
    "run.record('miss', key=f'{rank:064x}')\n"
)


def test_each_rank_leaves_its_own_record_and_a_run_is_all_its_ranks(tmp_path: Path) -> None:
    def launch(rank: int, run: str) -> None:
        subprocess.run([sys.executable, "-c", RANK, str(tmp_path), str(rank), run], check=True)

    def ranks() -> list[tuple[int | None, str]]:
        found = last_run(tmp_path)
        assert found is not None
        return [(process.rank, process.graphs[0].key[-1]) for process in found.processes]

    for rank in (2, 1, 0):
        launch(rank, "first")
    assert ranks() == [(0, "0"), (1, "1"), (2, "2")]
    for rank in (1, 0):
        launch(rank, "second")
    assert ranks() == [(0, "0"), (1, "1")]
    leave(tmp_path, "run.record('hit', key='f' * 64)", tmp_path)
    assert ranks() == [(None, "f")]


def test_deciding_without_the_job_counts_and_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    run = RunReport()
    for _ in range(3):
        run.alone(JobUnreachable("the job's store failed"))
    assert run.snapshot().alone == {"job_unreachable": 3}
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_run_without_graphs_and_a_forked_child_leave_none(tmp_path: Path) -> None:
    leave(tmp_path / "state", "", tmp_path)
    leave(
        tmp_path / "state",
        "if (child := os.fork()) == 0: run.record('hit'); sys.exit()\nos.waitpid(child, 0)",
        tmp_path,
    )
    assert last_run(tmp_path / "state") is None


@pytest.mark.timeout(60)
def test_a_child_that_is_forked_while_a_graph_is_counted_ends(tmp_path: Path) -> None:
    program = (
        "run.record('hit')\n"
        "run._lock.__enter__()\n"
        "if (child := os.fork()) == 0: sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "run._lock.__exit__()\n"
    )
    leave(tmp_path / "state", program, tmp_path)
    assert last_run(tmp_path / "state") is not None


def test_a_record_that_cannot_be_left_is_not_the_programs_trouble(tmp_path: Path) -> None:
    done = leave(Path("/dev/null/x"), "run.record('hit'); print('trained')", tmp_path)
    assert (done.stdout, done.stderr) == ("trained\n", "")


def test_a_record_that_cannot_be_read_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "last_run.json").write_text("{")
    with pytest.raises(ClientError, match="cannot be read"):
        last_run(tmp_path)


def test_a_report_that_cannot_be_written_does_not_change_the_exit_status() -> None:
    program = (
        "import pathlib; from torchrelay.clients.reports.run_report import process_report\n"
        "process_report().write_at_exit(pathlib.Path('/dev/null/x.json'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "could not be written" in done.stderr
