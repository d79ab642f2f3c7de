"""Stage 2, offline: PyTorch's own lists of operators in, the closed table operators.json out.

    python -m torchrelay.compiler.request.operator_table.generate compiler/request/operator_table/operators.json

makes the installed torch's table by rules.py and puts it into the file, which keeps those of the other versions; a
reviewer reads the diff.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from . import left_out, rules
from .table import VERSIONS, ConfigOption, OperatorTable, of_version, portable

# --- the rules ---------------------------------------------------------------------------------------------


def dispatcher_operators(namespace: str) -> dict[str, list[str]]:
    """Base name -> overloads of every dispatcher operator of a library that the rules keep."""
    importlib.import_module(rules.REGISTERED_BY[namespace])
    kept: dict[str, list[str]] = {}
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = full.partition("::")
        base, _, overload = rest.partition(".")
        if space != namespace or left_out.reason(f"torch.ops.{space}.{base}") is not None:
            continue
        packet = getattr(getattr(torch.ops, namespace), base, None)
        found = getattr(packet, overload or "default", None)
        if found is None or left_out.TYPES.search(str(found._schema)):
            continue
        kept.setdefault(base, []).append(overload or "default")
    return kept


def resolve(name: str) -> Any:
    """The object a dotted name stands for, or None."""
    root, *rest = name.split(".")
    value: Any = importlib.import_module(root)
    path = root
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(value, part) and isinstance(value, types.ModuleType):
            try:
                importlib.import_module(path)
            except ImportError:
                return None
        value = getattr(value, part, None)
    return value


def functions(aten: dict[str, list[str]]) -> list[str]:
    from torch._dynamo import trace_rules

    listed = {
        *trace_rules.torch_c_binding_in_graph_functions,
        *trace_rules.torch_non_c_binding_in_graph_functions,
    }
    names: set[str] = {f"_operator.{name}" for name in rules.OPERATOR_FUNCTIONS}
    names |= {f"math.{name}" for name in rules.MATH_FUNCTIONS}
    names |= {f"builtins.{name}" for name in rules.BUILTIN_FUNCTIONS}
    names |= set(rules.OTHER_FUNCTIONS)
    names |= set(numpy_functions())
    for name in listed:
        owner, _, base = name.rpartition(".")
        if (owner in rules.BINDING_MODULES and base in aten) or (
            owner in rules.FUNCTIONAL_MODULES and base != "sqrt" and left_out.reason(name) is None
        ):
            names.add(name)
    names |= {f"torch.nn.functional.{base}" for base in vars(torch.nn.functional) if base in aten}
    names |= {f"torch.{base}" for base in aten if hasattr(torch, base)}
    found = {name: resolve(name) for name in names}
    return _canonical(
        name
        for name, value in found.items()
        if callable(value)
        and (name.startswith("torch._numpy.") or name in rules.OTHER_FUNCTIONS or not isinstance(value, type))
    )


def numpy_functions() -> list[str]:
    """Functions and scalar types of PyTorch's form of NumPy."""
    found = [
        (f"{module}.{name}", value)
        for module in rules.NUMPY_MODULES
        for name, value in vars(importlib.import_module(module)).items()
        if callable(value) and not name.startswith("_") and value.__module__.startswith("torch._numpy")
    ]
    return [
        name
        for name, value in found
        if left_out.reason(name) is None
        and (
            name in rules.NUMPY_FUNCTIONS
            or value.__module__ in rules.NUMPY_DEFINED_IN
            or hasattr(value, "typecode")  # a type of numbers
        )
    ]


def _canonical(names: Iterable[str]) -> list[str]:
    """One name for each function: the one with the fewest dots, then the shortest, then the first."""
    best: dict[Any, str] = {}
    for name in sorted(names, key=lambda text: (text.count("."), len(text), text)):
        best.setdefault(resolve(name), name)
    return list(best.values())


def methods(aten: dict[str, list[str]]) -> list[str]:
    return [
        name
        for name in dir(torch.Tensor)
        if (name in aten or name in rules.OTHER_METHODS) and callable(getattr(torch.Tensor, name))
    ]


def higher_order() -> list[str]:
    import torch._functorch.autograd_function
    import torch._higher_order_ops

    return [
        f"torch.ops.higher_order.{name}"
        for name in rules.HIGHER_ORDER
        if hasattr(torch.ops.higher_order, name)
    ]


def _tag(value: object) -> str:
    return type(value).__name__ if isinstance(value, (bool, int, float, str)) else ""


