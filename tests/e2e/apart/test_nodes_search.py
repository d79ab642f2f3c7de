"""A batch job on nodes that come and go: one that joins searches too, and a lost one's problems are searched elsewhere.

Like test_up_apart.py, whose parts it uses, this file is the test and the program in the network namespace.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_up_apart import Apart, listens, loopback_up, namespace, run_alone

JOB = """\
name: on nodes that come and go
device: cpu
threads: 1
operators:
  - {op: bmm, batch: [4, 8, 12], m: [40, 48, 56, 72], k: 32, n: [64, 80, 96, 112], dtype: f32}
"""
PROBLEMS = 48 + 2
"""With the two ceilings: so many that one worker is not done before a second node is up."""


def tune(apart, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "torchrelay.clients.cli", "tune", *arguments],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("TORCHRELAY_")},
            "XDG_CONFIG_HOME": str(apart.home / "config"),
            "XDG_CACHE_HOME": str(apart.home / "cache"),
        },
        cwd=apart.home,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr + apart.logs()
    return done.stdout


def searching(apart):
    """The workers that search now."""
    return {worker["id"] for worker in json.loads(apart.get("/v1/workers")[1]) if worker["searching"]}


def items(apart):
    (job,) = json.loads(tune(apart, "ls", "--json"))
    return job["items"]


def wait_for_the_end(apart):
    """A busy machine may need 40 s for each problem; a job that is stuck finishes none in 300 s."""
    done = items(apart).get("done", 0)
    while done < PROBLEMS:
        more = functools.partial(has_done_more, apart, done)
        apart.wait(more, f"more than {done} of {PROBLEMS} problems done", 300)
        done = items(apart)["done"]
    assert items(apart) == {"done": PROBLEMS}


def has_done_more(apart, than):
    return items(apart).get("done", 0) > than


def come_and_go(apart):
    here = f"redis-server - --port {apart.redis_port} --bind 127.0.0.1"
    apart.compose["redis"]["command"][-1] = apart.compose["redis"]["command"][-1].replace(
        "redis-server -", here, 1
    )
    apart.compose["second"] = apart.compose["worker-cpu"]
    apart.start("redis", [])
    apart.start("ray-head", [], f"--temp-dir={apart.temp_dir}")
    apart.wait(lambda: listens(apart.ray_port) and listens(apart.redis_port), "redis and Ray listening")
    service = apart.start_service()
    apart.start("worker-cpu", service)
    apart.wait(lambda: apart.get("/readyz")[0] == 200, "a warm worker")

    (apart.home / "job.yaml").write_text(JOB)
    tune(apart, "job.yaml", "--detach")
    apart.wait(lambda: items(apart).get("done", 0) >= 1, "the first node finding something", 180)
    (first,) = searching(apart)
    apart.start("second", service)
    apart.wait(lambda: len(searching(apart)) == 2, "the second node searching too", 180)
    before = items(apart)
    assert before.get("done", 0) < PROBLEMS, before

    node = apart.processes.pop("worker-cpu")
    lost = [node, *node.children(recursive=True)]
    for process in lost:  # as a machine that loses power: nothing of it says good-bye
        kill(process)
    wait_for_the_end(apart)
    assert first not in {worker["id"] for worker in json.loads(apart.get("/v1/workers")[1])}


def kill(process):
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return


@pytest.mark.slow
def test_a_job_is_searched_on_nodes_that_join_and_without_nodes_that_are_lost(tmp_path):
    if not namespace():
        pytest.skip("nodes on one address need a network namespace")
    run_alone(__file__, tmp_path, seconds=1400)


def main(home):
    loopback_up()
    parts = Apart(home)
    try:
        come_and_go(parts)
    finally:
        parts.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
