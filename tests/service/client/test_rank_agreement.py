"""Ranks of a job through the whole client: one decision, one request; a real c10d store and a real gateway."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchrelay
from service_parts import TOKEN, Running
from torchrelay.clients.backend import process_backend
from torchrelay.clients.reports.run_report import process_report
from torchrelay.compiler import errors

Connect = Callable[..., None]


@pytest.fixture
def as_rank(gateway: Running, tmp_path: Path) -> Iterator[Connect]:
    """Make this process another rank of a job, with a disk cache of its own, and a client of the gateway."""
    with pytest.MonkeyPatch.context() as patch, gateway.http() as http:
        public = http.get("/v1/info").json()["public_keys"][0]

        def connect(rank: int, **variables: str) -> None:
            for name in [name for name in os.environ if name.startswith(("TORCHRELAY_", "TORCHELASTIC_"))]:
                patch.delenv(name)
            own = {
                "TORCHRELAY_URL": gateway.url,
                "TORCHRELAY_TOKEN": TOKEN,
                "TORCHRELAY_PUBLIC_KEYS": public,
                "TORCHRELAY_MODE": "remote",
                "TORCHRELAY_CACHE_DIR": str(tmp_path / f"rank-{rank}"),
                "TORCHRELAY_STATE_DIR": str(tmp_path / f"state-{rank}"),
                "TORCHRELAY_PREFETCH": "0",
                **variables,
            }
            for name, text in own.items():
                patch.setenv(name, text)
            clear()

        def clear() -> None:
            process_backend.cache_clear()
            process_report.cache_clear()
            torch.compiler.reset()

        yield connect
        clear()


@pytest.fixture
def launched(as_rank: Connect) -> Iterator[Connect]:
    """`as_rank` under a launcher that keeps a store, as torchrun does."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    with pytest.MonkeyPatch.context() as patch:

        def connect(rank: int, **variables: str) -> None:
            launch = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            for name, text in {**launch, "MASTER_PORT": str(store.port)}.items():
                patch.setenv(name, text)
            as_rank(rank, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="17", **variables)

        yield connect


def run() -> torchrelay.Report:
    """One graph; its result is right whatever happened."""
    x = torch.linspace(-1, 1, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchrelay.FallbackWarning)
        found = torch.compile(lambda x: x.sin().square().sum(), backend="torchrelay")(x)
    torch.testing.assert_close(found, x.sin().square().sum())
    return torchrelay.report()


def test_all_ranks_fall_back_for_the_reason_that_the_first_one_met(
    launched: Connect, gateway: Running
) -> None:
    gateway.pool.errors.append(errors.NoWorker("none for rank 0"))
    launched(0)
    assert run().fallbacks == {"no_worker": 1}
    launched(1)  # a worker would be there by now
    told = run()
    assert (told.fallbacks, told.alone) == ({"no_worker": 1}, {})
    assert len(gateway.pool.calls) == 1


def test_a_graph_that_comes_again_in_a_process_keeps_its_decision(
    launched: Connect, gateway: Running
) -> None:
    gateway.pool.errors.append(errors.NoWorker("none"))
    launched(0)
    run()
    torch.compiler.reset()
    assert run().fallbacks == {"no_worker": 2}
    assert len(gateway.pool.calls) == 1


def test_another_start_of_the_job_decides_anew(launched: Connect, gateway: Running) -> None:
    gateway.pool.errors.append(errors.NoWorker("none"))
    launched(0)
    run()
    launched(0, TORCHELASTIC_RESTART_COUNT="1")
    # The pool's artifacts hold no code, so that loading them is what fails now.
    assert run().fallbacks == {"bad_artifact": 1}


def test_a_store_that_cannot_be_reached_is_as_no_job_and_is_told(
    as_rank: Connect, gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrelay.clients.artifacts.ranks import job_source

    monkeypatch.setattr(job_source, "STORE_SECONDS", 0.5)
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, text in launch.items():
        monkeypatch.setenv(name, text)
    as_rank(0, TORCHELASTIC_USE_AGENT_STORE="True")
    told = run()
    assert (told.fallbacks, told.alone) == ({"bad_artifact": 1}, {"job_unreachable": 1})
    torch.compiler.reset()
    assert run().alone == {"job_unreachable": 2}