def inductor_options() -> dict[str, ConfigOption]:
    from torch._inductor import config

    table: dict[str, ConfigOption] = {}
    for name, default in config.get_config_copy().items():
        tag = _tag(default) or rules.OPTIONAL.get(name, "")
        if rules.drops_option(name) or tag not in ("bool", "int", "float", "str"):
            continue
        values = rules.CHOICES.get(name, ())
        if tag == "str" and not values:
            continue
        table[name] = ConfigOption(type=tag, optional=name in rules.OPTIONAL, values=values, default=default)  # type: ignore[arg-type]
    return table


def aot_options() -> dict[str, ConfigOption]:
    from torch._functorch import config

    current = config.get_config_copy()
    return {
        name: ConfigOption(type=_tag(current[name]), values=values, default=current[name])  # type: ignore[arg-type]
        for name, values in rules.AOT_OPTIONS.items()
        if _tag(current.get(name))
    }


def fixed_entries(sent: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """PyTorch's own value of each entry that may reach code and is not sent. `sent`: module -> entries that are."""
    return {
        module: {
            name: portable(value)
            for name, value in importlib.import_module(module).get_config_copy().items()
            if name not in sent.get(module, ()) and not re.fullmatch(rules.LOCAL_ENTRIES[module], name)
        }
        for module in rules.LOCAL_ENTRIES
    }


def generate() -> OperatorTable:
    """The table for the installed torch."""
    libraries = {name: dispatcher_operators(name) for name in rules.REGISTERED_BY}
    aten = libraries["aten"]
    names = functions(aten)
    names += [f"torch._numpy._operator.{name}" for name in rules.OPERATOR_FUNCTIONS]
    names += [f"torch._numpy.ndarray.{name}" for name in rules.NUMPY_METHODS]
    for space, found in libraries.items():
        for base, overloads in found.items():
            names += [
                f"torch.ops.{space}.{base}",
                *(f"torch.ops.{space}.{base}.{item}" for item in overloads),
            ]
    version = ".".join(torch.__version__.split(".")[:2])
    options, aot = inductor_options(), aot_options()
    return OperatorTable(
        torch=version,
        functions=frozenset(names),
        hops=frozenset(higher_order()),
        methods=frozenset(methods(aten)),
        options=options,
        aot_options=aot,
        fixed=fixed_entries({rules.INDUCTOR: options, rules.FUNCTORCH: aot}),
    )


def encode(tables: Iterable[OperatorTable]) -> str:
    """JSON with one sorted entry a line, below the versions that have it, so that a review sees what changed."""
    versions: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for table in sorted(tables, key=lambda table: VERSIONS.index(table.torch)):
        for path, text in _entries(table):
            versions.setdefault((path, text), []).append(table.torch)
    sections: _Node = {}
    for (path, text), having in sorted(versions.items()):
        entries = sections
        for key in (" ".join(having), *path[:-1]):
            entries = entries.setdefault(key, {})
        entries[path[-1]] = text
    return _lines(dict(sorted(sections.items(), key=lambda section: -len(section[0])))) + "\n"


_Node = dict[str, Any]
"""Names, and for each a node, a value's JSON, or nothing."""


def _entries(table: OperatorTable) -> Iterator[tuple[tuple[str, ...], str]]:
    """The path to each name in the file, and the JSON of its value, if it has one."""
    for field in ("functions", "hops", "methods"):
        yield from (((field, name), "") for name in getattr(table, field))
    for field in ("options", "aot_options"):
        for name, option in getattr(table, field).items():
            yield (field, name), json.dumps(msgspec.to_builtins(option))
    for module, values in table.fixed.items():
        for name, value in values.items():
            yield ("fixed", module, name), json.dumps(value, sort_keys=True)


def _lines(node: _Node | str, depth: int = 1) -> str:
    if isinstance(node, str):
        return node
    left, right = "{}" if any(node.values()) else "[]"
    lines = [
        " " * depth + json.dumps(name) + (f": {_lines(value, depth + 1)}" if value else "")
        for name, value in node.items()
    ]
    return f"{left}\n" + ",\n".join(lines) + f"\n{' ' * (depth - 1)}{right}"


def main(arguments: list[str], write: Callable[[str], object] = sys.stdout.write) -> int:
    if len(arguments) != 1:
        write("usage: python -m torchrelay.compiler.request.operator_table.generate FILE\n")
        return 2
    changing = sorted(name for name in os.environ if re.match(r"(PY)?TORCH|INDUCTOR|TRITON", name))
    if changing:
        write(f"unset {' '.join(changing)} first: defaults in the table must be PyTorch's own\n")
        return 2
    made = generate()
    if made.torch not in VERSIONS:
        write(f"add {made.torch} to VERSIONS in table.py first\n")
        return 2
    file = Path(arguments[0])
    data = file.read_bytes()
    others = [of_version(data, version) for version in VERSIONS if version != made.torch]
    file.write_text(encode([made, *others]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
