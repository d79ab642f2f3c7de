"""Programs whose sizes depend on data: a worker knows of these sizes what tracing knew, and compiles as PyTorch does.

Mixture of experts, jagged text, and what torch._check says. Each traced as it is and with dynamic shapes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparison import agree
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.pipeline import rebuilt_graph
from torchrelay.compiler.request import codec, schema, validate

Inputs = Callable[[], tuple[torch.Tensor, ...]]
Knowledge = dict[tuple[int, str], str]
"""The range of each size that depends on data, by the first node that has it and by where its value has it."""


@pytest.fixture(autouse=True)
def capturing() -> Iterator[None]:
    dynamo: Any = torch._dynamo.config
    with dynamo.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def rows() -> torch.Tensor:
    return torch.randn(9, 4, requires_grad=True)


def integers(*values: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(values)


def experts(x: torch.Tensor, router: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    share, chosen = (x @ router).softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    mask = F.one_hot(chosen, 3).permute(2, 1, 0)
    for expert in range(3):
        which, token = torch.where(mask[expert])
        out.index_add_(0, token, (x[token] @ weights[expert]) * share[token, which, None])
    return out


def dispatched(x: torch.Tensor, expert: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    order = expert.argsort(stable=True)
    counts = torch.bincount(expert, minlength=3)[:3].tolist()
    parts = [part @ weights[i] for i, part in enumerate(torch.split(x[order], counts))]
    return torch.zeros_like(x).index_add_(0, order, torch.cat(parts))


def split(lengths: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    sizes = lengths.tolist()
    for size in sizes:
        torch._check(size >= 0)
    return torch.cat([part * (i + 1) for i, part in enumerate(torch.split(x, sizes))])


def documents(ends: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    bounds = ends.tolist()
    means = []
    for start, end in itertools.pairwise(bounds):
        torch._check(start >= 0)
        torch._check(end >= start)
        torch._check(end <= x.shape[0])
        means.append(x.narrow(0, start, end - start).sum(0))
    return torch.stack(means)


def padded(ends: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    lengths = ends[1:] - ends[:-1]
    document = torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths, output_size=x.shape[0])
    longest: Any = lengths.max().item()
    torch._check(longest >= 0)
    torch._check(longest <= x.shape[0])
    at = torch.arange(x.shape[0]) - ends[document]
    return x.new_zeros(lengths.shape[0], longest, x.shape[1]).index_put((document, at), x).sin()


def prefix(length: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    size = length.max().item()
    torch._check_is_size(size)
    torch._check(size <= x.shape[0])
    return x[:size].sin() * 2


def of_equal_length(lengths: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    one, other = lengths.tolist()
    torch._check(one == other)
    return torch.zeros(one) + torch.ones(other) + x.sum()


def as_long_as_the_rows(length: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    size: Any = length.max().item()
    torch._check(size == x.shape[0])
    return torch.zeros(size, 4) + x.sin()  # of zeros and x itself, local Inductor makes x, not a copy


def swapped(lengths: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    one, other = lengths.tolist()
    torch._check(one >= 0)
    torch._check(other >= 0)
    torch._check(one + other == x.shape[0])
    return torch.cat(x.split([one, other])[::-1])


def branch(x: torch.Tensor) -> Any:
    kept = x.detach()[x[:, 0] > 0]
    return torch.cond(kept.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (kept,))


def loop(turns: torch.Tensor, x: torch.Tensor) -> Any:
    from torch._higher_order_ops import while_loop

    kept = x.detach()[x[:, 0] > 0]
    return while_loop(lambda i, a: i > 0, lambda i, a: (i - 1, a * 1.5), (turns, kept))


def any_number_of_rows(**bounds: int) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        made = rows()
        torch._dynamo.decorators.mark_unbacked(made, 0, **bounds)
        return made

    return make


def pairs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    torch._check(x.shape[0] == y.shape[0])
    return (F.gelu(x) * y).sum(0) / x.shape[0]


def heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    torch._check(x.shape[0] % 3 == 0)
    return (x @ weight).unflatten(0, (-1, 3)).softmax(1).sum(0)


UNBACKED: dict[str, tuple[Callable[..., Any], tuple[Callable[[], torch.Tensor], ...]]] = {
    "rows": (lambda x: F.gelu(x).sum(0), (any_number_of_rows(),)),
    "pairs of rows": (pairs, (any_number_of_rows(), any_number_of_rows())),
    "a multiple": (heads, (any_number_of_rows(), lambda: torch.randn(4, 4, requires_grad=True))),
    "two tensors": (lambda x, y: torch.cat([x, y]).sin() @ y.T, (any_number_of_rows(), any_number_of_rows())),
}
"""Inputs of whose sizes nothing may be assumed."""


def weights() -> torch.Tensor:
    return torch.randn(3, 4, 4, requires_grad=True)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Callable[[], torch.Tensor], ...]]] = {
    "experts": (experts, (rows, lambda: torch.randn(4, 3), weights)),
    "recomputed experts": (
        lambda *inputs: checkpoint(experts, *inputs, use_reentrant=False),
        (rows, lambda: torch.randn(4, 3), weights),
    ),
    "rows sent to experts": (dispatched, (rows, lambda: torch.randint(0, 3, (9,)), weights)),
    "split": (split, (integers(2, 3, 4), rows)),
    "documents": (documents, (integers(0, 2, 5, 9), rows)),
    "padded documents": (padded, (integers(0, 2, 5, 9), rows)),
    "prefix": (prefix, (integers(5, 2), rows)),
    "equal lengths": (of_equal_length, (integers(5, 5), rows)),
    "a length that is known": (as_long_as_the_rows, (integers(9, 2), rows)),
    "two parts": (swapped, (integers(3, 6), rows)),
    "repeats": (lambda x, n: x.repeat_interleave(n, 0) * 2, (rows, integers(1, 2, 0, 3, 1, 1, 1, 0, 2))),
    "masked": (lambda x: torch.masked_select(x, x > 0) * 2, (rows,)),
    "distinct": (lambda i: torch.unique(i, return_counts=True)[1] + 1, (lambda: torch.randint(0, 5, (20,)),)),
    "branch": (branch, (rows,)),
    "loop": (loop, (lambda: torch.tensor(3), rows)),
}
COMPILED = ("documents", "split", "experts", "rows")
"""Those that were refused or differ in kind; the others take g++ as long, and are slow."""


def _known(gm: torch.fx.GraphModule) -> Knowledge:
    known: Knowledge = {}
    for position, node in enumerate(gm.graph.nodes):
        for symbol, path in node.meta.get("unbacked_bindings", {}).items():
            value = pytree.key_get(node.meta["example_value"], path)
            known[position, pytree.keystr(path)] = str(value.node.shape_env.var_to_range[symbol])
    return known


@pytest.mark.parametrize("dynamic", [None, True], ids=["", "dynamic"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_worker_finds_the_sizes_that_tracing_found(program: str, dynamic: bool | None) -> None:
    function, makers = PROGRAMS[program]
    requests: list[schema.GraphRequest] = []
    traced: list[Knowledge] = []

    def backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Any:
        traced.append(_known(gm))
        requests.append(capture(gm, examples, mode="default", options={}).request)
        return gm.forward

    torch.compile(function, backend=backend, dynamic=dynamic)(*(make() for make in makers))
    (request,), (expected,) = requests, traced
    sent = codec.unpack_request(codec.pack_request(request))
    validate.check_request(sent, codec.Limits())
    assert _known(rebuilt_graph.rebuild(sent).gm) == expected
    assert expected or program == "recomputed experts"  # whose sizes are inside another graph


@pytest.mark.parametrize("program", UNBACKED)
def test_a_worker_assumes_no_more_of_an_unbacked_input_than_tracing_did(program: str) -> None:
    function, makers = UNBACKED[program]
    requests: list[schema.GraphRequest] = []
    traced: list[str] = []

    def backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Any:
        traced.extend(_sizes(gm))
        requests.append(capture(gm, examples, mode="default", options={}).request)
        return gm.forward

    torch.compile(function, backend=backend)(*(make() for make in makers))
    (request,) = requests
    sent = codec.unpack_request(codec.pack_request(request))
    validate.check_request(sent, codec.Limits())
    assert {symbol.hint for symbol in sent.symbols} == {None}
    assert _sizes(rebuilt_graph.rebuild(sent).gm) == traced != []


def _sizes(gm: torch.fx.GraphModule) -> list[str]:
    """The range of each size of an input that is a symbol."""
    values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    sizes: list[Any] = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    return [
        str(size.node.shape_env.var_to_range[size.node.expr]) for size in sizes if not isinstance(size, int)
    ]


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize(
    "program",
    [
        name if name in COMPILED else pytest.param(name, marks=pytest.mark.slow)
        for name in PROGRAMS | UNBACKED
    ],
)
def test_it_is_served_and_is_what_local_inductor_gives(program: str) -> None:
    function, makers = (PROGRAMS | UNBACKED)[program]
    agree(lambda: functools.partial(function), lambda step: tuple(make() for make in makers), tolerance=1e-6)
