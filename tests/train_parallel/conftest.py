"""One whole service (redis-server, Ray, gateway) for all tests of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torchrelay.examples.harness.private_service import PrivateService


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateService]:
    with PrivateService(tmp_path_factory.mktemp("s")) as running:
        yield running
