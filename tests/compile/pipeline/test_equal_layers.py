"""Equal layers become calls of one subgraph, and nothing else does; the artifact computes what it computed."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from captured_requests import request_of
from torch import nn
from torch._inductor import fx_utils
from torch._inductor.codegen.wrapper import SubgraphPythonWrapperCodegen
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torchrelay.compiler.artifact import container
from torchrelay.compiler.pipeline import equal_layers, inductor, pipeline, rebuilt_graph
from torchrelay.compiler.torch_internals.inductor import naming, subgraphs
from torchrelay.compiler.torch_internals.inductor.subgraphs import invoke_subgraph

WIDTH = 16
updates_subgraphs = pytest.mark.skipif(
    not hasattr(fx_utils, "_is_fake_tensor_same"), reason="PyTorch updates no subgraphs before 2.13"
)


class Block(nn.Module):
    def __init__(self, hidden: int = 32, slope: float = 1.0) -> None:
        super().__init__()
        self.attend, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.slope = slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = (
            t.view(rows, tokens, 2, width // 2).transpose(1, 2)
            for t in self.attend(self.before(x)).split(width, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(y.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.second(F.gelu(self.first(self.between(x)) * self.slope))


class Transformer(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(64, WIDTH), nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, 64), tokens.view(-1))


def outlined(program: Callable[..., Any], *inputs: Any) -> tuple[int, torch.fx.GraphModule]:
    """How many calls of subgraphs the program's graph has, and the graph."""
    request = request_of(program, *inputs)
    rebuilt = rebuilt_graph.rebuild(request)
    calls = equal_layers.outline(rebuilt, request)
    assert calls == len(rebuilt.gm.graph.find_nodes(op="call_function", target=invoke_subgraph))
    return calls, rebuilt.gm


def tokens() -> torch.Tensor:
    return torch.randint(64, (2, 8))


def test_the_blocks_of_a_transformer_are_calls_of_one_subgraph() -> None:
    calls, gm = outlined(Transformer(*(Block() for _ in range(6))), tokens())
    assert calls >= 5
    assert (
        len({node.args[1] for node in gm.graph.find_nodes(op="call_function", target=invoke_subgraph)}) == 1
    )


def test_an_encoder_and_a_decoder_of_other_widths_are_two_subgraphs() -> None:
    calls, gm = outlined(
        Transformer(*(Block(32) for _ in range(6)), *(Block(64) for _ in range(6))), tokens()
    )
    assert calls >= 10
    assert (
        len({node.args[1] for node in gm.graph.find_nodes(op="call_function", target=invoke_subgraph)}) == 2
    )


def test_blocks_stay_where_a_constant_differs() -> None:
    assert outlined(Transformer(*(Block(slope=1.0 + n) for n in range(6))), tokens())[0] == 0


def test_1_and_true_are_two_constants() -> None:
    def repeat(x: torch.Tensor, scale: Callable[[int], Any]) -> torch.Tensor:
        for n in range(6):
            x = (x.sin().cos().tan().exp().neg().sigmoid().tanh().relu() * scale(n)).sqrt()
        return x

    assert outlined(lambda x: repeat(x, lambda n: 1), torch.rand(4))[0] == 6
    assert outlined(lambda x: repeat(x, lambda n: True if n % 2 else 1), torch.rand(4))[0] == 0


def test_blocks_stay_where_sizes_differ() -> None:
    assert outlined(Transformer(*(Block(32 + 16 * n) for n in range(6))), tokens())[0] == 0


def test_blocks_stay_where_some_parameters_are_frozen() -> None:
    model = Transformer(*(Block() for _ in range(6)))
    for block in [*model.blocks][::2]:
        block.get_submodule("first").requires_grad_(False)
    assert outlined(model, tokens())[0] == 0


def test_blocks_stay_where_they_are_wired_in_another_way() -> None:
    def repeat(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for n in range(6):
            z = x.sin().cos().tan().exp().neg().sigmoid().tanh()
            x = (z - y) if n % 2 else (y - z)
        return x

    assert outlined(repeat, torch.rand(4), torch.rand(4))[0] == 0


class Counting(Block):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x) * self.calls


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


@pytest.mark.parametrize("block", [Counting, Normed])
def test_no_call_changes_a_tensor(block: type[Block]) -> None:
    _, gm = outlined(Transformer(*(block() for _ in range(6))), tokens())
    changes = {rebuilt_graph.CHANGES_ARGUMENTS}
    inside = [
        node
        for module in gm.children()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    ]
    assert not any(changes & node.meta.keys() for node in inside)
    assert not any("batch_norm" in str(node.target) for node in inside)


