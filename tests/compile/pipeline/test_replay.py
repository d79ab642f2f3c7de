"""Random numbers worked out with tensors are those that compiled CPU code draws, and a wrong graph is found out."""

from __future__ import annotations

import operator
import os
import subprocess
import sys

import pytest
import torch
import torch._inductor.inductor_prims
from torchrelay.compiler.errors import VerifyFailed
from torchrelay.compiler.pipeline.verification import random_replay
from torchrelay.compiler.torch_internals.inductor import compile_fx

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
    assert torch.equal(random_replay.uniform([7, 33], seed), draw["rand"](seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_normal_numbers_agree_to_rounding(draw, seed):
    seed = torch.tensor(seed)
    torch.testing.assert_close(random_replay.normal([7, 33], seed), draw["randn"](seed), rtol=1e-5, atol=1e-6)


def program(x, buffer):
    buffer.mul_(0.5)
    return torch.nn.functional.dropout(x, 0.3) + torch.rand_like(x) + buffer


@pytest.fixture
def compiled():
    kept: dict[int, torch.fx.GraphModule] = {}

    def backend(gm, inputs):
        return compile_fx.compile_graph(
            gm, inputs, {"force_disable_caches": True}, on_lowering=lambda backward: None, kept=kept
        )

    call = torch.compile(program, backend=backend)
    call(torch.randn(4, 5, requires_grad=True), torch.ones(5)).sum().backward()
    return call, kept


def run(compiled, compare):
    call, kept = compiled
    judge = random_replay.Replay(compare)
    with compile_fx.intercepting_calls(kept, judge):
        call(torch.randn(4, 5, requires_grad=True), torch.ones(5)).sum().backward()
    return judge


def test_forward_backward_and_changed_inputs_are_compared(compiled):
    seen = []

    def compare(name, want, have, scale, doubt):
        seen.append(name)
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(have, want)

    judge = run(compiled, compare)
    assert judge.graphs == 2
    assert judge.seconds > 0
    assert {name.split()[0] for name in seen} == {"output", "input"}


@pytest.mark.parametrize("rounds", [False, True], ids=["as kernels do", "as the graph says"])
@pytest.mark.parametrize("view", [False, True], ids=["", "through a view"])
def test_a_mask_in_half_precision_may_be_rounded_or_not(rounds, view):
    """A number within rounding of the threshold falls on either side of it."""

    def dropped(x):
        y = x.bfloat16().t() if view else x.bfloat16()
        y = torch.nn.functional.dropout(y, 0.1).float()
        return (y.t() if view else y) * x

    kept: dict[int, torch.fx.GraphModule] = {}

    def backend(gm, inputs):
        options = {"force_disable_caches": True, "emulate_precision_casts": rounds}
        return compile_fx.compile_graph(gm, inputs, options, on_lowering=lambda _: None, kept=kept)

    torch.compiler.reset()
    call, x = torch.compile(dropped, backend=backend), torch.randn(300, 1000)
    call(x)

    def compare(name, want, have, scale, doubt):
        if not torch.allclose(want, have, rtol=0.1, atol=1e-3):
            raise VerifyFailed(name)

    for wrong in (False, True):
        (graph,) = kept.values()
        if wrong:
            threshold = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.gt.Scalar)
            threshold.args = (threshold.args[0], 0.2)
            graph.recompile()
        with compile_fx.intercepting_calls(kept, random_replay.Replay(compare)):
            if wrong:
                with pytest.raises(VerifyFailed):
                    call(x)
            else:
                call(x)


def test_a_graph_that_differs_is_found_out(compiled):
    _, kept = compiled
    forward = next(gm for gm in kept.values() if "inductor_random" in gm.code)
    addition = next(node for node in forward.graph.nodes if node.target is torch.ops.aten.add.Tensor)
    addition.target = torch.ops.aten.sub.Tensor
    forward.recompile()

    def compare(name, want, have, scale, doubt):
        if isinstance(want, torch.Tensor) and not torch.allclose(want.float(), have.float(), atol=1e-4):
            raise VerifyFailed(name)

    with pytest.raises(VerifyFailed, match="output 0 of graph 1"):
        run(compiled, compare)


def test_inputs_that_aten_refuses_say_nothing_of_the_compiled_form():
    graph = torch.fx.symbolic_trace(lambda table, index: torch.ops.aten.index_select.default(table, 0, index))
    judge = random_replay.Replay(lambda *values: None)
    with pytest.raises(random_replay.CannotReplay, match=r"IndexError|RuntimeError"):
        judge(graph, [torch.zeros(2, 2), torch.tensor([9])], lambda inputs: None)


def test_a_view_of_what_aten_lays_out_otherwise():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.view.default, (x, [4])),))
    gm = torch.fx.GraphModule({}, graph)
    transposed = torch.arange(4.0).reshape(2, 2).t()
    seen = []
    judge = random_replay.Replay(lambda name, want, have, scale, doubt: seen.append(torch.equal(want, have)))
    judge(gm, [transposed], lambda inputs: [inputs[0].reshape(4)])
    assert seen == [True]


