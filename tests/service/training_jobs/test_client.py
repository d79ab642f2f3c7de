"""`torchrelay train` against a real gateway: begun from a file, a script or a function, watched, looked at, ended."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import COMMAND, torchrelay, user
from service_parts import TOKEN, Running, registered
from torchrelay.clients.gateway.jobs import TrainingJobsClient
from torchrelay.clients.settings import load_settings
from torchrelay.compiler.api.training import working_directory
from torchrelay.compiler.api.training.events import StepMetrics
from torchrelay.compiler.api.training.jobs import ProfileSpec, TrainSpec
from torchrelay.compiler.errors import NotFound, RelayError
from training_parts import STEPS, TrainingPool, story
from waiting import wait_until

StartGateway = Callable[..., Running]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A working directory."""
    folder = tmp_path / "work"
    (folder / "sub").mkdir(parents=True)
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "sub" / "deep.py").write_text("def main(): print('deep')\n")
    (folder / "data.bin").write_bytes(b"0" * 1000)
    (folder / ".torchrelayignore").write_text("*.bin\n")
    (folder / "job.yaml").write_text(
        "name: from a file\nscript: train.py\nworkers: 2\narguments: [--layers, 4]\n"
    )
    return folder


def train(gateway: Running, folder: Path, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    environment = user(folder / "none", gateway.url, TOKEN, COLUMNS="300")
    return torchrelay("train", *words, environment=environment, folder=folder, status=status)


def on_a_terminal(gateway: Running, folder: Path, *words: str) -> tuple[int, str]:
    """Exit status, and what a terminal of 100 columns was sent."""
    ours, theirs = pty.openpty()
    environment = user(folder / "none", gateway.url, TOKEN, TERM="xterm", COLUMNS="100")
    command = [*COMMAND, "train", *words]
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        sent = b""
        try:
            while part := os.read(ours, 65536):
                sent += part
        except OSError:  # Linux' way to say that nobody writes any more
            pass
        finally:
            os.close(ours)
        return process.wait(60), sent.decode()


def client(gateway: Running) -> TrainingJobsClient:
    return TrainingJobsClient(load_settings(url=gateway.url, token=TOKEN))


def test_a_file_becomes_a_job_that_is_watched_to_its_end(
    gateway: Running, pool: TrainingPool, work: Path, tmp_path: Path
) -> None:
    done = train(gateway, work, "job.yaml", "--cpus", "1.5")
    lines = done.stdout.splitlines()
    assert "waiting" in lines and "running" in lines and lines[-2] == "done"
    assert f"checkpoint step-{STEPS} saved (0.5 s, 10 B)" in lines
    assert f"checkpoint at step {STEPS} failed, training continues: the disk is full" in lines
    assert "step 0" in lines and "step 1" not in lines  # what rank 1 wrote is in `logs`
    assert "is done; step 9" in lines[-1]
    assert "graphs: 2 captured, 2 compiled before, 6 hits, 1 fallbacks" in lines[-1]
    order = pool.orders[-1]
    assert order.spec == TrainSpec(
        name="from a file",
        script="train.py",
        arguments=["--layers", "4"],
        workers=2,
        cpus=1.5,
        package=order.spec.package,
    )
    (tmp_path / "out").mkdir()
    working_directory.unpack(order.package, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").rglob("*"))
    assert names == [".torchrelayignore", "deep.py", "job.yaml", "sub", "train.py"]


def test_on_a_terminal_the_last_line_says_how_the_job_is(
    gateway: Running, pool: TrainingPool, work: Path
) -> None:
    pool.pace = 0.03
    status, sent = on_a_terminal(gateway, work, "job.yaml")
    assert status == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent)
    assert re.search(r"running · 2 ranks · step \d · loss 0\.\d+ · graphs: 6 hits, 1 fallbacks", shown)
    assert "step 8\r\n" in shown  # rank 0's own line, above
    assert shown.rstrip().splitlines()[-1].endswith("6 hits, 1 fallbacks")


def test_ctrl_c_leaves_the_job_running(gateway: Running, pool: TrainingPool, work: Path) -> None:
    pool.pace = 1.0
    environment = user(work / "none", gateway.url, TOKEN)
    command = [*COMMAND, "train", "job.yaml", "--no-capture"]
    with subprocess.Popen(
        command, env=environment, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "waiting" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        told = process.stderr.read()
    with client(gateway) as trains:
        (job,) = trains.jobs()
        assert f"the job continues: `torchrelay train logs -f {job.id}`" in told
        assert job.state not in ("failed", "cancelled")
        trains.cancel(job.id)


def test_a_script_and_a_function_become_jobs_and_what_follows_dashes_is_theirs(
    gateway: Running, pool: TrainingPool, work: Path
) -> None:
    options = ["--workers", "2", "--min-workers", "1", "--memory", "1GiB", "--retries", "0", "--no-capture"]
    options += ["--profile", "steps=10:15", "--profile-ranks", "0,1", "--env", "A=b=c", "--timeout", "2h"]
    (work / "needs.txt").write_text("# what it needs\neinops>=0.8  # for reshapes\n\n")
    options += ["--requirements", "needs.txt", "--precision", "bf16", "--tune", "--detach"]
    one = train(gateway, work, "sub/deep.py", *options, "--", "--workers", "7", "-x").stdout.strip()
    two = train(gateway, work, "sub.deep:main", "--no-compile", "--detach", "--json")
    other = train(gateway, work / "sub", "../train.py", "--name", "x", "--detach").stdout.strip()
    with client(gateway) as trains:
        assert trains.job(one).spec == TrainSpec(
            name="deep",
            script="sub/deep.py",
            arguments=["--workers", "7", "-x"],
            package=trains.job(one).spec.package,
            requirements=["einops>=0.8"],
            environment={"A": "(hidden)"},
            workers=2,
            min_workers=1,
            memory_bytes=1 << 30,
            precision="bf16",
            retries=0,
            capture=False,
            tune=True,
            profile=ProfileSpec(10, 15, [0, 1]),
            timeout_seconds=7200,
        )
        spec = json.loads(two.stdout)["spec"]
        assert (spec["function"], spec["name"], spec["compile"]) == ("sub.deep:main", "sub.deep", "off")
        assert (trains.job(other).spec.script, trains.job(other).spec.name) == ("train.py", "x")


def test_options_may_come_before_the_script_as_torchrun_takes_them(gateway: Running, work: Path) -> None:
    job = train(
        gateway, work, "--workers", "2", "--detach", "./train.py", "--", "--layers", "3"
    ).stdout.strip()
    (work / "dot.yaml").write_text("script: ./sub//deep.py\n")
    other = train(gateway, work, "--detach", "dot.yaml").stdout.strip()
    with client(gateway) as trains:
        spec = trains.job(job).spec
        assert (spec.script, spec.workers, spec.arguments) == ("train.py", 2, ["--layers", "3"])
        assert trains.job(other).spec.script == "sub/deep.py"
    assert "Train on the cluster" in train(gateway, work, "--help").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["job.yaml", "--workers", "0"], "job.yaml: workers: Expected `int` >= 1"),
        (["train.py", "--device", "tpu"], "the command line: device is 'tpu'; allowed: cpu, cuda"),
        (["nowhere.py"], "the command line: script is 'nowhere.py', and"),
        (["bad.yaml"], "bad.yaml, line 2: 'worker' is not a field here"),
        (["lost.yaml"], "lost.yaml, line 2: script is 'lost.py', and"),
        (["kept.yaml"], "kept.yaml, line 1: script is 'data.bin', which .torchrelayignore excludes"),
        (["train.py", "--gpus", "2", "--workers", "3"], "--gpus is 2 and --workers 3"),
        (["train.py", "--env", "A"], "--env is 'A'"),
        (["train.py", "--profile-nvtx"], "a profile has no steps"),
    ],
)
def test_wrong_use_is_named_and_begins_nothing(
    words: list[str], said: str, gateway: Running, work: Path
) -> None:
    (work / "bad.yaml").write_text("script: train.py\nworker: 2\n")
    (work / "lost.yaml").write_text("name: x\nscript: lost.py\n")
    (work / "kept.yaml").write_text("script: data.bin\n")
    assert said in train(gateway, work, *words, status=2).stderr
    with client(gateway) as trains:
        assert trains.jobs() == []


