"""Ranks start without tracing, each from its own records; results stay the same if one finds none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from program_job import SCRIPT, Job, Told
from torchrelay.examples.harness.private_service import PrivateService

CASES = ("plain", "ddp_compiled", "compiled_in_ddp", "split", "fsdp", "asking")


@pytest.fixture(scope="module")
def first_job(service: PrivateService, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(service, tmp_path_factory.mktemp("ranks") / "job")


@pytest.fixture(scope="module")
def first(first_job: Job) -> list[Told]:
    return first_job.start(*CASES, "reducing")


@pytest.fixture(scope="module")
def second(first: list[Told], first_job: Job) -> list[Told]:
    return first_job.start(*CASES, "reducing")


@pytest.mark.parametrize("case", CASES)
def test_the_next_start_of_a_job_traces_nothing_on_any_rank_and_computes_the_same(
    case: str, first: list[Told], second: list[Told]
) -> None:
    for before, after in zip(first, second, strict=True):
        assert before[case]["traced"]
        assert (after[case]["traced"], after[case]["reasons"]) == (False, [])
        assert after[case]["programs"] > 0
        assert after[case]["losses"] == before[case]["losses"]
        assert len(after[case]["outcomes"]) == len(before[case]["outcomes"])
        assert not [each for each in after[case]["outcomes"] if each.startswith("fallback")]
    assert first[0][case]["losses"] != first[1][case]["losses"]


def test_pieces_of_a_graph_inside_ddp_are_those_that_were_traced(
    first: list[Told], second: list[Told]
) -> None:
    assert len(first[0]["split"]["outcomes"]) == len(second[0]["split"]["outcomes"]) > 1


def test_a_graph_with_a_collective_is_traced_on_every_rank_with_a_reason(
    first: list[Told], second: list[Told]
) -> None:
    for before, after in zip(first, second, strict=True):
        told = after["reducing"]
        assert (told["programs"], told["traced"]) == (0, True)
        assert len(told["reasons"]) == 1 and "WORLD" in told["reasons"][0]
        assert told["losses"] == before["reducing"]["losses"]


@pytest.mark.slow
def test_a_change_of_the_program_is_traced_on_every_rank(first: list[Told], first_job: Job) -> None:
    text = SCRIPT.read_text().replace("SCALE = 0.9375", "SCALE = 0.75")
    changed = first_job.start(*CASES, text=text)
    for before, after in zip(first, changed, strict=True):
        for case in CASES:
            assert after[case]["traced"], case
            assert after[case]["losses"] != before[case]["losses"]


@pytest.mark.slow
def test_a_rank_that_has_lost_its_records_traces_while_the_other_starts_without(
    service: PrivateService, tmp_path: Path
) -> None:
    job, cases = Job(service, tmp_path / "job"), ("plain", "ddp_compiled", "split", "fsdp")
    first = job.start(*cases, rows="16,12,16", OWN_STORES="yes")
    for rank in range(2):
        # The batch sizes begin otherwise: a record with symbolic sizes fits the first, and a trace has none at first.
        shutil.rmtree(job.folder / f"cache-{rank}" / "programs")
        found = job.start(*cases, rows="12,16,16", OWN_STORES="yes")
        wanted = job.start(*cases, rows="12,16,16", OWN_STORES="yes", TORCHRELAY_PROGRAMS="0")
        for case in cases:
            assert found[rank][case]["traced"] and not found[1 - rank][case]["traced"], case
            assert found[1 - rank][case]["programs"] > 0
            for one, other in zip(found, wanted, strict=True):
                assert one[case]["losses"] == pytest.approx(other[case]["losses"], rel=1e-5)
        assert found != first


@pytest.mark.slow
def test_ranks_that_may_begin_eagerly_decide_so_together_and_trace(
    service: PrivateService, tmp_path: Path
) -> None:
    job = Job(service, tmp_path / "job")
    first = job.start("ddp_compiled")
    found = job.start("ddp_compiled", TORCHRELAY_BACKGROUND="1")
    for before, after in zip(first, found, strict=True):
        told = after["ddp_compiled"]
        assert told["traced"] and told["losses"] == before["ddp_compiled"]["losses"]
        assert "the ranks of a job decide together how long it runs eagerly" in " ".join(told["reasons"])
