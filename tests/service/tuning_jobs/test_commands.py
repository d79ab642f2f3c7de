"""`torchrelay tune` and its subcommands, in a process of their own, against a gateway with a searching pool."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx2
import pytest
from command_line import torchrelay, user
from service_parts import TOKEN, Running, graph
from torchrelay.clients.jobfiles import captured_graphs
from tune_parts import (
    CEILINGS,
    SearchingPool,
    ended,
)

StartGateway = Callable[..., Running]


JOB = """\
name: small
threads: 1
operators:
  - op: mm
    m: [16, 32]
    n: 16
    k: 16
    dtype: bf16
"""


@pytest.fixture
def command(gateway: Running, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    (tmp_path / "job.yaml").write_text(JOB)
    environment = user(tmp_path, gateway.url, TOKEN, COLUMNS="40")
    return partial(torchrelay, "tune", environment=environment, folder=tmp_path)


def test_the_commands(
    command: Callable[..., subprocess.CompletedProcess[str]], http: httpx2.Client, pool: SearchingPool
) -> None:
    done = command("job.yaml")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("done") for line in lines) == 2 + CEILINGS
    assert "line 4: mm(bf16[16,16], bf16[16,16]) -> bf16[16,16]: triton_mm 1 ms" in done.stdout
    assert lines[-1].endswith("is done: 4 done; 6 s searched, 12 candidates")
    (listed,) = json.loads(command("ls", "--json").stdout)
    assert (listed["name"], listed["state"]) == ("small", "done")
    (row,) = [line for line in command("ls").stdout.splitlines() if listed["id"] in line]
    assert row.split()[1:3] == ["small", "done"]
    assert json.loads(command("show", listed["id"][:6], "--json").stdout)["job"] == listed
    assert "triton_mm 1 ms" in command("show", "small").stdout
    assert len(command("logs", "small").stdout.splitlines()) == 4
    assert command("logs", "-f", "small").returncode == 0
    detached = command("run", "--detach", "job.yaml")
    name = detached.stdout.strip()
    assert ended(http, name)["state"] == "done"
    assert command("cancel", name).stdout == f"{name} is done\n"
    assert command("show", "nothing").returncode == 1


def test_a_jobs_report_is_a_page_of_what_it_found(
    command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    assert command("job.yaml").returncode == 0
    written = command("report", "small", "--output", "out", "--no-pictures")
    assert written.stdout == "2 problems: out/index.html\n", written.stderr
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<title>small</title>" in page
    assert "<code>mm(bf16[32,16], bf16[16,16]) -&gt; bf16[32,16]" in page and "line 4" in page
    assert "Measured ceilings: memory" in page
    assert command("export", "old.lock").returncode == 0
    again = command("report", "small", "--lock", "old.lock", "-o", "out", "--no-pictures")
    assert again.stdout == "2 problems, 0 slower than in old.lock: out/index.html\n"
    missing = command("report", "another", "--no-pictures")
    assert missing.returncode == 1 and "there is no batch job another" in missing.stderr


def test_a_failed_item_is_the_exit_status_and_resume_tries_it_again(
    command: Callable[..., subprocess.CompletedProcess[str]], pool: SearchingPool
) -> None:
    pool.searchers.unfit.add(32)
    failed = command("job.yaml")
    assert failed.returncode == 1
    assert "it does not fit the device" in failed.stdout
    pool.searchers.unfit.clear()
    again = command("resume", "small")
    assert again.returncode == 0, again.stderr
    (line,) = again.stdout.splitlines()[:-1]  # what it had before is not told again
    assert line.startswith("done      line 4: mm(bf16[32,16], ")
    assert again.stdout.splitlines()[-1].endswith("is done: 4 done; 6 s searched, 12 candidates")


def test_a_ceiling_that_cannot_be_measured_fails_no_job(
    command: Callable[..., subprocess.CompletedProcess[str]], pool: SearchingPool
) -> None:
    pool.searchers.unfit.add(256)
    done = command("job.yaml")
    assert (done.returncode, done.stdout.count("failed    mm(bf16[256,256]")) == (0, 1), done.stdout


def test_what_the_service_refuses_names_the_line_too(
    command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("dtype: bf16", "dtype: f99"))
    wrong = command("job.yaml")
    assert (wrong.returncode, wrong.stderr.splitlines()[-1].partition(" 'f99'")[0]) == (
        2,
        "torchrelay: job.yaml, line 8: dtype is",
    )
    (tmp_path / "job.yaml").write_text("operators:\n- {op: scaled_mm, m: 16, n: 16, k: 16}\nthreads: 1\n")
    wrong = command("job.yaml")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith(
        "torchrelay: job.yaml, line 2: a CPU has no matrix product of float8_e4m3fn"
    )


def test_captured_graphs_are_sent_with_the_job(
    command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, pool: SearchingPool
) -> None:
    captured_graphs.write_graphs(tmp_path / "two.graphs", [graph(8), graph(16)])
    (tmp_path / "job.yaml").write_text("graphs:\n- file: two.graphs\n  mode: max-autotune\n")
    done = command("job.yaml")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "line 2: graph " in line]
    assert [line.partition("(")[2] for line in lines] == [
        f"two.graphs, {n} of 2): nothing to search: no operator has several candidates" for n in (1, 2)
    ]
    assert len(pool.calls) == 2
    (tmp_path / "job.yaml").write_text("graphs:\n- file: three.graphs\n")
    wrong = command("job.yaml")
    assert wrong.returncode == 2
    assert "job.yaml, line 2: three.graphs cannot be read" in wrong.stderr.replace(f"{tmp_path}/", "")
