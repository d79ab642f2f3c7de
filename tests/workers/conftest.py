"""Some of these tests take what others have: their folders are on the path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_nodes import Nodes

sys.path += [str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir()]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        made.head()
        yield made
    finally:
        made.close()
