"""A program run twice, compiled by local Inductor and through the service: all that either left, held together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torchrelay
from msgspec import Struct
from torch.utils._pytree import tree_flatten

Program = Callable[..., Any]
Inputs = Callable[[int], tuple[Any, ...]]


class Run(Struct):
    """What a program left. `values`: everything to compare, in order; `graphs`: how many graphs were compiled."""

    values: list[tuple[str, Any]]
    graphs: int


def run(
    make: Callable[[], Program],
    inputs: Inputs,
    *,
    backend: str | Callable[..., Any],
    steps: int = 2,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    **options: Any,
) -> Run:
    """Compile what `make` makes and run it `steps` times: forward, backward where it can be, a step of SGD."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    program = make()
    parameters = list(program.parameters()) if isinstance(program, torch.nn.Module) else []
    trained = [p for p in parameters if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9) if trained else None
    compiled = torch.compile(program, backend=backend, **options)
    values: list[tuple[str, Any]] = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        given = inputs(step)
        with around():
            returned = compiled(*given)
        leaves, structure = tree_flatten(returned)
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        tensors = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, torch.Tensor)]
        values.append((f"step {step}: structure", str(structure)))
        values.append((f"step {step}: aliases", _aliases(outputs, tensors)))
        values += [
            (f"step {step}: output {i}", x.detach().clone() if isinstance(x, torch.Tensor) else x)
            for i, x in enumerate(leaves)
        ]
        values.append((f"step {step}: gradients wanted", [x.requires_grad for x in outputs]))
        values += [(f"step {step}: input {i} afterwards", x.detach().clone()) for i, x in enumerate(tensors)]
        differentiable = [x for x in outputs if x.requires_grad]
        if differentiable:
            # The gradient of a plain sum is zero through any normalization and would compare nothing.
            sum((x.abs() * _ramp(x)).sum() for x in differentiable).backward()  # type: ignore[union-attr]
        values += [(f"step {step}: gradient of input {i}", _gradient(x)) for i, x in enumerate(tensors)]
        values += [
            (f"step {step}: gradient of parameter {i}", _gradient(p)) for i, p in enumerate(parameters)
        ]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        values.append((f"step {step}: random state", torch.get_rng_state()))
    if isinstance(program, torch.nn.Module):
        values += [(f"{name} at the end", value.clone()) for name, value in program.state_dict().items()]
    return Run(values, torch._dynamo.utils.counters["stats"]["unique_graphs"])


def agree(make: Callable[[], Program], inputs: Inputs, *, tolerance: float = 0.0, **settings: Any) -> Run:
    """Assert that local compilation and the service give the same, in as many graphs; the remote run.

    tolerance: largest difference relative to a tensor's largest magnitude; 0 means the same bits.
    """
    local = run(make, inputs, backend="inductor", **settings)
    before = torchrelay.report()
    remote = run(make, inputs, backend="torchrelay", **settings)
    assert remote.graphs == local.graphs > 0, (remote.graphs, local.graphs)
    came = served(before)
    assert came >= remote.graphs, f"{remote.graphs} graphs, {came} through the service"
    same(local, remote, tolerance)
    return remote


def same(expected: Run, found: Run, tolerance: float = 0.0) -> None:
    """Assert that two runs left the same values, up to `tolerance`."""
    assert [name for name, _ in expected.values] == [name for name, _ in found.values]
    for (name, want), (_, have) in zip(expected.values, found.values, strict=True):
        if not isinstance(want, torch.Tensor):
            assert want == have, name
            continue
        assert (want.dtype, want.shape, want.stride()) == (have.dtype, have.shape, have.stride()), name
        exact = tolerance == 0.0 or not (want.dtype.is_floating_point or want.dtype.is_complex)
        finite = want[want.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() and not exact else 0.0
        torch.testing.assert_close(
            have,
            want,
            rtol=0,
            atol=tolerance * scale,
            equal_nan=True,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def served(before: torchrelay.Report) -> int:
    """Graphs since `before` that came from the service or the disk cache, none of them compiled here."""
    now = torchrelay.report()
    assert now.fallbacks == before.fallbacks
    return sum(getattr(now, n) - getattr(before, n) for n in ("hits", "disk_hits", "misses", "coalesced"))


def _ramp(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, x.numel()).reshape(x.shape)


def _gradient(x: torch.Tensor) -> Any:
    return None if not x.is_leaf or x.grad is None else x.grad.clone()


def _aliases(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[tuple[int, ...]]:
    """For each output, the inputs that share its memory."""
    return [
        tuple(i for i, x in enumerate(inputs) if x.numel() and x.untyped_storage().data_ptr() == memory)
        for memory in (o.untyped_storage().data_ptr() for o in outputs)
    ]
