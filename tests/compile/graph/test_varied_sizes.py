"""Which sizes count as varying, and what a trace does with those that are known to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torchrelay.compiler.torch_internals.dynamo.varied_sizes import VariedSizes

Known = frozenset[str]


class Run:
    """A process, as far as Dynamo knows: it has forgotten all that it traced. traces: the shapes of each traced graph's
    tensors, None for a symbol."""

    def __init__(self, known: Known = frozenset()) -> None:
        torch.compiler.reset()
        self.traces: list[list[tuple[int | None, ...]]] = []
        self.backend: Callable[..., Any] = self._compile  # one object
        self.sizes = VariedSizes(self.backend, lambda: known)

    def _compile(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        shown = [tuple(n if isinstance(n, int) else None for n in each.shape) for each in tensors]
        self.traces.append(shown)
        return self.sizes.watched(gm.forward, inputs, f"graph {len(self.traces)}")

    def call(self, function: Any, calls: Sequence[tuple[Any, ...]], **options: Any) -> Known:
        """What varied."""
        undo = self.sizes.install()
        try:
            compiled = torch.compile(function, backend=self.backend, **options)
            for arguments in calls:
                torch.testing.assert_close(compiled(*arguments), function(*arguments))
        finally:
            undo()
        return frozenset(self.sizes.news(9)[0])


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def rows(*sizes: int) -> list[tuple[torch.Tensor]]:
    return [(torch.ones(size, 3),) for size in sizes]


@pytest.fixture
def known() -> Known:
    found = Run().call(double, rows(4, 5, 6, 7))
    assert len(found) == 1
    return found


def test_a_known_size_is_a_symbol_in_the_first_trace_and_only_that_one(known: Known) -> None:
    first, second = Run(), Run(known)
    assert first.call(double, rows(4, 5, 6, 7)) == second.call(double, rows(9, 4, 5, 6, 7)) == known
    assert first.traces == [[(4, 3)], [(None, 3)]]
    assert second.traces == [[(None, 3)]]
    assert Run(frozenset({"ab" * 32})).call(double, rows(4)) == frozenset()


@pytest.mark.parametrize(
    "sizes",
    [
        [4] * 9 + [5, 6] + [4] * 9,
        [32] * 5 + [7] + [32] * 5 + [7],
        [32, 7, 64, 64, 64, 64, 64, 5],
        [4, 4, 4],
    ],
    ids=["two others", "a last batch", "a last batch and another loop", "one size"],
)
def test_a_size_that_is_mostly_one_is_not_reported(sizes: list[int]) -> None:
    assert Run().call(double, rows(*sizes)) == frozenset()


def test_later_calls_of_a_graph_are_not_watched() -> None:
    assert Run().call(double, rows(4, *[5] * 256, 6, 7, 8, *range(9, 300))) == frozenset()


def test_what_is_reported_is_reported_once() -> None:
    run = Run()
    assert run.call(double, rows(4, 5, 6, 7))
    assert run.sizes.news(9) == ([], [])


def test_a_known_size_that_does_not_vary_is_taken_back_after_some_calls(known: Known) -> None:
    few, many = Run(known), Run(known)
    few.call(double, rows(*[4] * 31))
    assert few.sizes.news(9) == ([], [])
    graphs: list[str] = []
    many.sizes.on_constant = graphs.append
    undo = many.sizes.install()
    compiled = torch.compile(double, backend=many.backend)
    for arguments in rows(*[32] * 40, 7):
        compiled(*arguments)
    undo()
    assert many.sizes.news(9) == ([], [*known])
    assert graphs == ["graph 1"]


def scaled(x: torch.Tensor, count: int) -> torch.Tensor:
    return x * count


def test_integers_are_sizes_too() -> None:
    calls = [(torch.ones(3), count) for count in (4, 5, 6, 7)]
    varied = Run().call(scaled, calls)
    assert len(varied) == 1
    again = Run(varied)
    again.call(scaled, calls)
    assert len(again.traces) == 1


def summed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x]) + y


@pytest.mark.parametrize(("function", "times"), [(summed, 1), (joined, 2)])
def test_inputs_that_vary_together_are_named_each(function: Callable[..., Any], times: int) -> None:
    calls = [(torch.ones(size, 3), torch.ones(times * size, 3)) for size in (4, 5, 6, 7)]
    varied = Run().call(function, calls)
    assert len(varied) == 2
    again = Run(varied)
    again.call(function, calls)
    assert again.traces == [[(None, 3), (None, 3)]]


def marked_static(sizes: Sequence[int]) -> list[tuple[torch.Tensor]]:
    calls = rows(*sizes)
    for (tensor,) in calls:
        torch._dynamo.mark_static(tensor, 0)
    return calls


@pytest.mark.parametrize(
    ("calls", "options", "around"),
    [
        (rows(4, 5, 6), {"dynamic": False}, nullcontext()),
        (marked_static([4, 5, 6]), {}, nullcontext()),
        (rows(4, 5, 6), {}, torch._dynamo.config.patch(automatic_dynamic_shapes=False)),
    ],
    ids=["dynamic=False", "mark_static", "automatic_dynamic_shapes"],
)
def test_what_forbids_symbols_comes_first(
    known: Known,
    calls: list[tuple[torch.Tensor]],
    options: dict[str, Any],
    around: AbstractContextManager[None],
) -> None:
    run = Run(known)
    with around:
        assert run.call(double, calls, **options) == frozenset()
    assert run.traces == [[(4, 3)], [(5, 3)], [(6, 3)]]


def test_dynamic_graphs_say_nothing() -> None:
    assert Run().call(double, rows(4, 5, 6, 7), dynamic=True) == frozenset()


def test_a_call_that_records_gradients_is_another_function() -> None:
    weight = torch.ones(3, requires_grad=True)

    def weighted(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    with torch.no_grad():  # as an evaluation, on batches of all sizes
        varied = Run().call(weighted, rows(4, 5, 6, 7))
    assert varied
    run = Run(varied)
    run.call(weighted, rows(32, 32))
    assert run.traces[0][0] == (32, 3)


def test_modules_of_one_class_are_told_apart_by_their_parameters() -> None:
    small, large = torch.nn.Linear(3, 2), torch.nn.Linear(3, 8)
    varied = Run().call(small, rows(4, 5, 6, 7))
    assert varied
    for module, expected in ((small, None), (large, 9)):
        run = Run(varied)
        run.call(module, rows(9))
        assert (expected, 3) in run.traces[0]


def test_a_tensor_of_another_rank_has_no_symbol_for_what_it_lacks(known: Known) -> None:
    run = Run(known)
    run.call(double, [(torch.ones(4, 3, 2),)])
    assert run.traces == [[(None, 3, 2)]]


def test_another_back_end_traces_as_ever(known: Known) -> None:
    run, traced = Run(known), []

    def other(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        traced.append([each.shape for each in inputs])
        return gm.forward

    undo = run.sizes.install()
    torch.compile(double, backend=other)(torch.ones(4, 3))
    undo()
    assert traced == [[(4, 3)]]


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def test_a_rank_of_a_job_traces_as_ever_and_reports_nothing(known: Known, group: None) -> None:
    run = Run(known)
    assert run.call(double, rows(4, 5, 6, 7)) == frozenset()
    assert run.traces == [[(4, 3)], [(None, 3)]]


def test_a_trace_that_fails_here_is_dynamos_own(known: Known) -> None:
    class Broken(frozenset[str]):
        def __contains__(self, name: object) -> bool:
            raise RuntimeError

    run = Run(Broken(known))
    run.call(double, rows(4))
    assert run.traces == [[(4, 3)]]
