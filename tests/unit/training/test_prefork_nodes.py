"""Which nodes get a warm process: those that ranks may come to be on, and few more."""

from __future__ import annotations

from typing import Any

import pytest
from torchrelay.compiler.api.training.jobs import TrainSpec
from torchrelay.workers.scheduling.ray_resources import OFFER
from torchrelay.workers.training.prefork.nodes import likely_nodes


def node(cpus: float, gpus: float = 0.0, *, offers: bool = True) -> dict[str, float]:
    return {"CPU": cpus, "GPU": gpus, "memory": 8e9, **({OFFER: 1.0} if offers else {})}


@pytest.mark.parametrize(
    ("asked", "nodes", "chosen"),
    [
        ({"workers": 2}, {"a": node(1), "b": node(2)}, ["b", "a"]),
        ({"workers": 2}, {"a": node(0.5), "b": node(2)}, ["b"]),
        ({"workers": 1}, {name: node(4) for name in "edcba"}, ["a", "b", "c"]),
        ({"workers": 9}, {name: node(4) for name in "gfedcba"}, ["a", "b", "c", "d", "e"]),
        ({"workers": 2, "device": "cuda"}, {"a": node(64), "b": node(8, 8)}, ["b"]),
        ({"workers": 2}, {"a": node(64, offers=False), "b": node(1)}, ["b"]),
        ({"workers": 1, "memory_bytes": 9_000_000_000}, {"a": node(64)}, []),
        ({"workers": 4}, {}, []),
    ],
)
def test_those_with_the_most_room(
    asked: dict[str, Any], nodes: dict[str, dict[str, float]], chosen: list[str]
) -> None:
    assert likely_nodes(TrainSpec(name="job", script="a.py", **asked), nodes) == chosen
