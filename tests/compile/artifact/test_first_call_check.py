"""TORCHRELAY_CHECK: a graph's first call compared with eager on the user's own inputs, and what must not notice it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrelay
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from torchrelay.clients.artifacts.first_call_check import CannotCompare, compare_with_eager
from torchrelay.clients.backend import RelayBackend
from torchrelay.compiler.errors import ResultsDiffer, VerifyFailed
from torchrelay.compiler.graph.captured_graph import CapturedGraph

Graph = Callable[..., Any]
Connect = Callable[..., RelayBackend]


class Capturing:
    """A back end that compares a graph with `fault(graph)` on the first inputs."""

    def __init__(self, fault: Callable[[torch.fx.GraphModule], Graph]) -> None:
        self._fault = fault

    def __call__(self, gm: torch.fx.GraphModule, examples: list[Any]) -> Graph:
        def call(*inputs: Any) -> Any:
            compare_with_eager(gm, self._fault(gm), inputs)
            return gm(*inputs)

        return call


def compare(program: Graph, fault: Callable[[torch.fx.GraphModule], Graph], *inputs: Any) -> Any:
    return torch.compile(program, backend=Capturing(fault))(*inputs)


def itself(gm: torch.fx.GraphModule) -> Graph:
    return gm


def change_first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.fx.GraphModule], Graph]:
    """The first output goes through `change`."""
    return lambda gm: lambda *inputs: (lambda found: [change(found[0]), *found[1:]])(gm(*inputs))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda y: y * 1.1, "output 0 differs from eager"),
        (lambda y: y.double(), "the dtype torch.float64"),
        (lambda y: y.detach(), "requires grad False, eager True"),
        (lambda y: y.t().contiguous().t(), "stride"),
        (lambda y: y[:2], "shape"),
        (lambda y: y.view_as(y) * 1.0 + (y.detach() * 0 if y.requires_grad else 0), ""),
    ],
    ids=["values", "dtype", "requires_grad", "stride", "shape", "same"],
)
def test_an_output_that_is_not_eagers_is_named(
    change: Callable[[torch.Tensor], torch.Tensor], text: str
) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    if not text:
        compare(torch.sin, change_first(change), x)
        return
    with pytest.raises(VerifyFailed, match=text):
        compare(torch.sin, change_first(change), x)


def test_a_copy_in_place_of_a_view_of_an_input_is_named_and_a_view_in_place_of_a_copy() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(VerifyFailed, match="shares the memory of none of the inputs, eager's of one"):
        compare(lambda x: x[1:], change_first(torch.clone), x)
    with pytest.raises(VerifyFailed, match="shares the memory of one of the inputs, eager's of none"):
        compare(lambda x: x.clone(), lambda gm: lambda x: [x.view_as(x)], x)


class _HalfTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5


@pytest.mark.parametrize("leaf", [True, False])
def test_a_wrong_gradient_is_named(leaf: bool) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(VerifyFailed, match="gradient 0 differs"):
        compare(torch.sin, change_first(_HalfTheGradient.apply), x if leaf else x * 1)
    assert x.grad is None


def test_a_change_in_place_that_eager_does_not_make_is_named_and_undone() -> None:
    x, y = torch.randn(4, 8), torch.randn(8)
    before = x.clone()
    with pytest.raises(VerifyFailed, match="input after the call 0"):
        compare(lambda x, y: x + y, lambda gm: lambda x, y: (gm(x, y), x.add_(1))[0], x, y)
    assert torch.equal(x, before)


def test_an_error_that_eager_does_not_raise_is_a_difference() -> None:
    def fails(*inputs: Any) -> Any:
        raise AssertionError("expected size 3")

    with pytest.raises(VerifyFailed, match="raises AssertionError: expected size 3"):
        compare(torch.sin, lambda gm: fails, torch.randn(3))


def made_again(*views: torch.Tensor) -> list[torch.Tensor]:
    """Copies of views of one memory, as views of one memory."""
    storage = views[0].untyped_storage().clone()
    return [torch.empty(0).set_(storage, v.storage_offset(), v.size(), v.stride()) for v in views]


def _activations() -> list[torch.Tensor]:
    leaf = torch.randn(4, 4, requires_grad=True)
    base = leaf * 1
    return [base, base[0]]


def _plain_views() -> list[torch.Tensor]:
    base = torch.randn(6, 4)
    return [base[:4], base[2:]]


@pytest.mark.parametrize(("made", "trained"), [(_activations, True), (_plain_views, False)])
def test_views_of_one_base_that_are_changed_in_place_are_compared_as_the_program_has_them(
    made: Callable[[], list[torch.Tensor]], trained: bool
) -> None:
    def program(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y.mul_(w)
        return x * 2

    w = torch.randn(4, requires_grad=trained)
    x, y = made()
    version, expected = x._version, program(*made_again(x, y), w.detach())
    found = compare(program, itself, x, y, w)
    assert x._version == version + 1, "the call itself has changed it once"
    torch.testing.assert_close(found.detach(), expected)
    if trained:
        found.sum().backward()
        assert w.grad is not None


def test_random_numbers_are_what_they_would_be_without_a_check() -> None:
    x = torch.randn(64)
    torch.manual_seed(3)
    expected = torch.nn.functional.dropout(x)
    torch.manual_seed(3)
    assert torch.equal(compare(lambda x: torch.nn.functional.dropout(x), itself, x), expected)
    torch.compiler.reset()
    with pytest.raises(VerifyFailed, match="dtype"):
        compare(lambda x: torch.nn.functional.dropout(x), change_first(lambda y: y.double()), x)


def test_a_checkpoint_around_the_graph_does_not_count_what_a_check_saves() -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    compiled = torch.compile(lambda x, w: (x @ w).sin(), backend=Capturing(itself))
    checkpoint(compiled, x, w, use_reentrant=False).sum().backward()
    found, x.grad = x.grad, None
    (x @ w).sin().sum().backward()
    torch.testing.assert_close(found, x.grad)


def test_a_gradient_that_is_rounding_noise_is_no_difference() -> None:
    def in_double(gm: torch.fx.GraphModule) -> Graph:
        def call(*inputs: Any) -> Any:
            wide = [x.double() if x.is_floating_point() else x for x in inputs]
            found = [y.float() for y in gm(*wide)]
            for given, changed in zip(inputs, wide, strict=True):
                if not given.requires_grad:
                    given.copy_(changed)
            return found

        return call

    compare(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)), in_double, torch.randn(64, 8)
    )


def test_a_block_mask_whose_tables_say_more_than_its_mask_mod_is_not_compared() -> None:
    """Eager goes by mask_mod alone, so it is no reference."""
    counts, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    sparse = BlockMask.from_kv_blocks(counts, indices, seq_lengths=(256, 256))
    whole = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 256, 256, device="cpu")
    q = torch.randn(1, 2, 256, 16)

    def attention(q: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        return flex_attention(q, q, q, block_mask=mask)

    compare(attention, itself, q, whole)
    with pytest.raises(CannotCompare, match="block mask"):
        compare(attention, itself, q, sparse)


# --- through a service -------------------------------------------------------------------------------------------


def affine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 - y


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that no worker can see: two tensors reach the compiled code in each other's place."""
    bind = CapturedGraph.bind

    def exchanging(self: CapturedGraph, compiled: Graph) -> Graph:
        bound = bind(self, compiled)

        def call(*inputs: Any) -> Any:
            tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
            return bound(*(tensors.pop() if isinstance(value, torch.Tensor) else value for value in inputs))

        return call

    monkeypatch.setattr(CapturedGraph, "bind", exchanging)