class Dropping(Block):
    """Draws in attention too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attend(F.dropout(x, 0.1)).unsqueeze(1)
        y = F.scaled_dot_product_attention(*y.split(WIDTH, -1), dropout_p=0.2).squeeze(1)
        return x + F.dropout(self.second(F.gelu(self.first(y))), 0.3)


class Drawing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.bernoulli(torch.full_like(x, 0.5))


def test_each_call_gets_its_seeds() -> None:
    calls, gm = outlined(Transformer(*(Dropping() for _ in range(5))), tokens())
    seeds = [n.args[2] for n in gm.graph.find_nodes(op="call_function", target=invoke_subgraph)]
    assert calls >= 4
    assert [node.args[0] for node in seeds] == [3] * len(set(seeds)) == [3] * calls


@pytest.mark.parametrize("block", [Drawing, lambda: nn.Sequential(Block(), nn.RReLU(), nn.Dropout(1.0))])
def test_blocks_stay_where_something_draws_an_unknown_count_of_seeds(block: Callable[[], nn.Module]) -> None:
    assert outlined(Transformer(*(block() for _ in range(6))), tokens())[0] == 0


def dynamic_tokens() -> torch.Tensor:
    found = tokens()
    torch._dynamo.mark_dynamic(found, (0, 1))
    return found


def test_each_call_gets_the_symbols_of_its_sizes() -> None:
    calls, gm = outlined(Transformer(*(Block() for _ in range(5))), dynamic_tokens())
    assert calls >= 4
    for call in gm.graph.find_nodes(op="call_function", target=invoke_subgraph):
        values = [operand.meta["example_value"] for operand in call.args[2:]]
        symbols = {str(value) for value in values if isinstance(value, torch.SymInt)}
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        assert symbols == {str(size) for x in tensors for size in x.shape if not isinstance(size, int)}


def test_blocks_stay_where_symbolic_sizes_differ() -> None:
    def program(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [x.sin().cos().tan().exp().neg().sigmoid().tanh().relu().sum() for x in inputs]

    inputs = [torch.rand(3 + n) for n in range(6)]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    assert outlined(program, *inputs)[0] == 0


def steps(program: Callable[..., Any], *inputs: Any, once: bool) -> list[torch.Tensor]:
    """Losses and gradients of three steps, with equal layers lowered once or each."""
    request = request_of(program, *inputs)
    rebuilt = rebuilt_graph.rebuild(request)
    assert not once or equal_layers.outline(rebuilt, request) >= 4
    with naming.restoring_graph_counters():
        compiled = inductor.compile_rebuilt(rebuilt, request, threads=1, progress=lambda stage, detail: None)
    compiled.building.files()
    generator = torch.Generator().manual_seed(0)
    sizes = [2, 8]

    def value(given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return next(remaining)
        if given.dtype is torch.int64:
            return torch.randint(64, sizes, generator=generator)
        return (torch.randn(tuple(given.shape), generator=generator) / 4).requires_grad_()

    results: list[torch.Tensor] = []
    torch.manual_seed(0)
    for _ in range(3):
        remaining = iter(sizes)
        values = list(map(value, rebuilt.inputs))
        leaves = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
        (loss,) = compiled.run(*values)
        sizes = [size + 1 for size in sizes] if next(remaining, None) is None else sizes
        results += [loss.detach(), *torch.autograd.grad(loss, leaves)]
    return results


@pytest.mark.parametrize("example", [tokens, dynamic_tokens])
def test_the_masks_of_dropout_are_those_of_layers_that_are_lowered_one_by_one(
    example: Callable[[], torch.Tensor],
) -> None:
    """Numbered from the same generator, with dropout before, in and after the equal layers; for each size."""

    class Model(Transformer):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = F.dropout(self.table(tokens), 0.1)
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(F.dropout(self.norm(x), 0.4)).view(-1, 64), tokens.view(-1))

    model = Model(*(Dropping() for _ in range(4)))
    once, apart = (steps(model, example(), once=once) for once in (True, False))
    assert not torch.equal(once[0], once[len(once) // 3])  # another step, another mask
    assert all(map(torch.equal, once, apart))


def test_an_input_that_looks_like_seeds_is_none() -> None:
    def program(words: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(words) + F.dropout(x, 0.5)  # does not read them

    request = request_of(program, torch.tensor([7]), torch.ones(64))
    rebuilt = rebuilt_graph.rebuild(request)
    compiled = inductor.compile_rebuilt(rebuilt, request, threads=1, progress=lambda stage, detail: None)
    compiled.building.files()
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        drawn += compiled.run(torch.tensor([7]), torch.ones(64))
    assert not torch.equal(*drawn)


def test_blocks_stay_where_a_graph_inside_the_graph_could_have_their_seeds() -> None:
    model = Transformer(*(Dropping() for _ in range(6)))
    request = request_of(lambda tokens: checkpoint(torch.sin, model(tokens), use_reentrant=False), tokens())
    assert request.graph.subgraphs
    assert equal_layers.outline(rebuilt_graph.rebuild(request), request) == 0


def test_what_a_subgraph_changes_is_found_out_once() -> None:
    layer = torch.fx.symbolic_trace(lambda x: (x.sin(),))
    with subgraphs.keeping_memory_of_subgraphs():
        first, second = (invoke_subgraph.gen_schema(layer, "layer", torch.rand(3)) for _ in range(2))
    assert first is second


def lower(program: Callable[..., Any]) -> None:
    """Compile a program with equal layers, but for g++."""
    request = request_of(program, torch.randint(64, (3, 8)))
    rebuilt = rebuilt_graph.rebuild(request)
    assert equal_layers.outline(rebuilt, request)
    compiled = inductor.compile_rebuilt(rebuilt, request, threads=1, progress=lambda stage, detail: None)
    compiled.building.files()


@updates_subgraphs
def test_calls_of_a_subgraph_that_does_not_change_run_no_more_on_fake_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updates: list[bool] = []
    update = fx_utils.FakeTensorUpdater.incremental_update

    def counted(self: Any) -> Any:
        values = [node.meta.get("val") for node in self.gm.graph.nodes]
        found = update(self)
        updates.extend(
            node.meta.get("val") is not value for node, value in zip(self.gm.graph.nodes, values, strict=True)
        )
        return found

    monkeypatch.setattr(fx_utils.FakeTensorUpdater, "incremental_update", counted)
    lower(Transformer(*(Block() for _ in range(5))))
    assert not any(updates)


@updates_subgraphs
def test_what_a_pass_changes_in_a_subgraph_is_updated() -> None:
    def tensor(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.view.default(x, [2, 3])

    layer = torch.fx.symbolic_trace(lambda x: (tensor(x),))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(invoke_subgraph, (graph.get_attr("layer"), "layer", x))
    result = graph.call_function(operator.getitem, (call, 0))
    graph.output((result,))
    gm = torch.fx.GraphModule({"layer": layer}, graph)
    fake = FakeTensorMode()
    operand, view, _ = layer.graph.nodes
    with fake:
        x.meta["val"] = operand.meta["val"] = torch.empty(6)
        view.meta["val"] = tensor(operand.meta["val"])
        call.meta["val"] = (view.meta["val"],)
        result.meta["val"] = view.meta["val"]
    with subgraphs.keeping_memory_of_subgraphs(), V.set_fake_mode(fake):
        updater = fx_utils.FakeTensorUpdater(gm)
        assert updater.incremental_update() == 0
        view.args = (operand, [3, 2])
        updater.incremental_update()
    assert view.meta["val"].shape == (3, 2)


def test_a_call_checks_no_tensor_that_the_graph_has_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    codegen = GraphLowering.codegen

    def kept(self: Any) -> Any:
        code = codegen(self)
        written.append(code[0].value)
        return code

    monkeypatch.setattr(GraphLowering, "codegen", kept)
    lower(Transformer(*(Block() for _ in range(5))))
    text = "\n".join(written)
    assert re.search(r"assert_size_stride\((primals|tangents)_", text)
    assert re.search(r"def partitioned_fw_\w+\(args\):", text)
    assert not re.search(r"assert_size_stride\(partitioned_\w+_(primals|tangents)_", text)


def test_partitions_for_cuda_graphs_check_what_the_whole_graph_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(SubgraphPythonWrapperCodegen, "codegen_input_size_asserts", checked.append)
    both: list[Any] = [object.__new__(SubgraphPythonWrapperCodegen) for _ in range(2)]
    both[0].partition_signatures, both[1].partition_signatures = None, "what a partition reads and returns"
    with subgraphs.keeping_memory_of_subgraphs():
        for each in both:
            each.codegen_input_size_asserts()
    assert checked == both[1:]


def test_three_blocks_are_few() -> None:
    assert outlined(Transformer(*(Block() for _ in range(3))), tokens())[0] == 0


@pytest.mark.parametrize("around", ["train", "dropout", "symbols", "bfloat16", "inference"])
def test_what_is_compiled_agrees_with_eager(
    around: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """compile_request compares the artifact with eager; a graph that differed, or failed, would be compiled again."""
    model = Transformer(*((Dropping if around == "dropout" else Block)() for _ in range(5)))
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if around == "bfloat16":
        context = torch.autocast("cpu", dtype=torch.bfloat16)
    elif around == "inference":
        context = torch.no_grad()
    with context:
        request = request_of(model, (dynamic_tokens if around == "symbols" else tokens)())
    stages: list[tuple[str, str]] = []
    artifact = pipeline.compile_request(
        request,
        key="k",
        worker="w",
        workdir=tmp_path,
        progress=lambda stage, detail: stages.append((stage, detail)),
        threads=1,
    )
    assert ("aot", "layer by layer") not in stages
    assert "layer by layer" not in caplog.text
    assert container.read_manifest(artifact).verification.status == "passed"
