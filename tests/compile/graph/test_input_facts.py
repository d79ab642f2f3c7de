"""What a tensor, and the shape environment of its sizes, can say of itself: in a request, refused, or without effect on
what is compiled (decision 42)."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as shapes_config
from torch.fx.experimental.symbolic_shapes import ShapeEnv, ShapeEnvSettings
from torchrelay.compiler.graph.capture import capture
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
    **dict.fromkeys(
        ["grad_dtype", "_has_grad_dtype_override"], (NO_CODE, "read by autograd as gradients are added up")
    ),
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
        found.append(key.key_of(capture(gm, example, mode="default", options={}).request))
        return gm.forward

    torch.compiler.reset()
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


def summed_in_float64(x: torch.Tensor) -> torch.Tensor:
    x.grad_dtype = torch.float64  # type: ignore[attr-defined]
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
    "conjugated": (REFUSED, plain, lambda: plain().to(torch.complex64).conj()),
    "negated": (REFUSED, plain, lambda: plain().to(torch.complex64).conj().imag),
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
    "grad_dtype": (
        NO_CODE,
        lambda: plain().requires_grad_(),
        lambda: summed_in_float64(plain().requires_grad_()),
    ),
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


SETTINGS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ["allow_scalar_outputs", "allow_dynamic_output_shape_ops"],
        (NO_CODE, "a permission: Dynamo has refused without it, the worker has it"),
    ),
    "assume_static_by_default": (SENT, "read as a size gets its symbol: symbols"),
    "specialize_zero_one": (SENT, "read as a size gets its symbol: symbols; set by backed_size_oblivious"),
    "duck_shape": (SENT, "read as a size gets its symbol: symbols; the worker makes one for each of these"),
    "prefer_deferred_runtime_asserts_over_guards": (NO_CODE, "Dynamo has put its asserts into the graph"),
    "trace_asserts": (NO_CODE, "for torch.export"),
}
"""Every entry of ShapeEnvSettings."""

MODE: dict[str, tuple[str, str]] = {
    "shape_env": (SENT, "symbols, relations; see SETTINGS and STATE"),
    "static_shapes": (NO_CODE, "Dynamo never sets it: sizes are numbers or symbols"),
    "allow_non_fake_inputs": (NO_CODE, "a permission, which the worker has"),
    "allow_scalar_outputs": (NO_CODE, "as in SETTINGS; FakeTensorMode sets it as an operator runs"),
    **dict.fromkeys(
        ["_allow_unsafe_data_ptr_access", "allow_meta", "allow_fallback_kernels", "propagate_real_tensors"],
        (REFUSED, "entries of torch._functorch.config"),
    ),
    **dict.fromkeys(["cache_enabled", "cache_crosscheck_enabled"], (NO_CODE, "a cache of what it would do")),
    **dict.fromkeys(
        ["nt_tensor_id_counter", "nt_tensor_id_initial_count"], (NO_CODE, "of nested tensors, refused")
    ),
    "fake_tensor_converter": (SENT, "what it has made: inputs and bases"),
    **dict.fromkeys(
        [
            "enter_stack",
            "in_kernel_invocation",
            "_mode_key",
            "_stack",
            "_stack_trace",
            "epoch",
            "old_dispatch_mode_flags",
            "old_non_infra_dispatch_mode_flags",
            "old_without_ignore_compile_internals_dispatch_mode_flags",
        ],
        (NO_CODE, "where it is in its work"),
    ),
}
"""Every attribute of a FakeTensorMode."""

STATE: dict[str, tuple[str, str]] = {
    "settings": (SENT, "see SETTINGS"),
    **dict.fromkeys(["backed_var_to_val", "var_to_val", "var_to_range"], (SENT, "symbols, unbacked")),
    "size_like": (SENT, "unbacked"),
    "var_to_hint_override": (SENT, "exact_sizes"),
    **dict.fromkeys(["guards", "axioms", "divisible", "dim_constraints"], (SENT, "relations")),
    **dict.fromkeys(
        ["replacements", "_replacements_version_counter", "unbacked_renamings", "_unbacked_replacements"],
        (SENT, "sizes are sent as they are after replacements"),
    ),
    **dict.fromkeys(
        ["deferred_runtime_asserts", "num_deferred_runtime_asserts", "runtime_asserts_frozen"],
        (SENT, "Dynamo puts them into the graph"),
    ),
    **dict.fromkeys(
        [
            "unbacked_inputs",
            "unbacked_alloc_order",
            "oblivious_var_to_val",
            "real_tensor_prop_unbacked_vals",
            "_shape_id_to_unbacked_symbol",
        ],
        (REFUSED, "of inputs' sizes that depend on data"),
    ),
    **dict.fromkeys(
        [
            "exclusion_constraints",
            "specializations",
            "_spec_symbol_to_compile_symbol",
            "_shape_spec_pending_assumptions",
        ],
        (NO_CODE, "Dynamo makes guards of them"),
    ),
    **dict.fromkeys(
        [
            "ignorable_fresh_unbacked_symbols",
            "pending_fresh_unbacked_symbols",
            "unbacked_symfloat_counter",
            "unbacked_symint_counter",
            "val_to_var",
            "source_to_var",
            "source_to_symbol",
            "name_to_symbol",
            "unique_ids",
        ],
        (NO_CODE, "how it gives names to new symbols"),
    ),
    **dict.fromkeys(
        [
            "_symop_cache",
            "_equality_graph",
            "_prev_cache_key",
            "_resimplify_floor_div_axioms",
            "_version_counter",
            "fake_tensor_cache",
            "foreign_unbacked_symbol_cache",
            "fx_node_cache",
            "counter",
        ],
        (NO_CODE, "caches of what follows from the rest"),
    ),
    **dict.fromkeys(
        ["_error_on_new_guards", "frozen"], (NO_CODE, "what it says to new guards while PyTorch works")
    ),
    **dict.fromkeys(
        [
            "_translation_validation_enabled",
            "check_recorded_events",
            "co_fields",
            "events",
            "is_recording",
            "log",
            "replacements_slocs",
            "should_record_events",
            "source_name_to_debug_name",
            "trace_asserts",
            "specialization_stacks",
            "symbol_guard_counter",
            "tracked_fakes",
            "var_to_range_sloc",
            "var_to_sources",
            "var_to_stack",
            "graph",
            "solver",
            "validator",
            "symbol_guard_limit",
        ],
        (NO_CODE, "for messages, checks of itself and guards"),
    ),
}
"""Every attribute of a ShapeEnv."""


def test_every_setting_of_a_shape_environment_is_classified() -> None:
    found = {
        "ShapeEnvSettings": {field.name for field in dataclasses.fields(ShapeEnvSettings)} - SETTINGS.keys(),
        "FakeTensorMode": vars(FakeTensorMode(shape_env=ShapeEnv())).keys() - MODE.keys(),
        "ShapeEnv": vars(ShapeEnv()).keys() - STATE.keys(),
    }
    new = {where: sorted(names) for where, names in found.items() if names}
    assert not new, f"torch {torch.__version__}: do these change what AOTAutograd or Inductor do? {new}"


dynamo: Any = torch._dynamo.config
functorch: Any = torch._functorch.config
CONFIGURED: dict[str, tuple[str, Any, str, Any]] = {
    "allow_scalar_outputs": (NO_CODE, dynamo, "capture_scalar_outputs", True),
    "allow_dynamic_output_shape_ops": (NO_CODE, dynamo, "capture_dynamic_output_shape_ops", True),
    "assume_static_by_default": (SENT, dynamo, "assume_static_by_default", True),
    "duck_shape": (SENT, shapes_config, "use_duck_shape", False),
    "specialize_zero_one": (REFUSED, shapes_config, "backed_size_oblivious", True),
    "prefer_deferred_runtime_asserts": (NO_CODE, dynamo, "prefer_deferred_runtime_asserts_over_guards", True),
    "allow_meta": (REFUSED, functorch, "fake_tensor_allow_meta", False),
    "propagate_real_tensors": (REFUSED, functorch, "fake_tensor_propagate_real_tensors", True),
    "unsafe data pointers": (REFUSED, functorch, "fake_tensor_allow_unsafe_data_ptr_access", False),
}


@pytest.mark.parametrize(("verdict", "module", "name", "value"), CONFIGURED.values(), ids=CONFIGURED.keys())
def test_a_setting_that_differs_is_treated_as_it_is_classified(
    verdict: str, module: Any, name: str, value: object
) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x[:, : x.shape[0] - 1].sum() + y * 2

    def keys() -> list[str]:
        return keys_of(function, (torch.ones(6, 6, 3), torch.ones(5)))

    with dynamo.patch(assume_static_by_default=False):  # as torch.compile(dynamic=True): sizes get symbols
        (expected,) = keys()
        with module.patch(**{name: value}):
            if verdict == REFUSED:
                with pytest.raises(BackendCompilerFailed, match=f"BadOption: .*{name}"):
                    keys()
                return
            assert (keys() == [expected]) == (verdict == NO_CODE)
