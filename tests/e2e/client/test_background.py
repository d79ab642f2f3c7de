"""torchrelay.background against a whole service: a miss trains eagerly, and then its artifact takes over."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_ranks import torchrun
from torchrelay.clients.reports.run_report import last_run
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = Path(__file__).parents[1] / "parts" / "background_training.py"
RANKS = SCRIPT.with_name("background_ranks.py")


def command(salt: float, *words: str) -> list[str]:
    return [sys.executable, str(SCRIPT), str(salt), *words]


def environment(service: PrivateService, folder: Path, **variables: str) -> dict[str, str]:
    return {**os.environ, **service.environment, "TORCHRELAY_CACHE_DIR": str(folder), **variables}


def train(
    service: PrivateService, folder: Path, salt: float, *words: str, **variables: str
) -> dict[str, Any]:
    done = subprocess.run(
        command(salt, *words),
        env=environment(service, folder, **variables),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return checked(done.stdout)


def checked(output: str) -> dict[str, Any]:
    """What the script told, with its one graph as `graph`. It trained as eagerly; before the takeover, exactly so."""
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    (found["graph"],) = found["report"]["graphs"]
    eagerly = found["graph"]["eager_calls"]
    assert found["relay"][:eagerly] == found["eager"][:eagerly]
    return found


def test_a_miss_trains_eagerly_then_compiled_and_a_hit_compiled_from_the_start(
    service: PrivateService, tmp_path: Path
) -> None:
    first = train(service, tmp_path / "a", 3.125)
    assert (first["began"], first["graph"]["outcome"], first["error"], first["told"]) == (1, "miss", "", [])
    assert len(first["relay"]) - first["graph"]["eager_calls"] in (3, 4)
    assert first["relay"] == pytest.approx(first["eager"], rel=1e-4)
    assert first["report"]["background"] == 0
    for folder, outcome in (("b", "hit"), ("b", "disk_hit")):
        again = train(service, tmp_path / folder, 3.125)
        graph = again["graph"]
        assert (again["began"], graph["outcome"], graph["eager_calls"]) == (0, outcome, 0)
        assert graph["key"] == first["graph"]["key"]
        assert again["relay"] == pytest.approx(again["eager"], rel=1e-4)


@pytest.mark.slow
def test_dropout_draws_eagers_numbers_until_the_takeover(service: PrivateService, tmp_path: Path) -> None:
    found = train(service, tmp_path, 3.25, "DROPOUT")
    assert found["graph"]["outcome"] == "miss" and found["graph"]["eager_calls"] > 0
    assert all(0 < loss < 100 for loss in found["relay"])


@pytest.mark.parametrize(
    ("words", "variables", "code"),
    [
        (["DAMAGED"], {}, "bad_artifact"),
        ([], {"TORCHRELAY_PUBLIC_KEYS": "A" * 43 + "="}, "bad_signature"),
    ],
)
def test_an_artifact_that_is_refused_costs_a_warning_and_the_graph_is_compiled_locally(
    service: PrivateService, tmp_path: Path, words: list[str], variables: dict[str, str], code: str
) -> None:
    found = train(service, tmp_path, 3.375 + len(words), *words, **variables)
    assert (found["began"], found["error"], found["report"]["fallbacks"]) == (1, "", {code: 1})
    assert len(found["told"]) == 1 and found["graph"]["eager_calls"] > 0
    assert found["relay"] == pytest.approx(found["eager"], rel=1e-4)


def test_in_mode_require_the_next_call_raises_the_typed_error(
    service: PrivateService, tmp_path: Path
) -> None:
    wrong = {"TORCHRELAY_PUBLIC_KEYS": "A" * 43 + "=", "TORCHRELAY_MODE": "require"}
    found = train(service, tmp_path, 3.5, **wrong)
    assert found["error"].startswith("SignatureError: ")
    assert (found["told"], found["graph"]["outcome"]) == ([], "raised")
    assert len(found["relay"]) == found["graph"]["eager_calls"] > 0


@pytest.mark.parametrize(
    ("words", "variables"),
    [(["DYNAMIC"], {}), (["CHECKPOINT"], {}), ([], {"RANK": "0", "WORLD_SIZE": "2"})],
)
def test_a_graph_that_cannot_change_between_two_calls_is_waited_for(
    service: PrivateService, tmp_path: Path, words: list[str], variables: dict[str, str]
) -> None:
    found = train(service, tmp_path, 3.625 + len("".join(words)), *words, **variables)
    graph = found["graph"]
    assert (found["began"], graph["outcome"], graph["eager_calls"]) == (0, "miss", 0)
    assert found["relay"] == pytest.approx(found["eager"], rel=1e-4)


def test_a_program_that_ends_first_ends_at_once_and_says_nothing(
    service: PrivateService, tmp_path: Path
) -> None:
    quiet = {"TORCHRELAY_SUMMARY": "0", "PYTHONWARNINGS": "error"}
    variables = environment(service, tmp_path, TORCHRELAY_STATE_DIR=str(tmp_path), **quiet)
    done = subprocess.run(command(3.75, "LEAVES"), env=variables, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    run = last_run(tmp_path)
    assert run is not None
    assert [graph.outcome for graph in run.processes[0].graphs] == ["background"]


@pytest.mark.slow
def test_the_gateway_dies_meanwhile(tmp_path: Path) -> None:
    with PrivateService(tmp_path / "service", arguments=("--cpu-slots", "1")) as service:
        variables = environment(service, tmp_path / "cache")
        with subprocess.Popen(
            command(3.875, "WAITS"),
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None and child.stdout.readline() == "begun\n"
            for process in psutil.Process(service.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended with another
                    process.kill()
            output = child.communicate("go\n", timeout=500)[0]
        found = checked(output)
    assert (found["error"], found["report"]["fallbacks"]) == ("", {"gateway_unreachable": 1})
    assert len(found["told"]) == 1
    assert found["relay"] == pytest.approx(found["eager"], rel=1e-4)


@pytest.mark.slow
def test_two_ranks_change_at_the_same_call_and_begin_compiled_with_a_hit(
    service: PrivateService, tmp_path: Path
) -> None:
    first, again = (ranks(service, tmp_path / name) for name in ("first", "again"))
    calls = [[graph["eager_calls"] for graph in rank["report"]["graphs"]] for rank in first]
    assert calls[0] == calls[1] and all(count > 0 and count % 4 == 0 for count in calls[0])
    assert len({graph["key"] for graph in first[0]["report"]["graphs"]}) == 2 < len(calls[0])
    assert [rank["began"] for rank in first] == [len(calls[0])] * 2
    for rank in again:
        assert rank["began"] == 0
        assert {graph["eager_calls"] for graph in rank["report"]["graphs"]} == {0}
    for found, outcome in ((first, "miss"), (again, "hit")):
        outcomes = [graph["outcome"] for rank in found for graph in rank["report"]["graphs"]]
        assert outcomes.count(outcome) == 2 and {*outcomes} <= {outcome, "shared", "disk_hit"}, outcomes
        for rank in found:
            assert rank["relay"] == pytest.approx(rank["eager"], rel=1e-4)
            assert rank["report"]["alone"] == rank["report"]["fallbacks"] == {}


@pytest.mark.slow
def test_two_ranks_change_at_the_same_call_to_what_a_search_found(
    service: PrivateService, tmp_path: Path
) -> None:
    first, again = (ranks(service, tmp_path / name, "max-autotune") for name in ("first", "again"))
    for rank in (*first, *again):
        assert rank["relay"] == pytest.approx(rank["eager"], rel=1e-4)
        assert rank["report"]["alone"] == rank["report"]["fallbacks"] == {}
    calls = [[graph["eager_calls"] for graph in rank["report"]["graphs"]] for rank in first]
    assert calls[0] == calls[1] and len(calls[0]) == 3
    assert all(count > 0 and count % 4 == 0 for count in calls[0]), calls
    for rank in again:
        assert {graph["eager_calls"] for graph in rank["report"]["graphs"]} == {0}


def ranks(service: PrivateService, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What each of two ranks told."""
    variables = {**service.environment, "TORCHRELAY_BACKGROUND": "1"}
    with torchrun(folder, 2, *arguments, script=RANKS, environment=variables) as agent:
        output = agent.communicate(timeout=500)[0]
    assert agent.returncode == 0, output[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
