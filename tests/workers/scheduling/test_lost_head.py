"""A dispatcher whose Ray cluster has lost its head, with a real Ray and a real Redis."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest
from pool_parts import RAY_TOKEN
from ray_nodes import Nodes, kill_families
from service_parts import RedisServer, client_of, free_port
from waiting import wait_until


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
def dispatcher(nodes: Nodes, redis_server: RedisServer, tmp_path: Path) -> Iterator[psutil.Popen]:
    """The role, as `torchrelay dispatcher` starts it."""
    port = str(free_port())
    given = {"REDIS_URL": redis_server.url, "RAY_ADDRESS": nodes.address, "RAY_TOKEN": RAY_TOKEN}
    settings = {f"TORCHRELAY_SERVICE_{name}": value for name, value in given.items()}
    process = psutil.Popen(
        [
            *(sys.executable, "-m", "torchrelay.service", "dispatcher", "--port", port),
            *("--state", str(tmp_path)),
        ],
        env={**os.environ, **settings},
    )
    process.port = port
    yield process
    kill_families(process)


def ready(dispatcher: psutil.Popen) -> bool | None:
    """None: it does not answer."""
    with client_of(f"http://127.0.0.1:{dispatcher.port}", None) as http:
        try:
            return http.get("/readyz").status_code == 200
        except httpx2.TransportError:
            return None


@pytest.mark.parametrize(
    "away", [pytest.param(False, id="back-at-once"), pytest.param(True, id="away", marks=pytest.mark.slow)]
)
def test_a_dispatcher_that_has_lost_rays_head_says_so_and_joins_the_next_one(
    nodes: Nodes, dispatcher: psutil.Popen, away: bool
) -> None:
    """Ray ends a process that has no GCS for a minute, or meets another cluster's."""
    wait_until(lambda: bool(ready(dispatcher)), 120)
    (before,) = dispatcher.children()
    (gcs,) = [each for each in nodes.processes[0].children(recursive=True) if each.name() == "gcs_server"]
    gcs.kill()
    if away:
        wait_until(lambda: ready(dispatcher) is False, 60)
        wait_until(lambda: not before.is_running(), 120)
        wait_until(lambda: ready(dispatcher) is False, 60)
    kill_families(nodes.processes[0])
    nodes.head()
    wait_until(lambda: not before.is_running() and bool(ready(dispatcher)), 180)
    (after,) = dispatcher.children()
    dispatcher.terminate()
    assert dispatcher.wait(60) == 0
    assert not after.is_running()
