"""Stage 2: the closed table of names that a request may use, for a version of torch.

generate.py makes operators.json from PyTorch's own lists; people review it, and it is shipped. Nothing outside the
table is ever resolved, so a request cannot reach a file, a process, a library or global state.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from ... import decoding
from ...errors import Unsupported
from .. import schema

TypeTag = Literal["bool", "int", "float", "str"]


class ConfigOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A configuration entry a request may set: its value's type, and whether None is one too."""

    type: TypeTag
    optional: bool = False
    values: tuple[str, ...] = ()
    """The values allowed for a str. Free text is never an option's value."""
    default: bool | int | float | str | None = None
    """PyTorch's own, in a process whose environment says nothing about it. A request holds what differs."""

    def accepts(self, value: object) -> bool:
        """Whether `value` has the option's type and lies in its set or range."""
        match value:
            case None:
                return self.optional
            case bool():
                return self.type == "bool"
            case int():
                return self.type in ("int", "float") and abs(value) < 1 << 40
            case float():
                return self.type == "float" and math.isfinite(value)
            case str():
                return self.type == "str" and value in self.values
        return False


class OperatorTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    torch: str
    functions: frozenset[str]
    """Names of call_function targets, each the one canonical name of its function."""
    hops: frozenset[str]
    """Names of higher-order operators, torch.ops.higher_order.<name>."""
    methods: frozenset[str]
    """Names of torch.Tensor methods a call_method may use."""
    options: dict[str, ConfigOption]
    """torch._inductor.config entries."""
    aot_options: dict[str, ConfigOption]
    """torch._functorch.config entries."""
    fixed: dict[str, dict[str, Any]]
    """Module -> entry -> PyTorch's own value, for entries that may reach code and that no request carries."""


VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")


def load(torch_version: str) -> OperatorTable:
    """The table for a torch version such as '2.13.0+cpu'; for a 2.x newer than all tables, the newest one.

    Raises Unsupported where none is shipped.
    """
    found = re.match(r"(2\.(\d{1,3}))(?:\D|$)", torch_version[:64])
    if found is not None and found[1] in VERSIONS:
        return _read(found[1])
    if found is not None and int(found[2]) > int(VERSIONS[-1].partition(".")[2]):
        return _read(VERSIONS[-1])
    raise Unsupported(
        f"no operator table for torch {torch_version[:64]!r}; there is one for {', '.join(VERSIONS)} and for newer ones"
    )


@functools.lru_cache(maxsize=len(VERSIONS))
def _read(version: str) -> OperatorTable:
    return of_version(Path(__file__).with_name("operators.json").read_bytes(), version)


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What some versions have in common, and the others lack."""

    functions: list[str] = []
    hops: list[str] = []
    methods: list[str] = []
    options: dict[str, ConfigOption] = {}
    aot_options: dict[str, ConfigOption] = {}
    fixed: dict[str, dict[str, Any]] = {}


def of_version(data: bytes, version: str) -> OperatorTable:
    """A version's table. data: operators.json, which has a section for each set of versions, such as "2.11 2.12"."""
    sections = [
        section
        for versions, section in decoding.from_json(data, type=dict[str, _Section]).items()
        if version in versions.split()
    ]
    fixed: dict[str, dict[str, Any]] = {}
    for section in sections:
        for module, entries in section.fixed.items():
            fixed.setdefault(module, {}).update(entries)
    return OperatorTable(
        torch=version,
        functions=frozenset().union(*(section.functions for section in sections)),
        hops=frozenset().union(*(section.hops for section in sections)),
        methods=frozenset().union(*(section.methods for section in sections)),
        options={name: entry for section in sections for name, entry in section.options.items()},
        aot_options={name: entry for section in sections for name, entry in section.aot_options.items()},
        fixed=fixed,
    )


def portable(value: object) -> object:
    """A value as JSON has it: what JSON lacks is represented by the name of its type or function."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((portable(item) for item in value), key=str)
    if isinstance(value, dict):
        return {str(key): portable(item) for key, item in value.items()}
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


# --- operators that known libraries register with torch.library ------------------------------------------
# A request names the library, its version and a digest of the source that defines the operators. A worker compiles only
# if its own library has the same; it imports the module that is written here, and nothing of the request. So the
# operator is the same one on both sides, and another version has another key.


class KnownLibrary(msgspec.Struct, frozen=True):
    """module: registers the operators when it is imported. operators: their names in a graph."""

    module: str
    operators: frozenset[str]


LIBRARIES: Mapping[str, KnownLibrary] = {
    "transformers": KnownLibrary(
        module="transformers.integrations.moe",
        operators=frozenset({"torch.ops.transformers.grouped_mm_fallback"}),
    )
}
"""The libraries by the names of their distributions. The source that is digested is the module's own file: an operator
whose definition is in several files does not belong here."""

LIBRARY_OF = {operator: name for name, library in LIBRARIES.items() for operator in library.operators}


def library_of(operator: str) -> str | None:
    """The library that registers an operator; None: no known one does."""
    return LIBRARY_OF.get(operator)


def libraries_of(graph: schema.Graph) -> list[str]:
    """The libraries whose operators a graph and its subgraphs call, sorted."""
    return sorted({name for node in all_nodes(graph) if (name := library_of(node.target)) is not None})


def all_nodes(graph: schema.Graph) -> Iterator[schema.Node]:
    """Those of the subgraphs too."""
    todo = [graph]
    while todo:
        last = todo.pop()
        yield from last.nodes
        todo += last.subgraphs
