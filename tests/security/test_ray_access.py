"""The embedded Ray: on loopback alone, without a dashboard, and deaf to whoever has no token. And a driver of any Ray
unpickles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

TOKEN = "right" * 8
_DASHBOARD = "ray/dashboard/dashboard.py"

_CLUSTER = """
import asyncio, sys
from torchrelay.workers.scheduling.ray_cluster import RayCluster
from torchrelay.workers.settings import PoolSettings

async def main():
    cluster = RayCluster(PoolSettings(cpu_slots=0, gpu_slots_per_gpu=0, ray_token=sys.argv[1]))
    await cluster.start()
    import ray
    print(ray.get_runtime_context().gcs_address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await cluster.stop()

asyncio.run(main())
"""
_ASK = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(len(ray.nodes()))
"""


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, **changes}


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[psutil.Process, str]]:
    """The process that started it, and its address."""
    started = subprocess.Popen(
        [sys.executable, "-c", _CLUSTER, TOKEN],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None and started.stdin is not None
    try:
        yield psutil.Process(started.pid), started.stdout.readline().strip()
    finally:
        started.stdin.close()
        started.wait(120)
        started.stdout.close()


@pytest.mark.slow
def test_every_port_is_on_loopback_and_the_dashboard_serves_no_page(
    cluster: tuple[psutil.Process, str],
) -> None:
    parent, address = cluster
    assert address.startswith("127.0.0.1:")
    family = [parent, *parent.children(recursive=True)]
    listening = {
        connection.laddr.ip
        for process in family
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert listening
    boards = [line for line in (process.cmdline() for process in family) if _DASHBOARD in " ".join(line)]
    assert all("--disable-frontend" in line for line in boards), (
        boards
    )  # what is left of it counts, and serves no page
    assert not any(TOKEN in part for process in family[1:] for part in process.cmdline())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("secrets", "opens"),
    [
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}, True),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong" * 8}, False),
        ({"RAY_AUTH_MODE": "disabled"}, False),
    ],
    ids=["right", "wrong", "none"],
)
def test_who_has_no_token_gets_nothing(
    secrets: dict[str, str], opens: bool, cluster: tuple[psutil.Process, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ASK, cluster[1]],
        env=environment(
            HOME=str(tmp_path),
            RAY_gcs_rpc_server_reconnect_timeout_s="5",
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # else Ray asks at the address of another interface
            **secrets,
        ),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode == 0) is opens, done.stderr[-2000:]
    if not opens:
        assert "nauthenticated" in done.stderr or "uthentication" in done.stderr


UNPICKLERS = """
    import os, pickle, sys
    import ray, ray.autoscaler.sdk, ray.util.placement_group, ray.util.scheduling_strategies
    from torchrelay.workers import pool, ray_internals

    plain, named = [{"a": (1, b"b", None)}], pickle.dumps(os.getpid)
    open_ones = [pickle, pickle.load, pickle.loads, pickle.Unpickler]
    with ray_internals.nothing_unpickled(()):
        assert ray.cloudpickle.loads(pickle.dumps(plain)) == plain
        for loads in (ray.cloudpickle.loads, ray.cloudpickle.cloudpickle.loads, ray._raylet.pickle.loads):
            try:
                loads(named)
                raise SystemExit("it was unpickled")
            except pickle.UnpicklingError as error:
                assert "posix.getpid was sent" in str(error)
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "ray":
                if any(value is each for value in list(vars(module).values()) for each in open_ones):
                    print(name)
    assert ray.cloudpickle.loads(named) is os.getpid
"""


def test_no_part_of_ray_that_a_driver_loads_has_an_unpickler_of_its_own() -> None:
    command = [sys.executable, "-c", textwrap.dedent(UNPICKLERS)]  # other tests have loaded more of Ray
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert {*done.stdout.split()} == {"ray.cloudpickle.cloudpickle", "ray.cloudpickle"}, (
        "these use it to pickle"
    )
