"""A search among a user-written kernel's configurations, without a GPU: Triton's interpreter runs the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs Triton, not a GPU")

SCRIPT = Path(__file__).parents[1] / "parts" / "kernel_searching.py"


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_fastest_configuration_is_left_alone_with_its_grid(runs: dict[str, Any]) -> None:
    run = runs["several"]
    assert (run["searched"], run["recalled"]) == (1, 0)
    assert run["left"] == [{"BLOCK": 1024, "WRONG": 0}]
    assert run["grids"] == [[1, 1, 1]]
    assert run["measurements"] == ["BLOCK=1024 WRONG=0 num_warps=4 num_stages=3"]


def test_a_graph_that_is_rebuilt_is_left_with_the_same_and_nothing_is_measured_again(
    runs: dict[str, Any],
) -> None:
    run = runs["twice"]
    assert (run["searched"], run["recalled"], run["uses"]) == (1, 0, [1])
    assert run["asked"] == ["EntryLookup", "SearchResult"]
    assert len(run["left"]) == len(run["grids"]) == 1
    assert runs["twice lost"]["asked"] == ["EntryLookup"]


def test_what_was_measured_is_told(runs: dict[str, Any]) -> None:
    run = runs["several"]
    assert run["asked"] == ["EntryLookup", "SearchResult"]
    entry = run["entry"]
    assert entry["problem"]["op"] == "triton.scale"
    assert entry["winner"]["candidate"] == run["timings"][0]
    assert entry["runner_up"]["candidate"] == run["timings"][1]
    assert (entry["candidates"], entry["failed"], entry["winner"]["samples"]) == (3, 0, 7)
    assert len(run["timings"]) == 3 and run["failures"] == []


def test_a_known_winner_is_taken_by_every_later_compile(runs: dict[str, Any]) -> None:
    first, again, plain = (runs["known"][name] for name in ("first", "again", "plain"))
    assert first["asked"] == [
        "EntryLookup",
        "SearchResult",
        "EntryLookup",
        "EntryLookup",
    ]
    for later in (again, plain):  # one that tunes, and one that does not
        assert (later["searched"], later["recalled"]) == (0, 1)
        assert (later["left"], later["grids"]) == (first["left"], first["grids"])


def test_other_candidates_or_sizes_are_another_problem_and_their_order_is_not(runs: dict[str, Any]) -> None:
    assert runs["strangers"] == {"configs": 1, "size": 1, "same": 0}


def test_a_compile_that_does_not_tune_measures_nothing(runs: dict[str, Any]) -> None:
    run = runs["default"]
    assert (run["searched"], run["recalled"], run["asked"]) == (0, 0, ["EntryLookup"])
    assert len(run["left"]) == len(run["grids"]) == 2


def test_of_several_sources_none_is_measured_as_none_would_be_believed(runs: dict[str, Any]) -> None:
    assert runs["two sources"] == {"measures": False, "one": True}


def test_a_call_whose_sizes_are_not_known_is_left_to_inductor(runs: dict[str, Any]) -> None:
    run = runs["dynamic"]
    assert (run["searched"], run["asked"], len(run["left"])) == (0, [], 2)


def test_a_lock_chooses_and_a_strict_one_must(runs: dict[str, Any]) -> None:
    run = runs["lock"]
    assert run["taken"]["measurements"] == [run["pinned"]]
    assert run["taken"]["asked"] == []
    assert run["error"].startswith("the tuning lock has no winner for triton.scale(f32[1000], f32[1000])")


@pytest.mark.parametrize(
    ("name", "candidate", "why"),
    [
        ("wrong", "BLOCK=256 WRONG=1", "leaves out_ptr 1 off what the first configuration does"),
        ("short", "BLOCK=999 WRONG=0", "does not run: InterpreterError"),
        ("crash", "BLOCK=256 WRONG=0", "ended the process that ran it"),
        ("late", "BLOCK=256 WRONG=0", "ended the process that ran it"),
    ],
)
def test_a_candidate_that_fails_is_named_and_the_search_goes_on(
    name: str, candidate: str, why: str, runs: dict[str, Any]
) -> None:
    run = runs[name]
    ((failed, said),) = run["failures"]
    assert failed == f"{candidate} num_warps=4 num_stages=3"
    assert why in said
    assert run["left"] == [{"BLOCK": 128, "WRONG": 0}]
    assert (run["entry"]["candidates"], run["entry"]["failed"]) == (3, 1)


def test_a_grid_that_misses_a_part_shows(runs: dict[str, Any]) -> None:
    ((failed, said),) = runs["uneven"]["failures"]
    assert failed.startswith("BLOCK=64")
    assert "leaves out_ptr" in said


def test_a_search_that_loses_every_process_leaves_the_choice_to_inductor(runs: dict[str, Any]) -> None:
    run = runs["lost"]
    assert (run["searched"], run["asked"]) == (0, ["EntryLookup"])
    assert len(run["left"]) == 2


def test_a_kernel_that_runs_in_no_configuration_is_left_to_inductor(runs: dict[str, Any]) -> None:
    run = runs["none"]
    assert (run["searched"], run["asked"], len(run["left"])) == (0, ["EntryLookup"], 2)


@pytest.mark.parametrize("name", ["pointwise", "matmul"])
def test_candidates_are_compiled_for_a_gpu_before_they_run(name: str, tmp_path: Path) -> None:
    """Without the GPU, by Triton's own compiler: all of a job's candidates, several at once; one that does not compile
    fails where it would be launched."""
    if "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton compiles for no NVIDIA GPU")
    done = subprocess.run(
        [sys.executable, str(SCRIPT.with_name("kernel_compiling.py")), name],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)[name]
    assert made["built"] == made["wanted"]
    assert made["failed"] == []
    assert made["error"] == "CompilationError"