def test_what_the_service_refuses_has_the_files_line(
    gateway: Running, pool: TrainingPool, work: Path
) -> None:
    pool.nodes = [{"torchrelay_worker": 1.0, "CPU": 4.0}]
    with gateway.http() as http:
        registered(http, pool)
    (work / "gpu.yaml").write_text("script: train.py\n\ndevice: cuda\n")
    told = train(gateway, work, "gpu.yaml", status=2).stderr
    assert "gpu.yaml, line 3" in told and "no node has a GPU" in told


def test_a_job_is_listed_shown_read_and_its_files_are_fetched(gateway: Running, work: Path) -> None:
    job = train(gateway, work, "job.yaml", "--detach").stdout.strip()
    train(gateway, work, "logs", "-f", job)
    with client(gateway) as trains:
        trains.put_file(job, "profile/rank-0.json", b"a trace")
    assert "from a file" in train(gateway, work, "ls").stdout
    about = train(gateway, work, "show", job[:6]).stdout
    assert f"step-{STEPS} at step {STEPS}" in about and "3.0 s after all ranks were there" in about
    assert "compiled by each rank for itself: graph 3: a tensor subclass" in about
    assert json.loads(train(gateway, work, "show", "from a file", "--json").stdout)["state"] == "done"
    every = train(gateway, work, "logs", job).stdout.splitlines()
    assert every == [f"rank {step % 2}: step {step}" for step in range(STEPS)]
    one = train(gateway, work, "logs", job, "--rank", "1").stdout.splitlines()
    assert one == [f"step {step}" for step in range(1, STEPS, 2)]
    for command in ("logs", "metrics"):
        refused = train(gateway, work, command, job, "--rank", "2", status=2)
        assert "has no rank 2. Its ranks are 0 to 1" in refused.stderr
    told = train(gateway, work, "metrics", job, "--json").stdout.splitlines()
    assert [json.loads(line)["step"] for line in told] == list(range(STEPS))
    assert train(gateway, work, "metrics", job).stdout.splitlines()[1] == "step 1 rank 0: loss 0.5"
    assert "profile/rank-0.json" in train(gateway, work, "files", job).stdout
    train(gateway, work, "get", job, "profile/rank-0.json")
    train(gateway, work, "get", job, "profile/rank-0.json", "-o", "sub")
    assert (work / "rank-0.json").read_bytes() == (work / "sub" / "rank-0.json").read_bytes() == b"a trace"
    assert "there is no training job nothing" in train(gateway, work, "show", "nothing", status=1).stderr
    named = train(gateway, work, "job.yaml", "--name", job[:4], "--detach").stdout.strip()
    with client(gateway) as trains:
        assert trains.find(job[:4]).id == named  # a whole name before the first digits of an id
        assert trains.find(job).id == trains.find(job[:6]).id == job


