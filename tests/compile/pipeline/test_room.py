"""What verification holds of one run while it makes another, and what it does where there is no room for one."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_requests import eager_of, request_of
from torch.multiprocessing.reductions import StorageWeakRef
from torchrelay.compiler.errors import VerifyFailed
from torchrelay.compiler.pipeline.verification import verify as verify_module
from torchrelay.compiler.pipeline.verification.verify import verify
from torchrelay.compiler.request import schema


def layers(width: int) -> schema.GraphRequest:
    def program(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = (x @ weight).tanh()
        return x

    return request_of(
        program, torch.randn(8, width), *(torch.randn(width, width).requires_grad_() for _ in range(8))
    )


def off(request: schema.GraphRequest, by: float, seen: list[StorageWeakRef] | None = None) -> Any:
    """The graph itself, with an output that is too large."""
    eager = eager_of(request)

    def call(*inputs: Any) -> Any:
        if seen is not None:
            seen.extend(StorageWeakRef(value.untyped_storage()) for value in inputs)
        return [eager(*inputs)[0] * (1 + by)]

    return call


def test_inputs_that_no_run_changes_are_not_held_during_further_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    request, seen, held, run = layers(16), [], {}, verify_module._run

    def watched(*args: Any, **how: Any) -> Any:
        held[str(how)] = sum(not memory.expired() for memory in seen)
        return run(*args, **how)

    monkeypatch.setattr(verify_module, "_run", watched)
    with pytest.raises(VerifyFailed):
        verify(request, off(request, 0.1, seen))
    assert len(seen) >= 9
    assert held["{'exact': True}"] == held["{'rounded': 1}"] == 0


@pytest.mark.parametrize("wrong", [False, True])
def test_nothing_waits_for_garbage_collection(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """A step's activations and inputs are some GiB, which a GPU has no room for twice."""
    request, seen, random_inputs = layers(16), [], verify_module.random_inputs

    def drawn(*args: Any) -> list[Any]:
        values = random_inputs(*args)
        seen.extend(StorageWeakRef(value.untyped_storage()) for value in values)
        return list(values)

    monkeypatch.setattr(verify_module, "random_inputs", drawn)
    gc.collect()
    gc.disable()
    try:
        if wrong:
            with pytest.raises(VerifyFailed):
                verify(request, off(request, 0.1))
        else:
            assert verify(request, off(request, 0.0)).status == "passed"
        assert len(seen) >= 27
        assert [memory.expired() for memory in seen] == [True] * len(seen)
    finally:
        gc.enable()


def held_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")
    )
    return int(line.split()[1]) << 10


def test_where_float64_has_no_room_a_graph_is_unverified_and_says_why() -> None:
    request = layers(2048)  # inputs and gradients: 128 MiB each
    with pytest.raises(VerifyFailed, match="output 0 differs"):
        verify(request, off(request, 0.1), memory=held_bytes() + (8 << 30))
    limit = held_bytes() + (680 << 20)
    found = verify(request, off(request, 0.1), memory=limit)
    assert found.status == "skipped"
    assert "too little memory: a run takes" in found.reason
    assert verify(request, off(request, 0.0), memory=limit).status == "passed"
