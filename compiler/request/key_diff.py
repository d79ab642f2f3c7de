"""Explains in words why two keys differ, from the components (key.py) of the two requests.

Components may come from an older or newer version: what cannot be read is described in fewer words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from .. import decoding
from .allowed_names import words

_MOST_TEXTS = 8
"""Differences of one part that are spelled out."""
_MOST_NAMES = 6
_MOST_CHARACTERS = 160
_MOST_ADVISED = 4
"""Inputs: where more differ in size, the model does."""
_OF_SIZES = {"stride", "storage_bytes"}
"""What follows from an input's shape."""

_DETAILED = {
    "graph": "operator",
    "inputs": "input",
    "symbols": "symbol",
    "relations": "relation",
    "constants": "constant",
    "kernels": "kernel",
    "tuning_lock": "pinned problem",
}
"""Parts with a digest and, beside it, details of what they contain; and what one of their items is called."""
_WEIGHTS = {
    "schema": 10.0,
    "pipeline": 10.0,
    "toolchain": 4.0,
    "target": 4.0,
    "mode": 2.0,
    "meshes": 2.0,
    "graph": 5.0,
    "inputs": 2.0,
}
"""What a difference weighs; other parts 1. Of graphs and inputs: up to twice that, the more of them differ."""
_ORDER = [*words("schema pipeline toolchain target mode meshes options aot_options ambient"), *_DETAILED]
_LABELS = {
    "schema": "wire schema",
    "pipeline": "revision of the pipeline",
    "meshes": "mesh",
    "unbacked": "what is known of sizes that depend on data:",
    "eager": "nodes compiled to operator calls:",
    "inputs.count": "inputs:",
    "bases": "tensors that inputs are views of:",
    "tuning_lock.strict": "tuning lock",
    "tuning_lock.count": "tuning lock entries:",
    "toolchain.python": "Python",
    "toolchain.triton": "Triton",
    "toolchain.cuda": "CUDA",
    "target.kind": "device",
    "target.name": "GPU",
    "target.capability": "compute capability",
    "target.units": "multiprocessors",
    "target.cpu": "CPU instruction sets",
    "ambient.grad": "grad mode",
    "ambient.inference": "inference mode",
    "ambient.deterministic": "deterministic algorithms",
    "ambient.deterministic_warn_only": "deterministic algorithms, warning only",
    "ambient.fill_uninitialized": "filling of uninitialized memory",
}
_CONSTANT = ("dtype", "shape", "device", "requires grad", "values")

T = TypeVar("T")
Components = Mapping[str, str]


class KeyDifference(Struct, frozen=True):
    """One way in which two requests differ. `part`: the component; `text`: first request against second."""

    part: str
    text: str


class KeyComparison(Struct, frozen=True):
    """`distance`: 0 for equal components, larger the more of what matters differs, the same both ways. advice: what to
    change so that one compile serves both, '' if nothing is known."""

    distance: float
    differences: tuple[KeyDifference, ...]
    advice: str = ""


def compare(wanted: Components, nearest: Components) -> KeyComparison:
    """How the request `wanted` differs from `nearest`: "torch 2.12.1 against 2.13.0" and so on. Never raises.

    Toolchain and target weigh 4 each, another graph 5 to 10, inputs 2 to 4, the rest 1 or 2: of two entries
    the nearer one is likelier to be the same program, called a little differently.
    """
    names = sorted(name for name in wanted.keys() | nearest.keys() if wanted.get(name) != nearest.get(name))
    parts = dict.fromkeys(head if (head := _head(name)) in _DETAILED else name for name in names)
    distance = 0.0
    differences: list[KeyDifference] = []
    for part in sorted(parts, key=_position):
        share, texts = (
            _details(part, wanted, nearest) if part in _DETAILED else (0.0, [_value(part, wanted, nearest)])
        )
        distance += _WEIGHTS.get(_head(part), 1.0) * (1.0 + share)
        differences += [KeyDifference(part, text) for text in texts]
    advice = _advice(wanted, nearest) if list(parts) == ["inputs"] else ""
    return KeyComparison(round(distance, 3), tuple(differences), advice)


