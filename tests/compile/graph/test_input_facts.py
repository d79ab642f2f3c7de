"""What a tensor can say of itself: in a request, refused, or without effect on what is compiled (decision 42)."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torchrelay.clients.capture.prepare import prepare
from torchrelay.compiler.request import key

SENT, REFUSED, NO_CODE = "in the key", "refused", "changes no code"

FACTS: dict[str, tuple[str, str]] = {
    "shape": (SENT, "shape"),
    "ndim": (SENT, "shape"),
    "dtype": (SENT, "dtype"),
    "itemsize": (SENT, "dtype"),
    "nbytes": (SENT, "shape, dtype"),
    "is_complex": (SENT, "dtype"),
    "is_floating_point": (SENT, "dtype"),
    "is_signed": (SENT, "dtype"),
    "is_contiguous": (SENT, "stride"),
    "is_same_size": (SENT, "shape"),
    "device": (SENT, "device, without its index; REFUSED if not cpu or cuda"),
    **dict.fromkeys(("is_cpu", "is_cuda"), (SENT, "device")),
    **dict.fromkeys(
        ["is_ipu", "is_maia", "is_meta", "is_mps", "is_mtia", "is_vulkan", "is_xla", "is_xpu"],
        (REFUSED, "device"),
    ),
    "requires_grad": (SENT, "requires_grad"),
    "is_leaf": (SENT, "is_leaf"),
    "_base": (SENT, "bases, where memory is shared"),
    "_is_view": (SENT, "bases, where memory is shared"),
    "is_set_to": (SENT, "storage, offset, shape, stride"),
    "_has_symbolic_sizes_strides": (SENT, "symbols"),
    **dict.fromkeys(
        ["is_mkldnn", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_coalesced", "layout"],
        (REFUSED, "not plain"),
    ),
    "is_conj": (REFUSED, "lazy view"),
    "is_neg": (REFUSED, "lazy view"),
    "_is_zerotensor": (NO_CODE, "a fake tensor is none"),
    "_python_dispatch": (REFUSED, "subclasses"),
    **dict.fromkeys(["grad", "_grad"], (NO_CODE, "Dynamo passes it as an input of its own")),
    "grad_dtype": (NO_CODE, "read by autograd as gradients are added up"),
    **dict.fromkeys(
        ["grad_fn", "_grad_fn", "output_nr", "name"], (NO_CODE, "only whether there is one: is_leaf")
    ),
    "_version": (NO_CODE, "compared with itself"),
    **dict.fromkeys(
        ["_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad"],
        (NO_CODE, "run by autograd outside of the graph"),
    ),
    "is_inference": (
        NO_CODE,
        "only whether a version is kept while AOTAutograd traces; the mode is in ambient",
    ),
    "is_shared": (NO_CODE, "where the memory is"),
    "is_pinned": (NO_CODE, "where the memory is"),
    "is_distributed": (NO_CODE, "always false"),
    "volatile": (NO_CODE, "always false"),
    "_cdata": (NO_CODE, "an address"),
    **dict.fromkeys(
        ["H", "T", "mH", "mT", "data", "imag", "real"], (NO_CODE, "another tensor, made by an operator")
    ),
    **dict.fromkeys(
        ["_is_all_true", "_is_any_true", "is_nonzero"], (NO_CODE, "of values, which no request has")
    ),
}
"""Every property of torch.Tensor, and every method is_... and has_...: verdict, and field or reason."""


def test_every_fact_of_a_tensor_is_classified() -> None:
    properties = (types.GetSetDescriptorType, property)
    known = {
        name
        for name in dir(torch.Tensor)
        if name.startswith(("is_", "_is_", "has_", "_has_"))
        or (not name.startswith("__") and isinstance(inspect.getattr_static(torch.Tensor, name), properties))
    }
    new = known - FACTS.keys() - {"names", "has_names"}  # of named tensors, which Dynamo does not trace
    assert not new, f"torch {torch.__version__}: does AOTAutograd or Inductor read {sorted(new)} of an input?"


def keys_of(function: Callable[..., Any], inputs: Sequence[Any]) -> list[str]:
    found: list[str] = []

    def backend(gm: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        found.append(key.key_of(prepare(gm, example, mode="default", options={}).captured.request))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    return found


def plain() -> torch.Tensor:
    return torch.arange(16.0).reshape(4, 4).clone()


def with_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x[0]


def marked(x: torch.Tensor, mark: Callable[..., None], *more: Any) -> torch.Tensor:
    mark(x, *more)
    return x


def hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: gradient)
    return x


def in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return plain()


def used(x: torch.Tensor) -> torch.Tensor:
    (x * 2).sum().backward()
    return x


def kept(x: torch.Tensor) -> torch.Tensor:
    x.retain_grad()
    return x


def in_a_new_storage(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, torch.empty(0).set_(x.untyped_storage(), 0, (4,), (1,))


Make = Callable[[], Any]
PAIRS: dict[str, tuple[str, Make, Make]] = {
    "shape": (SENT, plain, lambda: plain()[:3].clone()),
    "stride": (SENT, plain, lambda: plain().t()),
    "offset": (SENT, lambda: plain()[:3].clone(), lambda: plain()[1:]),
    "overlap inside": (SENT, plain, lambda: torch.ones(4).expand(4, 4)),
    "dtype": (SENT, plain, lambda: plain().double()),
    "requires_grad": (SENT, plain, lambda: plain().requires_grad_()),
    "is_leaf": (SENT, lambda: plain().requires_grad_(), lambda: plain().requires_grad_() * 1),
    "a parameter": (SENT, lambda: plain().requires_grad_(), lambda: nn.Parameter(plain())),
    "static address": (SENT, plain, lambda: marked(plain(), torch._dynamo.mark_static_address)),
    "dynamic size": (SENT, plain, lambda: marked(plain(), torch._dynamo.mark_dynamic, 0)),
    "shared memory": (SENT, lambda: (plain(), plain()[0].clone()), lambda: with_row(plain())),
    "_base": (SENT, lambda: in_a_new_storage(plain()), lambda: with_row(plain())),
    "conjugated": (REFUSED, plain, lambda: plain().cfloat().conj()),
    "negated": (REFUSED, plain, lambda: plain().cfloat().conj().imag),
    "a meta tensor": (REFUSED, plain, lambda: plain().to("meta")),
    "_version": (NO_CODE, plain, lambda: plain().add_(1)),
    "grad": (NO_CODE, lambda: plain().requires_grad_(), lambda: used(plain().requires_grad_())),
    "hooks": (NO_CODE, lambda: plain().requires_grad_() * 1, lambda: hooked(plain().requires_grad_() * 1)),
    "retains_grad": (
        NO_CODE,
        lambda: plain().requires_grad_() * 1,
        lambda: kept(plain().requires_grad_() * 1),
    ),
    "grad_fn": (NO_CODE, lambda: plain().requires_grad_() * 1, lambda: plain().requires_grad_().sin()),
    "is_inference": (NO_CODE, plain, in_inference_mode),
    "is_shared": (NO_CODE, plain, lambda: plain().share_memory_()),
    "_is_zerotensor": (NO_CODE, plain, lambda: torch._efficientzerotensor((4, 4))),
    "a view that shares with no input": (NO_CODE, plain, lambda: torch.zeros(5, 4)[:4]),
    "how a view was made": (
        NO_CODE,
        lambda: with_row(plain()),
        lambda: (lambda x: (x, x.unbind(0)[0]))(plain()),
    ),
    "a view made without gradients": (
        NO_CODE,
        lambda: with_row(plain()),
        lambda: torch.no_grad()(with_row)(plain()),
    ),
}


@pytest.mark.parametrize(("verdict", "one", "other"), PAIRS.values(), ids=PAIRS.keys())
def test_a_fact_that_differs_is_treated_as_it_is_classified(verdict: str, one: Make, other: Make) -> None:
    def function(*x: torch.Tensor) -> list[torch.Tensor]:
        return [each * 2 for each in x]

    def keys(make: Make) -> list[str]:
        made = make()
        return keys_of(function, made if isinstance(made, tuple) else (made,))

    expected = keys(one)
    assert len(expected) == 1
    if verdict == REFUSED:
        with pytest.raises(BackendCompilerFailed, match="Unsupported: input 0"):
            keys(other)
        return
    assert (keys(other) == expected) == (verdict == NO_CODE)
