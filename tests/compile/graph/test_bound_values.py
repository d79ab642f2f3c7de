"""Each value that a graph is called with reaches the placeholder that was made for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from comparison import agree
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torchrelay.clients.backend import RelayBackend
from torchrelay.compiler.errors import BindingMismatch
from torchrelay.compiler.graph.capture import capture, check_binding
from torchrelay.compiler.graph.captured_graph import CapturedGraph

ONE, TWO, THREE = (torch.full((4,), value) for value in (10.0, 3.0, 0.5))


@torch._dynamo.assume_constant_result
def one() -> torch.Tensor:
    return ONE


@torch._dynamo.assume_constant_result
def two() -> torch.Tensor:
    return TWO


@torch._dynamo.assume_constant_result
def three() -> torch.Tensor:
    return THREE


def of_three(x: torch.Tensor) -> torch.Tensor:
    return (x * one() - two()) / three() + one()


def without_inputs() -> torch.Tensor:
    return (torch.ones(4) * one() - two()) / three()


def captured_graphs(program: Callable[..., Any], *inputs: Any) -> list[CapturedGraph]:
    """Run a program whose graphs are captured, and run eagerly as they would be sent."""
    found: list[CapturedGraph] = []

    def backend(gm: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        found.append(capture(gm, example, mode="default", options={}))
        sent = found[-1].gm
        assert sent is not None
        return found[-1].bind(sent.forward)

    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(program, backend=backend)(*inputs), program(*inputs))
    return found


@pytest.mark.parametrize(
    ("program", "inputs"), [(of_three, (torch.ones(4),)), (without_inputs, ())], ids=["inputs", "no inputs"]
)
def test_tensors_of_equal_shape_that_a_graph_holds_are_told_apart(
    program: Callable[..., Any], inputs: tuple[Any, ...]
) -> None:
    (graph,) = captured_graphs(program, *inputs)
    assert [float(tensor[0]) for tensor in graph.hoisted.values()] == [10.0, 3.0, 0.5]


def test_three_tensors_that_a_graph_holds_through_the_service(remote: RelayBackend) -> None:
    agree(lambda: of_three, lambda step: (torch.full((4,), 1.0 + step, requires_grad=True),))


@pytest.mark.parametrize("view", [lambda x: x[:3], lambda x: x.t()[0]], ids=["rows", "of its transpose"])
def test_a_held_tensor_that_shares_memory_with_an_input_is_not_sent(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A worker would compile for memory of its own, and the change of `y` would not be seen."""
    whole = torch.ones(4, 4)
    part = view(whole)

    @torch._dynamo.assume_constant_result
    def held() -> torch.Tensor:
        return part

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        return x * held()

    with pytest.raises(BackendCompilerFailed, match="a tensor that shares memory with input"):
        captured_graphs(program, torch.tensor(2.0), whole)


def test_an_optimizer_step_with_momentum_through_the_service(remote: RelayBackend) -> None:
    def trained(backend: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = optimizer.step if backend is None else torch.compile(optimizer.step, backend=backend)
        for seed in range(4):
            torch.manual_seed(seed)
            model(torch.randn(8, 4)).square().sum().backward()
            step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    for want, have in zip(trained(None), trained("torchrelay"), strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[1:]], ids=["whole", "a view"])
def test_a_state_without_gradients_is_changed_by_what_has_them(
    remote: RelayBackend, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Dynamo's own value of the state has gradients once it has traced the change."""

    def program(state: torch.Tensor, part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        part.add_(weight.mean())
        return state + weight.sum()

    def results(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        state, weight = torch.arange(4.0), torch.full((3,), 2.0, requires_grad=True)
        found = function(state, view(state), weight)
        return [found.detach(), *torch.autograd.grad(found.square().sum(), [weight]), state.detach()]

    torch.compiler.reset()
    torch.testing.assert_close(results(torch.compile(program, backend="torchrelay")), results(program))


def test_a_graph_whose_held_tensors_come_in_another_order_is_refused() -> None:
    (graph,) = captured_graphs(of_three, torch.ones(4))
    swapped = dict(reversed(list(graph.hoisted.items())))
    with pytest.raises(BindingMismatch, match="held_0"):
        check_binding(msgspec.structs.replace(graph, hoisted=swapped), ["l_x_"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.ones(5), "shape"),
        (torch.ones(4, dtype=torch.float64), "dtype"),
        (torch.ones(8)[::2], "stride"),
        (torch.ones(4, requires_grad=True), "requires_grad"),
        (1.0, "float"),
    ],
    ids=["size", "dtype", "stride", "gradient", "number"],
)
def test_a_value_that_its_description_does_not_fit_is_refused(given: Any, said: str) -> None:
    (graph,) = captured_graphs(lambda x: x * 2, torch.ones(4))
    with pytest.raises(BindingMismatch, match=said):
        check_binding(msgspec.structs.replace(graph, inputs=[given]), ["l_x_"])
