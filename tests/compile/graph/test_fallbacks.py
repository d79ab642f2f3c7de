"""What the wire cannot carry is compiled here, with one warning and the right answer; `require` raises instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrelay
from torch.testing._internal.two_tensor import TwoTensor
from torchrelay.clients.backend import RelayBackend
from torchrelay.compiler.errors import RelayError, Unsupported

Connect = Callable[..., RelayBackend]


@torch.library.custom_op("torchrelay_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
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
