"""A lowered graph as nodes and edges with the program's modules and lines, for a page to draw."""

from __future__ import annotations

import re
from collections import Counter

from msgspec.structs import replace

from ...compiler.api.lowered import DrawnGraph, DrawnNode, LoweredPart, Lowering, NodeSources
from ...compiler.errors import NotFound

_TYPE = re.compile(r'^\s*(\w+): "([^"\n]*)"', re.MULTILINE)
_ALONE = 100
_GROUP = 50
"""Nodes that are one group, where one module, or none, has more than _ALONE."""
_NOTE = "`torchrelay lower --share` shows the program's modules and lines here"


def draw(key: str, lowering: Lowering, level: str, part: str, sources: NodeSources | None) -> DrawnGraph:
    """level, part: '' for the first that has a graph. Raises NotFound."""
    drawable = [(each.name, one) for each in lowering.levels for one in each.parts if one.inputs]
    names = [(name, one.name) for name, one in drawable]
    for name, one in drawable:
        if level in ("", name) and part in ("", one.name):
            return DrawnGraph(key, name, one.name, _nodes(one, sources), "" if sources else _NOTE, names)
    raise NotFound(
        f"{key[:12]} has no graph at level {level or 'any'} {part}".rstrip(),
        hint=f"There are {', '.join(map(' '.join, names))}" if names else "`torchrelay lower` makes them",
    )


def _nodes(part: LoweredPart, sources: NodeSources | None) -> list[DrawnNode]:
    types = dict(_TYPE.findall(part.text))
    backward: list[bool] = []
    nodes = []
    rows = zip(part.names, part.targets, part.inputs, part.sources, strict=False)
    for position, (name, target, taken, label) in enumerate(rows):
        inputs = [each for each in taken if 0 <= each < position]
        # what depends on the gradients that go into a joint graph
        gradient = part.name == "joint" and name.startswith("tangents")
        backward.append(gradient or (target != "output" and any(backward[each] for each in inputs)))
        line, module = _source(label, sources)
        if backward[-1]:
            module = f"backward.{module}".rstrip(".")
        nodes.append(DrawnNode(name, target, types.get(name, ""), inputs, module, line))
    return _grouped(_at_their_use(nodes))


def _at_their_use(nodes: list[DrawnNode]) -> list[DrawnNode]:
    """With parameters in the module that uses them first."""
    first: dict[int, str] = {}
    for node in nodes:
        for used in node.inputs:
            first.setdefault(used, node.module)
    return [
        replace(node, module=first.get(position, node.module)) if node.target == "placeholder" else node
        for position, node in enumerate(nodes)
    ]


def _grouped(nodes: list[DrawnNode]) -> list[DrawnNode]:
    """With neighbours as a module, where more nodes than can be drawn are alone in theirs."""
    alone = Counter(node.module for node in nodes)
    grouped = []
    for position, node in enumerate(nodes):
        if alone[node.module] > _ALONE:
            begin = position - position % _GROUP
            group = f"nodes {begin} to {begin + _GROUP - 1}"
            node = replace(node, module=f"{node.module}.{group}".lstrip("."))
        grouped.append(node)
    return grouped


def _source(label: str, sources: NodeSources | None) -> tuple[str, str]:
    line, module = sources.nodes.get(label, (-1, -1)) if sources else (-1, -1)
    return (
        sources.lines[line] if sources and 0 <= line < len(sources.lines) else "",
        sources.modules[module] if sources and 0 <= module < len(sources.modules) else "",
    )
