"""Faults of compiled code, planted into graphs of real sizes.

The compiled form is the graph of ATen operators that AOTAutograd makes, run as it is; a fault is a change in its
forward or its backward graph.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from captured_requests import eager_of, request_of
from functorch.compile import aot_function, make_boxed_func
from torch import nn
from torch._decomp import core_aten_decompositions
from torch.nn import functional
from torchrelay.compiler.request import schema

aten = torch.ops.aten
prims = torch.ops.prims
Change = Callable[[torch.fx.Graph], bool]
"""Puts a fault into a graph; returns whether it has a place for it."""

WIDTH, LENGTH, HEADS, WORDS = 768, 128, 12, 2000


class Layer(nn.Module):
    """A layer of a decoder with rotary positions, and a head with a loss over the words."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        angles = torch.outer(torch.arange(LENGTH), 1e4 ** -(torch.arange(0, 64, 2) / 64))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x[..., :32], x[..., 32:]
        return x * self.cos + torch.cat((-right, left), dim=-1) * self.sin

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.words(words)
        q, k, v = self.mix(self.first(x)).view(*words.shape, 3, HEADS, 64).permute(2, 0, 3, 1, 4)
        scores = (self.turned(q) @ self.turned(k).transpose(-1, -2)) / 8
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=words.device).triu(1)
        weights = scores.masked_fill(later, -1e4).float().softmax(-1)
        mixed = (weights.to(v.dtype) @ v).transpose(1, 2).reshape(*words.shape, WIDTH)
        x = x + self.out(mixed)
        x = x + self.down(functional.gelu(self.up(self.second(x))))
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten()), x


class Convolutions(nn.Module):
    """Two convolutions with batch norms, in training, a pool and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 64, 3, bias=False), nn.Conv2d(64, 128, 3, stride=2, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(64), nn.BatchNorm2d(128)])
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.norms[0](self.first(x)).relu(), 2)
        x = self.norms[1](self.second(x)).clamp(-0.5, 6.0)
        return self.head(x.mean((2, 3)))


# --- faults ----------------------------------------------------------------------------------------------------


def nodes(graph: torch.fx.Graph, *names: str) -> list[torch.fx.Node]:
    """The calls of ATen operators of these names, such as `add`."""
    wanted = {getattr(library, name, None) for name in names for library in (aten, prims)} - {None}
    return [node for node in graph.nodes if getattr(node.target, "overloadpacket", None) in wanted]


def shape(node: Any) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def insert(node: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    with node.graph.inserting_after(node):
        new = node.graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    return new


def follow(node: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> bool:
    """Have the node's users take target(node, *args) instead."""
    new = insert(node, target, node, *args, **kwargs)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return True


def first(graph: torch.fx.Graph, *names: str, where: Callable[[torch.fx.Node], bool] = lambda _: True) -> Any:
    return next(filter(where, nodes(graph, *names)), None)


def drop(*names: str, keep: int = 0, where: Callable[[torch.fx.Node], bool] = lambda _: True) -> Change:
    """Leave out an operator: its users take one of its arguments."""

    def change(graph: torch.fx.Graph) -> bool:
        node = first(graph, *names, where=lambda n: where(n) and shape(n.args[keep]) == shape(n))
        if node is None:
            return False
        node.replace_all_uses_with(node.args[keep])
        return True

    return change


def swap(
    *names: str, where: Callable[[torch.fx.Node], bool] = lambda _: True, places: Any = (0, 1)
) -> Change:
    def change(graph: torch.fx.Graph) -> bool:
        node = first(graph, *names, where=where)
        if node is None:
            return False
        args = list(node.args)
        left, right = places
        args[left], args[right] = args[right], args[left]
        node.args = tuple(args)
        return True

    return change


def replace(name: str, target: Any, where: Callable[[torch.fx.Node], bool] = lambda _: True) -> Change:
    def change(graph: torch.fx.Graph) -> bool:
        node = first(graph, name, where=where)
        if node is None:
            return False
        node.target = target
        return True

    return change


