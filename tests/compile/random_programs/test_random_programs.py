"""Random programs through the client's whole way give what eager gives, and what Inductor gives.

A worker compares an artifact with the request that it got; only this sees a client that describes another graph, or
binds its inputs, the tensors that it holds, or its outputs in the wrong way. Where Inductor in this process does not
give what eager gives either, its result is the one to have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from local_artifacts import CompileProcess, LocalBackend
from random_programs import MESH, backward, device_mesh, leaves_of, module_of, program_of
from torch.utils import _pytree as pytree
from torchrelay.compiler.errors import VerifyFailed
from torchrelay.compiler.search.numerics import difference

PROGRAMS = 560
SHARE = 10
"""Programs of one test."""
TOLERANCE = 2e-2
NOT_SENT = (
    "a DTensor of symbolic sizes comes into the graph",
    "a DTensor shares memory with another input",
    "a DTensor that is still to be reduced comes into the graph, or leaves it",
)
"""Why a graph may be compiled here."""
INDUCTOR_TOO = 5
"""Of one program in so many Inductor's result is compared too, even if the artifact gives what eager gives."""


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    folder = tmp_path_factory.mktemp("compile")
    process = CompileProcess(folder)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield LocalBackend(process, folder)
    torch.distributed.destroy_process_group()
    process.close()


class Result:
    """What two calls of a program left: values, and facts that must be equal."""

    def __init__(self, source: str, wrap: Callable[[Any, Any], Any]) -> None:
        self.values: list[tuple[str, torch.Tensor]] = []
        self.facts: list[tuple[str, Any]] = []
        self.error = ""
        torch.compiler.reset()
        module = module_of(source, "<program>", **{MESH: device_mesh()})
        try:
            called = wrap(module.program, module.DYNAMIC)
            for step in (0, 1):
                self._call(f"call {step}", module, called, step)
        except Exception as error:
            self.error = f"{type(error).__name__}: {str(error).strip()[:1500]}"

    def _call(self, name: str, module: Any, called: Any, step: int) -> None:
        leaves, arguments = module.make(step)
        if module.MARKED:
            for value in leaves_of(arguments):
                if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] > 2:
                    torch._dynamo.maybe_mark_dynamic(value, 0)
        torch.manual_seed(step)
        outputs = called(*arguments)
        gradients = backward(outputs, leaves)
        self.facts.append((f"{name}: structure", str(pytree.tree_structure(outputs))))
        groups: dict[int, int] = {}
        for kind, found in (
            ("argument", leaves_of(arguments)),
            ("held", module.HELD),
            ("output", leaves_of(outputs)),
            ("gradient", gradients),
        ):
            for position, value in enumerate(found):
                self._add(f"{name}: {kind} {position}", value, groups, aliased=kind != "gradient")

    def _add(self, name: str, value: Any, groups: dict[int, int], *, aliased: bool) -> None:
        if not isinstance(value, torch.Tensor):
            # Dynamo gives the function itself for what a constant function returned: another one in each module.
            self.facts.append((name, getattr(value, "__name__", value)))
            return
        stride = tuple(step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1)
        local = getattr(value, "_local_tensor", value)
        storage = local.untyped_storage()._cdata
        group = groups.setdefault(storage, len(groups)) if aliased else None
        placements = str(getattr(value, "placements", ""))
        facts = (str(value.dtype), tuple(value.shape), stride, value.requires_grad, group, placements)
        self.facts.append((name, facts))
        self.values.append((name, local.detach().clone()))


def differs(want: Result, have: Result) -> str:
    """The first difference; '' if there is none."""
    if want.error or have.error:
        return "" if want.error == have.error else have.error or f"no error, where there was {want.error}"
    for (name, fact), (_, other) in zip(want.facts, have.facts, strict=False):
        if fact != other:
            return f"{name}: {other}, not {fact}"
    for (name, value), (_, other) in zip(want.values, have.values, strict=True):
        try:
            relative, _ = difference(name, value, other)
        except VerifyFailed as error:
            return error.message
        if not relative <= TOLERANCE:
            return f"{name}: {other}, not {value}"
    return ""


def failure(seed: int, backend: LocalBackend) -> str:
    """What is wrong with a seed's program; '' if nothing is."""
    source = program_of(seed)
    eager = Result(source, lambda program, dynamic: program)
    assert not eager.error, f"{eager.error}\n{source}"
    served = Result(source, lambda program, dynamic: torch.compile(program, backend=backend, dynamic=dynamic))
    found = differs(eager, served)
    if not found and seed % INDUCTOR_TOO:
        return ""
    local = Result(
        source, lambda program, dynamic: torch.compile(program, backend="inductor", dynamic=dynamic)
    )
    if local.error and found:
        return ""  # PyTorch cannot compile it
    if "VerifyFailed:" in served.error and differs(eager, local):
        return ""  # PyTorch compiles it wrongly, which a worker saw
    found = differs(local, served) if found else found
    return f"\nseed {seed}: {found}\n{source}" if found else ""


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, PROGRAMS, SHARE))
def test_random_programs_give_what_they_give_eagerly(first: int, backend: LocalBackend) -> None:
    seeds = range(first, first + SHARE)
    before, refused = backend.graphs, len(backend.refused)
    failures = [text for seed in seeds if (text := failure(seed, backend))]
    assert not failures, f"{len(failures)} of {len(seeds)} programs:{''.join(failures)}"
    refusals = backend.refused[refused:]
    assert all(any(kind in text for kind in NOT_SENT) for text in refusals), refusals
    assert len(refusals) <= (backend.graphs - before) / 2, refusals