def _advice(wanted: Components, nearest: Components) -> str:
    """Where nothing but sizes of a few inputs differs, none a parameter's: which dimensions could be symbols."""
    first, second = _items("inputs", wanted), _items("inputs", nearest)
    changed = [index for index in first.keys() | second.keys() if first.get(index) != second.get(index)]
    if not 0 < len(changed) <= _MOST_ADVISED:
        return ""
    dimensions = []
    for index in sorted(changed, key=str):
        one, other = ({**items.get(index, {})} for items in (first, second))
        if one.get("is_parameter"):
            return ""
        sizes = one.pop("shape", None), other.pop("shape", None)
        if not all(isinstance(each, list) for each in sizes) or len({*map(len, sizes)}) > 1:
            return ""
        if any(one.get(name) != other.get(name) for name in (one.keys() | other.keys()) - _OF_SIZES):
            return ""
        dimensions += [
            f"{position} of input {index}"
            for position, pair in enumerate(zip(*sizes, strict=True))
            if pair[0] != pair[1]
        ]
    if not dimensions:
        return ""
    listed = ", ".join(dimensions)
    return (
        f"only sizes differ, in dimension{'s' * (len(dimensions) > 1)} {listed}: torch.compile(..., dynamic=True), or "
        "torch._dynamo.mark_dynamic(tensor, dimension) before the call, makes one compile for all sizes"
    )


def _head(name: str) -> str:
    return name.partition(".")[0]


def _position(part: str) -> int:
    head = _head(part)
    return _ORDER.index(head) if head in _ORDER else len(_ORDER)


def _value(name: str, wanted: Components, nearest: Components) -> str:
    """A component that is one value."""
    first, second = _decoded(wanted.get(name)), _decoded(nearest.get(name))
    if name == "target.cpu" and isinstance(first, list) and isinstance(second, list):
        more, less = (
            [_plain(item) for item in one if item not in other]
            for one, other in ((first, second), (second, first))
        )
        changes = [f"{', '.join(items)} {word}" for items, word in ((more, "more"), (less, "less")) if items]
        return _short(f"{_LABELS[name]}: {'; '.join(changes) or 'in another order'}")
    label = _LABELS.get(name) or name.removeprefix("toolchain.").removeprefix("ambient.").removeprefix(
        "flags."
    ).removeprefix("libraries.").replace("_", " ")
    missing = "unset"
    if name.startswith(("options.", "aot_options.")):
        kind, _, option = name.partition(".")
        label, missing = f"{'AOTAutograd ' if kind == 'aot_options' else ''}option {option}:", "the default"
    texts = [_plain(_decoded(parts[name])) if name in parts else missing for parts in (wanted, nearest)]
    return f"{_short(label)} {texts[0]} against {texts[1]}"


# --- parts with details ------------------------------------------------------------------------------------


def _details(part: str, wanted: Components, nearest: Components) -> tuple[float, list[str]]:
    """Which share of a part's items differs, and how, in words."""
    texts = [
        _value(name, wanted, nearest)
        for name in ("inputs.count", "tuning_lock.strict", "tuning_lock.count")
        if _head(name) == part and wanted.get(name) != nearest.get(name)
    ]
    first, second = _items(part, wanted), _items(part, nearest)
    names = dict.fromkeys((*first, *second))
    changed = [name for name in names if first.get(name) != second.get(name)]
    if part == "inputs":  # the others were cut off, or are counted
        described = [name for name in changed if name in first and name in second]
    else:
        described = changed if (f"{part}.list" in wanted) == (f"{part}.list" in nearest) else []
    groups: dict[str, list[str]] = {}
    for name in described:
        groups.setdefault(_change(first.get(name), second.get(name)), []).append(_short(str(name)))
    changes = [f"{_called(part, same)}: {text}" for text, same in groups.items()]
    if len(changes) > _MOST_TEXTS:
        changes[_MOST_TEXTS:] = [f"and {len(changes) - _MOST_TEXTS} more differences"]
    if part == "graph":
        texts += _first_node(wanted, nearest)
    return len(changed) / max(len(names), 1), texts + changes or [f"{part.replace('_', ' ')}: another one"]