def test_a_program_that_logs_is_not_told_of_our_requests(
    gateway: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"), client(gateway) as trains:
        trains.jobs()
    assert [record.name for record in caplog.records if record.name.startswith("http")] == []


def test_a_job_is_cancelled_and_resumed_and_its_end_is_the_exit_status(
    gateway: Running, pool: TrainingPool, work: Path
) -> None:
    pool.pace = 0.2
    job = train(gateway, work, "job.yaml", "--detach", "--no-capture").stdout.strip()
    with client(gateway) as trains:
        wait_until(lambda: trains.job(job).state == "running", seconds=30)
    assert "is cancelled" in train(gateway, work, "cancel", job).stdout
    train(gateway, work, "logs", "-f", job, status=1)
    pool.pace = 0.0
    again = train(gateway, work, "resume", job)
    assert "is done" in again.stdout and "cancelled" not in again.stdout  # what was before is not told again
    pool.ends = "failed"
    failed = train(gateway, work, "job.yaml", status=1)
    assert "is failed: rank 0 ended with 1" in failed.stdout
    assert "`torchrelay train resume " in failed.stdout


def test_to_resume_what_still_runs_is_to_watch_it(gateway: Running, pool: TrainingPool, work: Path) -> None:
    pool.pace = 0.2
    job = train(gateway, work, "job.yaml", "--detach", "--no-capture").stdout.strip()
    assert "is done" in train(gateway, work, "resume", job).stdout
    assert "is done: there is nothing to go on with" in train(gateway, work, "resume", job, status=2).stderr


def test_a_gateway_that_goes_away_is_waited_for_and_nothing_is_told_twice(
    start_gateway: StartGateway, pool: TrainingPool, work: Path
) -> None:
    pool.pace = 0.1
    first = start_gateway(pool)
    job = train(first, work, "job.yaml", "--detach", "--no-capture").stdout.strip()
    heard: list[int] = []
    troubles: list[RelayError] = []
    broken = threading.Event()

    def stop() -> None:
        broken.wait(60)
        first.stop()

    stopping = threading.Thread(target=stop)
    stopping.start()
    second: Running | None = None
    with client(first) as trains:
        for news in trains.follow(job, on_trouble=troubles.append):
            heard.append(news.number)
            if len(heard) == 8:
                broken.set()
            if len(heard) == 9:
                break
    stopping.join()
    second = start_gateway(pool)
    with client(second) as trains:
        heard += [news.number for news in trains.follow(job, after=heard[-1])]
        assert trains.job(job).state == "done"
        told = [event for _, event in trains.metrics(job)]
        with pytest.raises(NotFound):
            trains.find("nothing")
    assert heard == list(range(1, len(heard) + 1))
    assert len(heard) >= len(story(0))
    assert told == [event for event in story(0) if isinstance(event, StepMetrics)]
