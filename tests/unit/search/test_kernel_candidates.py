"""A user's kernel measured: its arguments lie in several places of a GPU's memory by turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrelay.compiler.search import benchmark, user_kernel_benchmark


def test_each_take_has_the_arguments_elsewhere_and_launches_are_ready_before_the_first_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    measured: Any = object.__new__(user_kernel_benchmark._KernelBenchmark)
    measured._order = SimpleNamespace(device="cuda", careful=False)
    measured._tell = lambda told: None
    measured._inputs = {"x": torch.arange(4.0)}
    measured._memory = {"x": torch.arange(4.0)}
    measured._elsewhere = [measured._memory]
    measured._places, measured._place, measured._ready = benchmark.BufferRotation(), 0, {}
    did: list[tuple[str, int, int]] = []

    def launcher(candidate: int) -> Any:
        if candidate == 2:
            raise RuntimeError("does not compile")
        x = measured._memory["x"]
        did.append(("bound", candidate, x.data_ptr()))
        return lambda: did.append(("launched", candidate, x.add_(1.0).data_ptr()))

    def sample(order: list[int]) -> list[float | None]:
        return [1.0 if measured._launch(candidate) is None else None for candidate in order if candidate != 2]

    measured._launcher, measured._sample_gpu = launcher, sample
    takes = []
    for _ in range(benchmark.BufferRotation.MOST + 1):
        measured._take([0, 1, 2, 1, 0, 2])
        takes.append(did[:])
        did.clear()
    places = []
    for number, take in enumerate(takes):
        again = number == benchmark.BufferRotation.MOST
        assert [what for what, _, _ in take] == [*(["bound"] * 2 * (not again)), *(["launched"] * 4)]
        (place,) = {address for _, _, address in take}
        places.append(place)
    assert len(set(places)) == benchmark.BufferRotation.MOST and places[-1] == places[0]
    assert measured._inputs["x"].tolist() == [0.0, 1.0, 2.0, 3.0], "samples do not write to what is copied"