def _items(part: str, components: Components) -> Mapping[str | int, Any]:
    """What is known of a part's items: operators with their counts; the rest by name or position."""
    if part == "graph":
        return dict(_read(components.get("graph.kinds"), list[tuple[str | int, int]]))
    if part == "inputs":
        kinds = _read(components.get("inputs.kinds"), list[dict[str, Any]])
        order = _read(components.get("inputs.order"), list[int])
        return {index: kinds[kind] for index, kind in enumerate(order) if 0 <= kind < len(kinds)}
    items: dict[str | int, Any] = {}
    for index, item in enumerate(_read(components.get(f"{part}.list"), list[Any])):
        if part == "constants" and isinstance(item, list):
            item = dict(zip(_CONSTANT, item, strict=False))
        name = str(item["name"]) if isinstance(item, dict) and "name" in item else index
        items[f"{name} ({index})" if name in items else name] = item
    return items


def _change(first: Any, other: Any) -> str:
    if not isinstance(first, dict) or not isinstance(other, dict):
        return f"{_plain(first)} against {_plain(other)}"
    names = [name for name in (*first, *(other.keys() - first.keys())) if first.get(name) != other.get(name)]
    for decisive in ("type", "winner"):  # the others follow from it
        if decisive in names:
            names = [decisive]
    if "shape" in names:
        names = [name for name in names if name not in _OF_SIZES]
    return "; ".join(
        f"{_short(name.replace('_', ' '))} {_plain(first.get(name))} against {_plain(other.get(name))}"
        for name in names
    )


def _called(part: str, names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{_DETAILED[part]}{'s' if len(names) > 1 else ''} {shown}{more}"


def _first_node(wanted: Components, nearest: Components) -> list[str]:
    """The first node that differs; none if it is not known."""
    first, second = _nodes(wanted), _nodes(nearest)
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one[0] != other[0]:
            return [f"node {index} is {one[0]} against {other[0]}"]
        if one != other:
            return [f"node {index} ({one[0]}) has other arguments"]
    if first and second:
        return [f"the graphs are the same up to node {min(len(first), len(second))}"]
    return []


def _nodes(components: Components) -> list[tuple[str, str]]:
    """Operator and digest of each node, as far as they are known."""
    kinds = [_short(str(name)) for name in _items("graph", components)]
    tokens = [token.partition(":") for token in components.get("graph.order", "").split()]
    numbers = {str(index): kind for index, kind in enumerate(kinds)}
    return [(numbers.get(position, "an operator"), digest) for position, _, digest in tokens]


# --- words -------------------------------------------------------------------------------------------------


def _read(text: str | None, type: type[list[T]]) -> list[T]:
    """A list that is a component; empty if there is none of that type."""
    try:
        return decoding.from_json(text or "[]", type=type)
    except msgspec.MsgspecError:
        return []


def _decoded(text: str | None) -> Any:
    """The JSON value of a component; the text itself if it is no JSON."""
    try:
        return decoding.from_json(text or "null")
    except msgspec.MsgspecError:
        return text


def _plain(value: Any) -> str:
    """A value as Python prints it, sizes as a tuple without quotes; of an object its fields' values."""
    match value:
        case list():
            inside = ", ".join(map(_plain, value))
            return _short(f"({inside},)" if len(value) == 1 else f"({inside})")
        case {"name": _}:  # which the words before have
            return "present"
        case dict():
            return _short(" ".join(map(_plain, value.values())))
        case None | "":
            return "none"
    return _short(str(value))


def _short(text: str) -> str:
    """One short line of printable characters."""
    text = text[: _MOST_CHARACTERS + 1]
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
