"""Stage 2: the closed table of operators that known libraries register with torch.library.

A request names the library, its version and a digest of the source that defines the operators. A worker compiles only
if its own library has the same; it imports the module that is written here, and nothing of the request. So the operator
is the same one on both sides, and another version has another key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from .. import schema


class KnownLibrary(Struct, frozen=True):
    """module: registers the operators when it is imported. operators: their names in a graph."""

    module: str
    operators: frozenset[str]


LIBRARIES: Mapping[str, KnownLibrary] = {
    "transformers": KnownLibrary(
        module="transformers.integrations.moe",
        operators=frozenset({"torch.ops.transformers.grouped_mm_fallback"}),
    )
}
"""By the name of the distribution. The source that is digested is the module's own file: an operator whose definition
is in several files does not belong here."""

_LIBRARY_OF = {operator: name for name, library in LIBRARIES.items() for operator in library.operators}


def library_of(operator: str) -> str | None:
    """The library that registers an operator; None: no known one does."""
    return _LIBRARY_OF.get(operator)


def libraries_of(graph: schema.Graph) -> list[str]:
    """The libraries whose operators a graph and its subgraphs call, sorted."""
    return sorted({name for node in _nodes(graph) if (name := library_of(node.target)) is not None})


def _nodes(graph: schema.Graph) -> Iterator[schema.Node]:
    todo = [graph]
    while todo:
        last = todo.pop()
        yield from last.nodes
        todo += last.subgraphs