def test_tensors_that_are_bound_in_each_other_s_place_are_found_and_the_artifact_is_not_used(
    connect: Connect, exchanged: None
) -> None:
    relay = connect(TORCHRELAY_CHECK="1")
    x, y = torch.full((3,), 3.0), torch.ones(3)
    with pytest.warns(torchrelay.FallbackWarning, match=r"output 0 differs .* \(key [0-9a-f]{64}\)"):
        found = torch.compile(affine, backend="torchrelay")(x, y)
    assert torch.equal(found, affine(x, y))
    report = torchrelay.report()
    assert (report.checked, report.unchecked, report.fallbacks) == (1, 0, {"results_differ": 1})
    (key,) = {graph.key for graph in report.graphs}
    assert relay.source.local.disk.get(key) is None


def test_in_mode_require_a_difference_is_raised_at_each_call(connect: Connect, exchanged: None) -> None:
    connect(TORCHRELAY_CHECK="1", TORCHRELAY_MODE="require")
    compiled = torch.compile(affine, backend="torchrelay")
    for _ in range(2):
        with pytest.raises(ResultsDiffer):
            compiled(torch.full((3,), 3.0), torch.ones(3))


def test_what_differs_for_one_size_is_compiled_here_for_all(connect: Connect, exchanged: None) -> None:
    connect(TORCHRELAY_CHECK="1")
    compiled = torch.compile(affine, backend="torchrelay", dynamic=True)
    with pytest.warns(torchrelay.FallbackWarning):
        compiled(torch.ones(5), torch.full((5,), 3.0))
    for size in (5, 9):
        assert torch.equal(compiled(torch.ones(size), torch.full((size,), 3.0)), torch.full((size,), -1.0))


def test_a_right_artifact_is_checked_once_and_nothing_is_said(connect: Connect) -> None:
    connect(TORCHRELAY_CHECK="1")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.BatchNorm1d(8))
    x = torch.randn(16, 8)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(model, backend="torchrelay")
        for _ in range(3):
            compiled(x).sum().backward()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    assert torchrelay.report().checked == 1
    model.load_state_dict(state)
    for _ in range(3):
        model(x)
    torch.testing.assert_close(found, dict(model.state_dict()))


def test_by_default_nothing_is_checked(connect: Connect) -> None:
    connect(TORCHRELAY_CHECK="0")
    torch.compile(lambda x: x.cos() * 3, backend="torchrelay")(torch.randn(5))
    assert (torchrelay.report().checked, torchrelay.report().hits + torchrelay.report().misses) == (0, 1)
