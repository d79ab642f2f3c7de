"""This process as a client of a whole service."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torchrelay.clients.backend import RelayBackend, process_backend
from torchrelay.clients.reports.run_report import process_report
from torchrelay.examples.harness.private_service import PrivateService

Connect = Callable[..., RelayBackend]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateService]:
    with PrivateService(tmp_path_factory.mktemp("s")) as running:
        yield running


@pytest.fixture
def connect(
    service: PrivateService, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Connect]:
    """Make this process a new client: `connect(TORCHRELAY_...=...)`. Empty disk cache, report at zero."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TORCHRELAY_")]:
            patch.delenv(name)
        for name, value in service.environment.items():
            patch.setenv(name, value)
        patch.setenv("TORCHRELAY_STATE_DIR", str(tmp_path_factory.getbasetemp() / "state"))
        patch.setenv("TORCHRELAY_PREFETCH", "0")  # each test counts what it asked for itself
        # Compares each first call with eager: a worker does not see the client's own inputs.
        patch.setenv("TORCHRELAY_CHECK", "1")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))

        def make(**variables: str) -> RelayBackend:
            for name, value in ({"TORCHRELAY_CACHE_DIR": str(tmp_path / "client")} | variables).items():
                patch.setenv(name, value)
            process_backend.cache_clear()
            process_report.cache_clear()
            return process_backend()

        yield make
        process_backend.cache_clear()
        process_report.cache_clear()


@pytest.fixture
def remote(connect: Connect) -> RelayBackend:
    """A client whose graphs must go to the service: mode `require`."""
    return connect(TORCHRELAY_MODE="require")
