"""The closed table against all that Dynamo may put into a graph: what it lacks is left out by a rule with a reason."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import trace_rules
from torch._dynamo.variables.builtin import BuiltinVariable
from torchrelay.compiler.errors import Unsupported
from torchrelay.compiler.graph import encode, names
from torchrelay.compiler.request.operator_table import generate, left_out, rules, table


def _in_the_table(function: object) -> bool:
    try:
        names.target_name(function)
    except Unsupported:
        return False
    return True


def test_each_function_that_dynamo_lists_for_graphs_is_in_the_table_or_left_out_by_a_rule() -> None:
    listed = {
        *trace_rules.torch_c_binding_in_graph_functions,
        *trace_rules.torch_non_c_binding_in_graph_functions,
    }
    found = {name: generate.resolve(name) for name in listed}
    assert len([name for name, function in found.items() if function is not None]) > 2000
    assert [
        name
        for name, function in found.items()
        if function is not None and not _in_the_table(function) and left_out.reason(name) is None
    ] == []


def test_each_function_of_python_that_dynamo_puts_into_graphs_is_in_the_table_or_left_out_by_a_rule() -> None:
    functions = BuiltinVariable._fx_graph_functions()
    assert len(functions) > 30
    names = [
        f"{function.__module__}.{function.__name__}" for function in functions if not _in_the_table(function)
    ]
    assert [name for name in names if left_out.reason(name) is None] == []


def test_each_function_of_pytorchs_numpy_is_in_the_table_or_left_out_by_a_rule() -> None:
    known = table.load(torch.__version__).functions
    in_the_table = {generate.resolve(name) for name in known if name.startswith("torch._numpy.")}
    assert len(in_the_table) > 300
    left = {
        f"{module}.{name}"
        for module in rules.NUMPY_MODULES
        for name, value in vars(importlib.import_module(module)).items()
        if callable(value) and value not in in_the_table
    }
    assert {name for name in left if left_out.reason(name) is None} == set()


@pytest.mark.parametrize("library", rules.REGISTERED_BY)
def test_each_operator_of_pytorchs_libraries_is_in_the_table_or_left_out_by_a_rule(library: str) -> None:
    generate.dispatcher_operators(library)  # registers them all
    known = table.load(torch.__version__).functions
    registered = {
        f"torch.ops.{library}.{name.partition('::')[2].partition('.')[0]}"
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(f"{library}::")
    }
    assert registered
    unknown = {name for name in registered - known if left_out.reason(name) is None}
    assert {name for name in unknown if not _schemas_have_left_out_types(name)} == set()


def _schemas_have_left_out_types(name: str) -> bool:
    """Whether nothing is left of an operator without the overloads that Python cannot reach or no wire value fits."""
    packet = generate.resolve(name)
    if packet is None:
        return True
    return all(
        left_out.TYPES.search(str(getattr(packet, overload)._schema)) for overload in packet.overloads()
    )


def test_each_higher_order_operator_is_in_the_table_or_left_out_by_a_rule() -> None:
    for module in pkgutil.iter_modules(torch._higher_order_ops.__path__):
        importlib.import_module(f"torch._higher_order_ops.{module.name}")
    names = {f"torch.ops.higher_order.{name}" for name in torch._ops._higher_order_ops}
    assert len(names) > 25
    known = table.load(torch.__version__).hops
    assert {name for name in names - known if left_out.reason(name) is None} == set()


def test_each_method_of_a_tensor_is_in_the_table_or_left_out_by_a_rule() -> None:
    methods = {name for name in dir(torch.Tensor) if callable(getattr(torch.Tensor, name))}
    assert len(methods) > 500
    known = table.load(torch.__version__).methods
    assert {name for name in methods - known if left_out.reason(name) is None} == set()


@pytest.mark.parametrize("version", table.VERSIONS)
def test_nothing_in_a_table_is_left_out_by_a_rule(version: str) -> None:
    ops = table.load(version)
    assert [name for name in ops.functions if name.startswith("torch.ops.") and left_out.reason(name)] == []


@pytest.mark.parametrize(
    "name",
    [
        "torch.from_file",
        "torch._C._jit_set_profiling_mode",
        "torch.set_default_dtype",
        "torch.ops.aten.set_",
        "torch._numpy.set_default_dtype",
    ],
)
def test_what_reaches_outside_a_graph_has_a_reason_to_be_left_out(name: str) -> None:
    assert name not in table.load(torch.__version__).functions
    assert re.search("files|TorchScript|state|storage", left_out.reason(name) or "")


def test_who_uses_such_a_function_reads_why_it_cannot_be_sent() -> None:
    with pytest.raises(
        Unsupported, match=r"torch\.set_default_dtype is not .*: it changes state of the process"
    ):
        names.target_name(torch.set_default_dtype)


def test_a_refused_operator_is_named_with_the_line_of_the_program_that_calls_it() -> None:
    refused: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        with pytest.raises(Unsupported) as caught:
            encode.encode_graph(gm)
        refused.append(caught.value.message)
        return gm.forward

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch._unsafe_masked_index(x, x > 0, [torch.arange(3)], 0.0)

    torch.compile(call, backend=backend)(torch.randn(3))
    line = call.__code__.co_firstlineno + 1
    (message,) = refused
    assert f" at {__file__}:{line}): " in message
    assert "torch._unsafe_masked_index is not in the table" in message
    assert "trusts its indices" in message


@pytest.mark.parametrize("name", ["torch.ops.somebody.load", "torch.frobnicate", "os.system", "frobnicate"])
def test_a_name_that_no_rule_knows_has_no_reason(name: str) -> None:
    assert left_out.reason(name) is None
