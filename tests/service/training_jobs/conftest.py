"""A gateway whose nodes train in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from service_parts import Running
from training_parts import TrainingPool


@pytest.fixture
def pool(tmp_path: Path) -> TrainingPool:
    (tmp_path / "driver").mkdir()
    return TrainingPool(tmp_path / "driver")


@pytest.fixture
def gateway(start_gateway: Callable[..., Running], pool: TrainingPool) -> Running:
    return start_gateway(pool)


@pytest.fixture
def http(gateway: Running) -> Iterator[httpx2.Client]:
    with gateway.http() as client:
        yield client
