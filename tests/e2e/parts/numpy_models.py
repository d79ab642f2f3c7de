"""A client that runs small models on examples/numpy_prims.py and eagerly; prints by how much they differ."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from small_models import build
from torchrelay.examples.numpy_prims import numpy_prims


def tensors(value: Any) -> list[torch.Tensor]:
    return (
        [value]
        if isinstance(value, torch.Tensor)
        else [each for part in values(value) for each in tensors(part)]
    )


def values(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, Sequence) else ()


def difference(name: str) -> float:
    """The largest, relative to the magnitude of each output."""
    torch.compiler.reset()
    model, inputs = build(name)
    with torch.no_grad():
        expected, computed = (
            tensors(run(*inputs)) for run in (model, torch.compile(model, backend=numpy_prims))
        )
    assert expected and [each.shape for each in expected] == [each.shape for each in computed]
    return max(
        float((one - other).abs().max() / one.abs().max())
        for one, other in zip(expected, computed, strict=True)
    )


if __name__ == "__main__":
    print(json.dumps({name: difference(name) for name in sys.argv[1:]}))