TRITON_DRAWS = """
import torch, triton, triton.language as tl
from torch._inductor.runtime import triton_helpers


@triton.jit
def one(seeds, out, count, SIZE: tl.constexpr, NORMAL: tl.constexpr):
    seed = tl.load(seeds)
    offset = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.uint32)
    value = tl.randn(seed, offset) if NORMAL else tl.rand(seed, offset)
    tl.store(out + offset, value, offset < count)


@triton.jit
def four(seeds, out, count, SIZE: tl.constexpr, NORMAL: tl.constexpr):
    seed = tl.load(seeds)
    offset = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.uint32)
    if NORMAL:
        value = triton_helpers.randn4x(seed, offset, SIZE)
    else:
        value = triton_helpers.rand4x(seed, offset, SIZE)
    tl.store(out + offset, value, offset < count)


def draw(kernel, seed, mode):
    out = torch.empty(7 * 33)
    (one if kernel == "triton" else four)[(4,)](torch.tensor([seed]), out, out.numel(), 64, mode == "randn")
    return out.reshape(7, 33)


kinds = ["triton"] + ["triton4x"] * hasattr(triton_helpers, "rand4x")
cases = [(kind, seed, mode) for kind in kinds for seed in SEEDS for mode in ("rand", "randn")]
torch.save({case: draw(*case) for case in cases}, FILE)
"""


def test_numbers_are_those_that_triton_draws(tmp_path):
    """Triton's own interpreter runs its kernels on a CPU."""
    pytest.importorskip("triton")
    script, file = tmp_path / "draws.py", tmp_path / "draws.pt"
    script.write_text(f"SEEDS = {SEEDS}\nFILE = {str(file)!r}\n{TRITON_DRAWS}")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, str(script)], env=environment, check=True, timeout=200)
    for (kind, seed, mode), drawn in torch.load(file).items():
        if mode == "rand":
            assert torch.equal(random_replay.uniform([7, 33], torch.tensor(seed), kind), drawn), (kind, seed)
        else:
            found = random_replay.normal([7, 33], torch.tensor(seed), kind)
            torch.testing.assert_close(found, drawn, rtol=1e-5, atol=4e-6)


ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default


def attention_graph(*, chained: bool, dropout: float = 0.1) -> torch.fx.GraphModule:
    """Seeds, and two calls of attention that draw in ATen, the second of the first's result or beside it."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    seeds = graph.call_function(torch.ops.prims.inductor_seeds.default, (1, torch.device("cuda")))
    first = graph.call_function(operator.getitem, (graph.call_function(ATTENTION, (x, x, x, dropout)), 0))
    query = first if chained else x
    second = graph.call_function(
        operator.getitem, (graph.call_function(ATTENTION, (query, x, x, dropout)), 0)
    )
    graph.output((seeds, first, second))
    return torch.fx.GraphModule({}, graph)


SEED_CALL = "aten.randint.low_out(-9223372036854775808, 9223372036854775807, [1], out=buf0)"
ATTENTION_CALL = "buf1 = torch.ops.aten._scaled_dot_product_flash_attention.default(a, b, c, 0.1)"


@pytest.mark.parametrize(
    ("chained", "code", "reason"),
    [
        (True, [SEED_CALL, ATTENTION_CALL, ATTENTION_CALL], ""),
        (False, [SEED_CALL, ATTENTION_CALL, ATTENTION_CALL], "either order"),
        (True, [ATTENTION_CALL, SEED_CALL, ATTENTION_CALL], "another order"),
        (True, [SEED_CALL, ATTENTION_CALL], "another order"),
    ],
)
def test_draws_in_an_open_order_are_not_repeated(chained, code, reason):
    gm = attention_graph(chained=chained)
    gm.meta["torchrelay_generated"] = "\n".join(code)
    found = random_replay.cannot_draw(gm)
    assert found.endswith(reason) if reason else found == ""


def test_attention_without_dropout_draws_nothing(monkeypatch):
    assert random_replay.cannot_draw(attention_graph(chained=False, dropout=0.0)) == ""
    monkeypatch.setattr(random_replay, "ATTENTION", ())  # as for cuDNN's, whose draws are not worked out
    assert random_replay.cannot_draw(attention_graph(chained=False, dropout=0.0)) == ""
    assert random_replay.cannot_draw(attention_graph(chained=False, dropout=0.1)) != ""


@pytest.mark.parametrize(
    ("call", "unwritten"),
    [
        ("_scaled_dot_product_efficient_attention", {2, 3}),
        ("_scaled_dot_product_flash_attention", {6, 7}),
        ("_scaled_dot_product_cudnn_attention", {6, 7}),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_generators_state_is_not_compared_where_attention_does_not_write_it(call, unwritten, dropout):
    target = getattr(torch.ops.aten, call).default
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    mask = () if "flash" in call else (None, True)
    node = graph.call_function(target, (x, x, x, *mask, dropout))
    returned = range(len(target._schema.returns))
    graph.output(tuple(graph.call_function(operator.getitem, (node, position)) for position in returned))
    expected = unwritten if not dropout else {7} if "flash" in call else set()
    assert random_replay.unwritten_outputs(torch.fx.GraphModule({}, graph)) == expected


def test_other_draws_are_not_worked_out():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.bernoulli.default, (x,)))
    assert random_replay.cannot_draw(torch.fx.GraphModule({}, graph)) == "bernoulli_default"


@pytest.mark.parametrize(
    ("code", "spelled"),
    [("tmp = tl.rand(a, b)", "triton"), ("tmp = triton_helpers.rand4x(a, b, XBLOCK)", "triton4x")],
)
def test_generated_code_tells_how_it_draws(code, spelled):
    gm = attention_graph(chained=True)
    gm.meta["torchrelay_generated"] = code
    assert random_replay.rng_variant(gm) == spelled


def test_kernels_that_draw_in_two_ways_are_not_repeated():
    gm = attention_graph(chained=True)
    gm.meta["torchrelay_generated"] = "tl.randn(a, b) triton_helpers.rand4x(a, b, XBLOCK)"
    with pytest.raises(random_replay.CannotReplay):
        random_replay.rng_variant(gm)


def test_three_values_may_come_from_small_blocks():
    with pytest.raises(random_replay.CannotReplay):
        random_replay.uniform([3], torch.tensor(1), "triton4x")
