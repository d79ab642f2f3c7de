"""Random numbers worked out with tensors are those that compiled CPU code draws, and a wrong graph is found out."""

from __future__ import annotations

import pytest
import torch
from torchrelay.compiler import replay, torch_internals
from torchrelay.compiler.errors import VerifyFailed

SEEDS = (5, 2**40 + 17, -3, 2**62 + 1)


@pytest.fixture(scope="module")
def draw():
    return {
        mode: torch.compile(lambda seed, mode=mode: torch.ops.prims.inductor_random([7, 33], seed, mode))
        for mode in ("rand", "randn")
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_numbers_are_equal_in_every_bit(draw, seed):
    seed = torch.tensor(seed)
    assert torch.equal(replay.uniform([7, 33], seed), draw["rand"](seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_normal_numbers_agree_to_rounding(draw, seed):
    seed = torch.tensor(seed)
    torch.testing.assert_close(replay.normal([7, 33], seed), draw["randn"](seed), rtol=1e-5, atol=1e-6)


def program(x, buffer):
    buffer.mul_(0.5)
    return torch.nn.functional.dropout(x, 0.3) + torch.rand_like(x) + buffer


@pytest.fixture
def compiled():
    kept: dict[int, torch.fx.GraphModule] = {}

    def backend(gm, inputs):
        return torch_internals.inductor_compile(
            gm, inputs, {"force_disable_caches": True}, on_lowering=lambda backward: None, kept=kept
        )

    call = torch.compile(program, backend=backend)
    call(torch.randn(4, 5, requires_grad=True), torch.ones(5)).sum().backward()
    return call, kept


def run(compiled, compare):
    call, kept = compiled
    judge = replay.Replay(compare)
    with torch_internals.replaying(kept, judge):
        call(torch.randn(4, 5, requires_grad=True), torch.ones(5)).sum().backward()
    return judge


def test_forward_backward_and_changed_inputs_are_compared(compiled):
    seen = []

    def compare(name, want, have, scale, noise):
        seen.append(name)
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(have, want)

    assert run(compiled, compare).graphs == 2
    assert {name.split()[0] for name in seen} == {"output", "input"}


def test_a_graph_that_differs_is_found_out(compiled):
    _, kept = compiled
    forward = next(gm for gm in kept.values() if "inductor_random" in gm.code)
    addition = next(node for node in forward.graph.nodes if node.target is torch.ops.aten.add.Tensor)
    addition.target = torch.ops.aten.sub.Tensor
    forward.recompile()

    def compare(name, want, have, scale, noise):
        if isinstance(want, torch.Tensor) and not torch.allclose(want.float(), have.float(), atol=1e-4):
            raise VerifyFailed(name)

    with pytest.raises(VerifyFailed, match="output 0 of graph 1"):
        run(compiled, compare)


def test_inputs_that_aten_refuses_say_nothing_of_the_compiled_form():
    graph = torch.fx.symbolic_trace(lambda table, index: torch.ops.aten.index_select.default(table, 0, index))
    judge = replay.Replay(lambda *values: None)
    with pytest.raises(replay.CannotReplay, match=r"IndexError|RuntimeError"):
        judge(graph, [torch.zeros(2, 2), torch.tensor([9])], lambda inputs: None)
