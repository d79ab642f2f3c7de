"""Ranks agree: torchrun and DDP on gloo; one of them obtains, all load the same artifact and train as locally."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from torchrelay.clients.reports.run_report import last_run
from torchrelay.examples.harness.private_service import PrivateService
from waiting import wait_until

SCRIPT = Path(__file__).parents[1] / "parts" / "ranks.py"


@contextlib.contextmanager
def torchrun(
    folder: Path, ranks: int, *arguments: str, script: Path = SCRIPT, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    folder.mkdir()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "XDG_STATE_HOME": str(folder / "state"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        **environment,
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with subprocess.Popen(
        [*launcher, str(script), str(folder), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as agent:
        try:
            yield agent
        finally:
            if agent.poll() is None:
                agent.terminate()


def results(folder: Path, ranks: int, agent: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What each rank told, after what holds for every job: the same keys and artifacts, and losses as locally."""
    found = decisions(folder, ranks, agent)
    assert all(rank["digests"] == found[0]["digests"] for rank in found)
    return found


def decisions(folder: Path, ranks: int, agent: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What each rank told: none decided alone."""
    output = agent.communicate(timeout=300)[0]
    assert agent.returncode == 0, output[-4000:]
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    for rank in found:
        assert rank["relay"] == pytest.approx(rank["local"], rel=1e-4)
        assert rank["keys"] == found[0]["keys"] != []
        assert rank["alone"] == {}
    return found


def test_two_ranks_make_one_request_load_one_artifact_and_train_as_locally(
    service: PrivateService, tmp_path: Path
) -> None:
    before = service.stats()
    with torchrun(tmp_path / "job", 2, environment=service.environment) as agent:
        found = results(tmp_path / "job", 2, agent)
    after = service.stats()
    graphs = len(found[0]["keys"])
    assert graphs == len(found[0]["digests"])
    assert sorted(rank["outcomes"] for rank in found) == [["miss"] * graphs, ["shared"] * graphs]
    gained = {name: after[name] - before[name] for name in ("requests", "compiles", "hits", "coalesced")}
    assert gained == {"requests": graphs, "compiles": graphs, "hits": 0, "coalesced": 0}
    run = last_run(tmp_path / "job" / "state" / "torchrelay")
    assert run is not None and [process.rank for process in run.processes] == [0, 1]


@pytest.mark.slow
def test_the_gateway_dies_between_the_first_rank_and_the_others(tmp_path: Path) -> None:
    with PrivateService(tmp_path / "service", arguments=("--cpu-slots", "1")) as service:
        guard = psutil.Process(service.pid)
        folder = tmp_path / "job"
        with torchrun(folder, 4, "LATE", environment=service.environment) as agent:
            wait_until((folder / "begun-0").exists, 120)
            (gateway,) = (p for p in guard.children() if "torchrelay.service" in p.cmdline())
            gateway.kill()
            psutil.wait_procs([gateway], timeout=20)
            (folder / "go").touch()
            found = results(folder, 4, agent)
    assert [set(rank["outcomes"]) for rank in found] == [{"miss"}, {"shared"}, {"shared"}, {"shared"}]


@pytest.mark.slow
def test_ranks_that_no_torchrun_started_agree_through_their_process_groups_store(
    service: PrivateService, tmp_path: Path
) -> None:
    """Ray Train's workers, and cluster scripts, have these variables and no launcher's store."""
    (tmp_path / "job").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        launch = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **service.environment, **launch, **place}
        environment["XDG_STATE_HOME"] = str(tmp_path / "job" / "state")
        command = [sys.executable, str(SCRIPT), str(tmp_path / "job")]
        ranks.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    found = [results(tmp_path / "job", 2, rank) for rank in ranks][-1]
    assert sum("shared" in rank["outcomes"] for rank in found) == 1


@pytest.mark.slow
def test_what_one_rank_could_not_have_no_rank_has(tmp_path: Path) -> None:
    with torchrun(tmp_path / "job", 4, environment={"TORCHRELAY_URL": "http://127.0.0.1:1"}) as agent:
        found = results(tmp_path / "job", 4, agent)
    assert {outcome for rank in found for outcome in rank["outcomes"]} == {"fallbackgateway_unreachable"}


@pytest.mark.slow
def test_what_one_rank_cannot_load_no_rank_loads(service: PrivateService, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--user", "--mount", "--map-root-user", "true"]).returncode:
        pytest.skip("this machine lets nobody mount a file system in a user namespace")
    before = service.stats()["requests"]
    with torchrun(tmp_path / "job", 2, "LATE", "NOEXEC", environment=service.environment) as agent:
        wait_until(lambda: service.stats()["requests"] > before, 120)  # rank 0, which can load it, leads
        (tmp_path / "job" / "go").touch()
        found = decisions(tmp_path / "job", 2, agent)
    assert {outcome for rank in found for outcome in rank["outcomes"]} == {"fallbackcannot_load"}


@pytest.mark.slow
def test_workers_of_ray_train_agree(service: PrivateService, tmp_path: Path) -> None:
    # not in this process, where Ray would keep for good that there is no token
    if subprocess.run([sys.executable, "-c", "import ray.train.torch"], capture_output=True).returncode:
        pytest.skip("needs ray[train]")
    (folder := tmp_path / "job").mkdir()
    before = service.stats()["requests"]
    environment = {**os.environ, **service.environment, "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, str(SCRIPT.with_name("ray_train.py")), str(folder), "2"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as trainer:
        found = results(folder, 2, trainer)
    graphs = len(found[0]["keys"])
    assert sorted(set(rank["outcomes"]) == {"shared"} for rank in found) == [False, True]
    assert (
        service.stats()["requests"] == before + graphs
    )  # one worker asked; another test may have had it compiled
