"""`torchrelay train report` against a real gateway: a job's events, metrics and files become a page and its traces."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from command_line import torchrelay, user
from service_parts import TOKEN, Running
from torchrelay.clients.gateway.jobs import TrainingJobsClient
from torchrelay.clients.reports.profiling.summary import ProfiledStep, ProfileSummary
from torchrelay.clients.settings import load_settings
from torchrelay.clients.training.output_files import uploader
from torchrelay.compiler.api.training.events import (
    CheckpointEvent,
    FirstStep,
    LogLines,
    RankCompiles,
    RankEnded,
    RankStarted,
    StateChanged,
    StepMetrics,
)
from torchrelay.compiler.api.training.jobs import TrainSpec
from torchrelay.compiler.api.training.rank_environment import JOB_ENVIRONMENT, SPEC_ENVIRONMENT
from torchrelay.service.jobs.training.records import TrainingJobs
from training_parts import STEPS, TrainingPool
from waiting import wait_until

StartGateway = Callable[..., Running]
TRACE = b"\x1f\x8b a trace"


def summary(rank: int) -> bytes:
    step = ProfiledStep(
        number=3, at=0, duration=1e5, computation=5e4, communication=3e4, exposed=3e4, loader=1e4, idle=1e4
    )
    return msgspec.json.encode(
        ProfileSummary(
            rank=rank,
            world_size=2,
            device="cpu",
            device_name="",
            torch="2.13.0",
            host="node-7",
            steps=[step],
            kernels=[],
            operators=[],
            collectives=[],
            waits=[],
            memory=[],
        )
    )


def output(gateway: Running, folder: Path, *words: str, status: int = 0) -> str:
    environment = user(folder / "none", gateway.url, TOKEN, COLUMNS="300")
    done = torchrelay("train", *words, environment=environment, folder=folder, status=status)
    return done.stdout + done.stderr


def test_a_job_with_a_profile_becomes_a_page_and_its_traces(
    gateway: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    output(gateway, tmp_path, "train.py", "--workers", "2", "--name", "gpt")
    with TrainingJobsClient(load_settings(url=gateway.url, token=TOKEN)) as trains:
        job = trains.find("gpt").id
    monkeypatch.setenv("TORCHRELAY_URL", gateway.url)
    monkeypatch.setenv("TORCHRELAY_TOKEN", TOKEN)
    keep = uploader(job)
    for name, data in (
        ("rank-0.summary.json", summary(0)),
        ("rank-1.summary.json", summary(1)),
        ("rank-2.summary.json", b"{}"),
        ("rank-0.trace.json.gz", TRACE),
    ):
        (tmp_path / name).write_bytes(data)
        keep(f"profile/{name}", tmp_path / name)

    told = output(gateway, tmp_path, "report", "gpt", "-o", "out")
    assert "profile/rank-2.summary.json is not a profile's summary" in told
    assert "Communication that nothing hides takes 30% of the time" in told
    assert f"done, step {STEPS - 1}: out/index.html" in told
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "index.html",
        "rank-0.trace.json.gz",
    ]
    assert (tmp_path / "out" / "rank-0.trace.json.gz").read_bytes() == TRACE
    page = (tmp_path / "out" / "index.html").read_text()
    for text in (
        "gpt",
        "Over steps",
        "Loss",
        "Rank 0",
        "Rank 1",
        "node-7",
        "the disk is full",
        f"step-{STEPS}",
    ):
        assert text in page, text

    output(gateway, tmp_path, "report", job, "-o", "bare", "--no-traces")
    assert [path.name for path in (tmp_path / "bare").iterdir()] == ["index.html"]
    assert "there is no training job nobody" in output(gateway, tmp_path, "report", "nobody", status=1)
    (tmp_path / "file").touch()
    assert "cannot be written" in output(gateway, tmp_path, "report", "gpt", "-o", "file/x", status=2)


def test_a_job_that_still_runs_has_a_page_of_what_it_has_told(
    gateway: Running, pool: TrainingPool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    pool.pace = 0.5
    job = output(gateway, tmp_path, "train.py", "--workers", "2", "--no-capture", "--detach").strip()
    with TrainingJobsClient(load_settings(url=gateway.url, token=TOKEN)) as trains:
        wait_until(lambda: bool(list(trains.metrics(job))), seconds=60)
        pool.pace = 60.0
        assert "running, step" in output(gateway, tmp_path, "report", job, "-o", "out")
        pool.pace = 0.0
        trains.cancel(job)
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Loss" in page and "running" in page


def test_what_a_rank_s_script_wrote_is_among_the_job_s_files(gateway: Running, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("print('hello')\n")
    job = output(gateway, work, "train.py", "--detach").split()[-1]
    (work / "train.py").write_text(
        "import os, pathlib\npathlib.Path('out').mkdir()\npathlib.Path('out/a b.txt').touch()\n"
        "pathlib.Path('out/model.pt').write_bytes(b'weights')\nos.chdir('/')\nraise SystemExit(4)\n"
    )
    os.utime(work / "train.py", (0, 0))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
    variables |= {
        "TORCHRELAY_URL": gateway.url,
        "TORCHRELAY_TOKEN": TOKEN,
        "XDG_CONFIG_HOME": str(tmp_path / "none"),
        JOB_ENVIRONMENT: job,
        SPEC_ENVIRONMENT: msgspec.json.encode(TrainSpec(name="a")).decode(),
    }
    command = [sys.executable, "-m", "torchrelay.clients.training.rank.main", "--", "train.py"]
    done = subprocess.run(command, env=variables, cwd=work, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4, done.stderr
    with TrainingJobsClient(load_settings(url=gateway.url, token=TOKEN)) as trains:
        assert [file.name for file in trains.files(job)] == ["output/out/model.pt"]
        assert trains.file(job, "output/out/model.pt") == b"weights"


def test_what_became_of_a_long_job_is_told_from_its_beginning(
    gateway: Running, pool: TrainingPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingJobs, "most_events", 10)
    monkeypatch.setattr(TrainingJobs, "events_of_ended", 10)
    (tmp_path / "train.py").write_text("print('hello')\n")
    pool.steps = 300
    job = output(gateway, tmp_path, "train.py", "--workers", "2", "--detach").strip()
    output(gateway, tmp_path, "logs", "-f", job)
    with TrainingJobsClient(load_settings(url=gateway.url, token=TOKEN)) as trains:
        followed = [type(news.event) for news in trains.follow(job)]
        assert FirstStep not in followed and len(followed) < 300  # of two messages a step
        told = list(trains.history(job))
    assert [each.state for each in (told[0], told[-1]) if isinstance(each, StateChanged)] == [
        "waiting",
        "done",
    ]
    assert {StateChanged, RankStarted, FirstStep, RankCompiles, CheckpointEvent, RankEnded} <= {
        type(each) for each in told
    }
    assert not any(isinstance(each, StepMetrics | LogLines) for each in told)
    output(gateway, tmp_path, "report", job, "-o", "out")
    assert "<td>first</td><td>2</td>" in (tmp_path / "out" / "index.html").read_text()  # ranks' first steps
