"""A simulation of recorded searches, with the service's own scheduler and search workers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torchrelay.compiler import decoding

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")


@pytest.fixture(scope="module")
def search_scaling() -> Iterator[ModuleType]:
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import search_scaling

        yield search_scaling
    for name in set(sys.modules) - before:
        if Path(BENCHMARKS) in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


@pytest.mark.parametrize(("scale", "start"), [(1.5, 6.0), (2.0, 2.0), (3.0, 2.0)])
def test_two_gpus_search_a_graph_in_half_of_ones_time_and_each_simulation_is_alike(
    search_scaling: ModuleType, scale: float, start: float
) -> None:
    recording = decoding.from_json(search_scaling.RECORDED.read_bytes(), type=search_scaling.Recording)
    args = argparse.Namespace(processors=16, scale=scale, start=start)
    one, two, again = (search_scaling.simulate(recording, gpus, args) for gpus in (1, 2, 2))
    assert two == again
    assert 0 < two.wait <= 0.55 * one.wait, "all but what one GPU has to do after the other is spread"