def argument(
    name: str, place: int, value: Any, where: Callable[[torch.fx.Node], bool] = lambda _: True
) -> Change:
    def change(graph: torch.fx.Graph) -> bool:
        node = first(graph, name, where=lambda n: len(n.args) > place and where(n))
        if node is None:
            return False
        node.args = (*node.args[:place], value(node.args[place]), *node.args[place + 1 :])
        return True

    return change


def after(name: str, wrong: Callable[[torch.Tensor], torch.Tensor], at: int = 0) -> Change:
    """The result of the operator's call number `at` is changed."""

    def change(graph: torch.fx.Graph) -> bool:
        calls = nodes(graph, *name.split())
        return len(calls) > at and follow(calls[at], wrong)

    return change


def _changed(value: torch.Tensor, place: Any, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    value = value.clone()
    value[place] = change(value[place])
    return value


def _is_residual(node: torch.fx.Node) -> bool:
    return len(node.args) > 1 and shape(node.args[0]) == shape(node.args[1]) == (2, LENGTH, WIDTH)


def _relaid(graph: torch.fx.Graph) -> bool:
    node = first(graph, "permute", where=lambda n: len(shape(n)) > 3 or len(shape(n)) == 2)
    if node is None:
        return False
    node.target, node.args = aten.reshape.default, (node.args[0], list(shape(node)))
    return True


def _shifted_mask(graph: torch.fx.Graph) -> bool:
    node = first(graph, "ge", "gt", "le", "lt", where=lambda n: len(shape(n)) == 2 and shape(n)[-1] == LENGTH)
    return node is not None and follow(node, lambda mask: mask.roll(1, dims=-1))


def _stale(graph: torch.fx.Graph) -> bool:
    """A running mean that is not written: the graph returns it as it was."""
    norm = first(graph, "_native_batch_norm_legit_functional")
    updated = next((n for n in graph.nodes if n.target is operator.getitem and n.args == (norm, 3)), None)
    if updated is None:
        return False
    updated.replace_all_uses_with(norm.args[3])
    return True


def _without_bias(graph: torch.fx.Graph) -> bool:
    node = first(graph, "addmm")
    if node is None:
        return False
    node.target, node.args = aten.mm.default, node.args[1:]
    return True


def _shorter(graph: torch.fx.Graph) -> bool:
    """A matrix product that leaves out the last 16 of what it sums over."""
    node = first(graph, "mm", "addmm", where=lambda n: shape(n.args[-2])[-1] >= 64)
    if node is None:
        return False
    with graph.inserting_before(node):
        left, right = (
            graph.call_function(aten.slice.Tensor, (value, dim, 0, -16))
            for value, dim in ((node.args[-2], 1), (node.args[-1], 0))
        )
    node.args = (*node.args[:-2], left, right)
    return True


def _other_label(graph: torch.fx.Graph) -> bool:
    node = first(graph, "scatter")
    if node is None:
        return False
    value, dim, index, *rest = node.args
    with graph.inserting_before(node):
        node.args = (value, dim, graph.call_function(torch.roll, (index, 1)), *rest)
    return True


LAYER_FORWARD: dict[str, Change] = {
    "strides of another layout": _relaid,
    "dropped bias": _without_bias,
    "dropped residual": drop("add", where=_is_residual),
    "dropped scale of a norm": argument("native_layer_norm", 2, lambda scale: None),
    "dropped scale of attention": drop("div", where=lambda n: bool(n.args[1] == 8)),
    "swapped operands of a difference": swap(
        "sub", where=lambda n: len(n.args) > 1 and bool(shape(n.args[1]))
    ),
    "swapped branches": swap("where", places=(1, 2)),
    "swapped halves": argument("cat", 0, lambda parts: parts[::-1]),
    "mask off by one": _shifted_mask,
    "softmax over queries": argument("_softmax", 1, lambda dim: -2),
    "mean for sum": after("sum", lambda x: x / 2),
    "large epsilon": argument("native_layer_norm", 4, lambda eps: 0.5),
    "another activation": replace("gelu", aten.silu.default),
    "index off by one": after("embedding", lambda x: x.roll(1, dims=1)),
    "slice off by one": after("slice", lambda x: x.roll(1, -1), at=3),
    "last column unwritten": after("mm addmm", lambda x: _changed(x, (slice(None), -1), torch.zeros_like)),
    "a tile of zeros": after("mm addmm", lambda x: _changed(x, (slice(64), slice(64)), torch.zeros_like)),
    "one row of another row": after("bmm", lambda x: _changed(x, (slice(None), 17), lambda row: row * 3)),
    "shorter sum in a product": _shorter,
    "one head for another": after("bmm", lambda x: x.flip(0)),
    "sixteen levels": after("bmm", lambda x: (x * 2).round() / 2, at=1),
    "stale result": after("mm addmm", lambda x: torch.cat((x[:1], x[:-1])), at=1),
}
LAYER_BACKWARD: dict[str, Change] = {
    "gradient of another label": _other_label,
    "lost gradient of a residual": drop("add", where=_is_residual),
    "transposed weight": _relaid,
    "sum over part of a batch": after("sum", lambda x: x * 0.9),
    "shorter sum in a product": _shorter,
    "swapped operands": swap("sub", where=lambda n: len(n.args) > 1 and bool(shape(n.args[1]))),
    "lost part of an embedding's gradient": after(
        "index_put _unsafe_index_put embedding_dense_backward",
        lambda x: _changed(x, slice(1000), torch.zeros_like),
    ),
}
CONVOLUTIONS_FORWARD: dict[str, Change] = {
    "lost write of a running mean": _stale,
    "another momentum": argument("_native_batch_norm_legit_functional", 6, lambda momentum: 0.2),
    "dropped activation": drop("relu"),
    "another bound": argument("clamp", 2, lambda bound: 0.5),
    "a channel twice": after("convolution", lambda x: _changed(x, (slice(None), 3), lambda c: x[:, 4])),
    "border of zeros": after("convolution", lambda x: _changed(x, (..., -1), torch.zeros_like)),
}
CONVOLUTIONS_BACKWARD: dict[str, Change] = {
    "inverted mask": after("le", torch.logical_not),
    "lost weight of a sum": after("sum", lambda x: x * 0.8, at=1),
}


@functools.cache
def request(program: str, half: bool, device: str = "cpu") -> schema.GraphRequest:
    torch.manual_seed(0)
    words = torch.randint(0, WORDS, (2, LENGTH))
    model, inputs = {
        "layer": lambda: (Layer(), (words, words)),
        "convolutions": lambda: (Convolutions(), (torch.randn(4, 3, 64, 64),)),
    }[program]()
    with torch.autocast(device, torch.bfloat16, enabled=half):
        return request_of(model.to(device), *(value.to(device) for value in inputs))


class Compiled:
    """The compiled form of a request, with a fault or without. applied: whether the fault had a place, for each graph
    that it is for."""

    def __init__(
        self, wanted: schema.GraphRequest, change: Change | None = None, backward: bool = False
    ) -> None:
        self.applied: list[bool] = []
        self._change = change
        self._in_backward = backward
        self._call = aot_function(
            eager_of(wanted).forward,
            fw_compiler=functools.partial(self._compile, False),
            bw_compiler=functools.partial(self._compile, True),
            decompositions=core_aten_decompositions(),
        )

    def __call__(self, *inputs: Any) -> Any:
        return self._call(*inputs)

    def _compile(self, is_backward: bool, gm: torch.fx.GraphModule, examples: Any) -> Any:
        if self._change is not None and is_backward == self._in_backward:
            self.applied.append(self._change(gm.graph))
            gm.recompile()
        return make_boxed_func(gm.forward)


CASES = [
    ("layer", False, LAYER_FORWARD),
    ("layer", True, LAYER_BACKWARD),
    ("convolutions", False, CONVOLUTIONS_FORWARD),
    ("convolutions", True, CONVOLUTIONS_BACKWARD),
]


KINDS = [(program, backward, kind) for program, backward, kinds in CASES for kind in kinds]


def with_fault(wanted: schema.GraphRequest, program: str, backward: bool, kind: str) -> Compiled:
    kinds = next(kinds for p, b, kinds in CASES if (p, b) == (program, backward))
    return Compiled(wanted, kinds[kind], backward)
