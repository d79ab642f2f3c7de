"""What the wire cannot carry is compiled here, with one warning and the right answer; `require` raises instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrelay
from torch.testing._internal.two_tensor import TwoTensor
from torchrelay.clients import backend
from torchrelay.clients.backend import RelayBackend
from torchrelay.compiler.errors import BadOption, ClientError, RelayError, Unsupported
from torchrelay.compiler.graph.captured_graph import CapturedGraph
from torchrelay.compiler.torch_internals.dynamo import backend_interface

Connect = Callable[..., RelayBackend]


@torch.library.custom_op("torchrelay_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("torchrelay_tests::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@tripled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def with_custom_op(x: torch.Tensor) -> torch.Tensor:
    return doubled(x) + 1


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 3


CASES: list[tuple[Any, Any, type[RelayError], str]] = [
    (with_custom_op, lambda: torch.randn(4), Unsupported, "torchrelay_tests"),
    (plain, lambda: TwoTensor(torch.randn(4), torch.randn(4)), Unsupported, "subclass, TwoTensor"),
    (plain, lambda: torch.randn(4, dtype=torch.complex64).conj(), Unsupported, "conjugated"),
]


@pytest.mark.parametrize(("program", "given", "kind", "words"), CASES)
def test_what_cannot_travel_falls_back_with_its_reason(
    connect: Connect, program: Any, given: Any, kind: type[RelayError], words: str
) -> None:
    connect(TORCHRELAY_MODE="remote")
    x = given()
    with pytest.warns(torchrelay.FallbackWarning, match=words) as caught:
        found = torch.compile(program, backend="torchrelay")(x)
    assert len([w for w in caught if w.category is torchrelay.FallbackWarning]) == 1
    torch.testing.assert_close(found, program(x))
    assert torchrelay.report().fallbacks == {kind.code: 1}


@pytest.mark.parametrize(("program", "given", "kind", "words"), CASES)
def test_require_raises_the_typed_error_itself(
    connect: Connect, program: Any, given: Any, kind: type[RelayError], words: str
) -> None:
    connect(TORCHRELAY_MODE="require")
    with pytest.raises(kind, match=words) as caught:
        torch.compile(program, backend="torchrelay")(given())
    assert caught.value.code == kind.code
    assert torchrelay.report().fallbacks == {}


def test_the_users_line_and_each_operator_are_named_once(connect: Connect) -> None:
    connect(TORCHRELAY_MODE="remote")

    def two(x: torch.Tensor) -> torch.Tensor:
        x = doubled(x)
        torch._dynamo.graph_break()
        x = tripled(x)
        torch._dynamo.graph_break()
        return doubled(x)

    first = two.__code__.co_firstlineno
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(two, backend="torchrelay")(torch.randn(4))
    told = [w for w in caught if w.category is torchrelay.FallbackWarning]
    assert [(w.filename, w.lineno) for w in told] == [(__file__, first + 1), (__file__, first + 3)]
    assert ["doubled" in str(w.message) for w in told] == [True, False]
    found = torchrelay.report()
    assert [(each.operator.rpartition(".")[0][-7:], each.graphs) for each in found.refused] == [
        ("doubled", 2),
        ("tripled", 1),
    ]
    assert [each.line for each in found.refused] == [f"{__file__}:{first + 1}", f"{__file__}:{first + 3}"]


def test_a_nested_tensor_is_refused_by_its_kind_and_the_users_line(connect: Connect) -> None:
    connect(TORCHRELAY_MODE="require")
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    line = plain.__code__.co_firstlineno + 1
    with pytest.raises(Unsupported, match=rf"used at .*{line}\) is a tensor subclass, NestedTensor"):
        torch.compile(plain, backend="torchrelay")(nested)


def test_a_mode_that_a_request_has_no_name_for_is_sent_as_its_options(connect: Connect) -> None:
    if "lite" not in torch._inductor.list_mode_options():
        pytest.skip("this torch has no mode lite")
    connect(TORCHRELAY_MODE="require")
    with pytest.raises(BadOption, match="fallback_by_default"):
        torch.compile(plain, backend="torchrelay", mode="lite")(torch.randn(4))


def test_a_filter_of_guards_is_dynamos_and_no_option_of_inductors(connect: Connect) -> None:
    connect(TORCHRELAY_MODE="require")
    seen: list[int] = []

    def every(guards: Any) -> list[bool]:
        seen.append(len(guards))
        return [True for _ in guards]

    compiled = torchrelay.compile(plain, options={"guard_filter_fn": every})
    x = torch.randn(4)
    torch.testing.assert_close(compiled(x), plain(x))
    assert seen and torchrelay.report().fallbacks == {}
    with pytest.raises(RuntimeError, match="no_such_option"):
        torchrelay.compile(plain, options={"no_such_option": True})


def test_dynamo_is_asked_only_once_for_the_same_constant() -> None:
    assert backend_interface.restart_analysis(["zf901"]) is not None
    assert backend_interface.restart_analysis(["zf901"]) is None
    assert backend_interface.restart_analysis(["zf901", "zf902"]) is not None
    assert backend_interface.restart_analysis([]) is None


def test_one_warning_for_many_graphs(connect: Connect) -> None:
    connect(TORCHRELAY_MODE="remote", TORCHRELAY_URL="http://127.0.0.1:1")

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    x = torch.randn(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(torch.compile(broken, backend="torchrelay")(x), x.sin().cos())
    assert [w.category for w in caught].count(torchrelay.FallbackWarning) == 1
    assert torchrelay.report().fallbacks == {"gateway_unreachable": 2}


@pytest.mark.parametrize(
    "broken", [(backend, "load_settings"), (CapturedGraph, "bind")], ids=["settings", "served"]
)
def test_require_raises_for_a_defect_before_and_after_a_graph_is_served(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, broken: tuple[Any, str]
) -> None:
    def fails(*given: Any) -> None:
        raise ValueError("a defect")

    connect(TORCHRELAY_MODE="require")
    backend.process_backend.cache_clear()
    monkeypatch.setattr(*broken, fails)
    with pytest.raises(ClientError, match="a defect"):
        torch.compile(lambda x: x * 3 + 1, backend="torchrelay")(torch.ones(3))
    assert [(graph.outcome, graph.reason) for graph in torchrelay.report().graphs][-1] == (
        "raised",
        "client",
    )
