"""One whole service (redis-server, Ray, gateway) for all end-to-end tests of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path += [str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir()]

from torchrelay.examples.harness.private_service import PrivateService


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateService]:
    with PrivateService(tmp_path_factory.mktemp("s")) as running:
        yield running
