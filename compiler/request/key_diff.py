"""Why two keys differ: the components (key.py) of two requests in, their differences in words out.

Components are read as they come: what an older or newer version wrote, or left out, is told in fewer words."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from .. import decoding

_SHOWN = 8
"""Differences of one kind (operators, groups of inputs, symbols) that are spelled out."""


_NUMBERS = 6


_WORDS = 160


_GROUPS: tuple[tuple[str, float], ...] = (
    ("schema", 10.0),
    ("toolchain.", 4.0),
    ("target.", 4.0),
    ("mode", 2.0),
    ("meshes", 2.0),
    ("options.", 1.0),
    ("aot_options.", 1.0),
    ("ambient.", 1.0),
)
"""Parts that are one value each, in the order of the answer, and what a difference there weighs."""


_NAMES = {
    "schema": "wire schema",
    "meshes": "mesh",
    "toolchain.python": "Python",
    "toolchain.torch": "torch",
    "toolchain.triton": "Triton",
    "toolchain.cuda": "CUDA",
    "toolchain.platform": "platform",
    "target.kind": "device",
    "target.name": "GPU",
    "target.capability": "compute capability",
    "target.units": "multiprocessors",
    "ambient.grad": "grad mode",
    "ambient.inference": "inference mode",
    "ambient.default_dtype": "default dtype",
    "ambient.matmul_precision": "matmul precision",
    "ambient.deterministic": "deterministic algorithms",
    "ambient.deterministic_warn_only": "deterministic algorithms, warning only",
    "ambient.fill_uninitialized": "filling of uninitialized memory",
}


_DETAILED = ("graph", "inputs", "symbols", "relations", "constants", "kernels", "tuning_lock")
"""Parts with a digest, and what they hold beside it."""


class KeyDifference(Struct, frozen=True):
    """One way in which two requests differ. `part`: the component; `text`: first request against second."""

    part: str
    text: str


class KeyComparison(Struct, frozen=True):
    """`distance`: 0 for equal components, larger the more of what matters differs, the same both ways."""

    distance: float
    differences: tuple[KeyDifference, ...]


def compare(asked: Mapping[str, str], found: Mapping[str, str]) -> KeyComparison:
    """How the request `asked` differs from `found`: "torch 2.12.1 against 2.13.0" and so on. Never raises.

    Toolchain and target weigh 4 each, another graph 5 to 10, inputs 2 to 4, the rest 1 or 2: of two entries
    the nearer one is likelier to be the same program, called a little differently.
    """
    named = sorted(name for name in asked.keys() | found.keys() if asked.get(name) != found.get(name))
    weighed: list[tuple[float, list[KeyDifference]]] = []
    left = [name for name in named if name.partition(".")[0] not in _DETAILED]
    for prefix, weight in _GROUPS:
        for name in [name for name in left if name.startswith(prefix)]:
            left.remove(name)
            weighed.append(
                (weight, [KeyDifference(name, _value_text(name, asked.get(name), found.get(name)))])
            )
    for part in _DETAILED:
        if any(name.partition(".")[0] == part for name in named):
            weight, texts = _detail(part, asked, found)
            weighed.append((weight, [KeyDifference(part, text) for text in texts]))
    weighed += [(1.0, [KeyDifference(name, f"{_cut(name)} differs")]) for name in left]
    return KeyComparison(
        round(sum(weight for weight, _ in weighed), 3),
        tuple(itertools.chain.from_iterable(differences for _, differences in weighed)),
    )


def _value_text(name: str, asked: str | None, found: str | None) -> str:
    if name == "target.cpu":
        return _instruction_text(asked, found)
    for prefix, label in (("options.", "option"), ("aot_options.", "AOTAutograd option")):
        if name.startswith(prefix):
            option = _cut(name.removeprefix(prefix))
            return f"{label} {option}: {_option(asked)} against {_option(found)}"
    first, second = _value(asked), _value(found)
    label = _NAMES.get(name) or name.removeprefix("ambient.flags.").removeprefix("ambient.")
    return f"{_cut(label)} {first or 'unset'} against {second or 'unset'}"


def _instruction_text(asked: str | None, found: str | None) -> str:
    first, second = _decoded(asked), _decoded(found)
    if not (_are_texts(first) and _are_texts(second)):
        return "CPU instruction sets differ"
    more, less = sorted(set(first) - set(second)), sorted(set(second) - set(first))
    told = [f"{', '.join(names)} {word}" for names, word in ((more, "more"), (less, "less")) if names]
    return f"CPU instruction sets: {'; '.join(told)}" if told else "CPU instruction sets in another order"


def _option(text: str | None) -> str:
    return "the default" if text is None else _plain(_decoded(text))


def _value(text: str | None) -> str:
    """A component as a reader writes it; '' if there is none."""
    if text is None:
        return ""
    value = _decoded(text)
    match value:
        case True:
            return "on"
        case False:
            return "off"
        case "" | []:
            return "none"
        case str():
            return _cut(value)
        case list() if all(isinstance(item, dict) for item in value):
            return _cut(", ".join(" ".join(map(_plain, item.values())) for item in value if item))
    return _cut(text)


def _detail(part: str, asked: Mapping[str, str], found: Mapping[str, str]) -> tuple[float, list[str]]:
    """What a difference in `part` weighs, and its words."""
    match part:
        case "graph":
            return _graph(asked, found)
        case "inputs":
            return _inputs(asked, found)
        case "tuning_lock":
            return 1.0, _tuning_lock(asked, found)
    texts = list(_entries(part, asked.get(f"{part}.list"), found.get(f"{part}.list")))
    return 1.0, _first(texts, f"more {part}") or [f"{part} differ"]


def _graph(asked: Mapping[str, str], found: Mapping[str, str]) -> tuple[float, list[str]]:
    kinds = [_counts(parts.get("graph.kinds")) for parts in (asked, found)]
    first, second = (dict(pairs) for pairs in kinds)
    changes = sorted(
        (name for name in first.keys() | second.keys() if first.get(name) != second.get(name)),
        key=lambda name: (-abs(first.get(name, 0) - second.get(name, 0)), name),
    )
    texts = [
        f"graph: {_cut(name)} {_times(first.get(name, 0))} against {_times(second.get(name, 0))}"
        for name in changes
    ]
    apart = sum(abs(first.get(name, 0) - second.get(name, 0)) for name in changes)
    nodes = max(sum(first.values()) + sum(second.values()), 1)
    words = _first(texts, "more operators")
    where = _first_node(asked, found, [[name for name, _ in pairs] for pairs in kinds])
    return 5.0 + 5.0 * apart / nodes, ([where] if where else []) + words or ["graph: another one"]


def _first_node(asked: Mapping[str, str], found: Mapping[str, str], kinds: list[list[str]]) -> str:
    """The first node that differs; '' if it cannot be told."""
    first, second = (parts.get("graph.order", "").split() for parts in (asked, found))
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one == other and kinds[0] == kinds[1]:
            continue
        names = [_named(token, known) for token, known in zip((one, other), kinds, strict=True)]
        if names[0] != names[1]:
            return f"graph: node {index} is {names[0]} against {names[1]}"
        if one.partition(":")[2] != other.partition(":")[2]:
            return f"graph: node {index} ({names[0]}) has other arguments"
    if len(first) != len(second):
        return f"graph: the same up to node {min(len(first), len(second))}"
    if first and asked.get("graph") != found.get("graph"):
        return f"graph: the same in its first {len(first)} nodes; then, or in a subgraph, other arguments"
    return ""


def _named(token: str, kinds: list[str]) -> str:
    position = token.partition(":")[0]
    index = int(position) if position.isascii() and position.isdigit() and len(position) < 9 else -1
    return _cut(kinds[index]) if 0 <= index < len(kinds) else "an operator"


def _counts(text: str | None) -> list[tuple[str, int]]:
    try:
        return decoding.from_json(text or "[]", type=list[tuple[str, int]])
    except msgspec.MsgspecError:
        return []


def _times(count: int) -> str:
    return "never" if count == 0 else "once" if count == 1 else f"{count} times"


def _inputs(asked: Mapping[str, str], found: Mapping[str, str]) -> tuple[float, list[str]]:
    first, second = _described(asked), _described(found)
    texts = []
    if asked.get("inputs.count") != found.get("inputs.count"):
        counts = (_value(asked.get("inputs.count")) or "?", _value(found.get("inputs.count")) or "?")
        texts.append(f"inputs: {counts[0]} against {counts[1]}")
    pairs: dict[tuple[int, int], str] = {}  # many inputs are of few kinds
    groups: dict[str, list[int]] = {}
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one is not None and other is not None and one != other:
            pair = (id(one), id(other))
            if pair not in pairs:
                pairs[pair] = _input_text(one, other)
            groups.setdefault(pairs[pair], []).append(index)
    texts += _first([f"{_numbers(indices)}: {text}" for text, indices in groups.items()], "more differences")
    apart = sum(map(len, groups.values())) + abs(len(first) - len(second))
    share = apart / max(len(first), len(second), 1)
    return 2.0 + 2.0 * share, texts or ["inputs differ"]


def _described(parts: Mapping[str, str]) -> list[dict[str, Any] | None]:
    """Each input's fields, as far as they were kept; None for one that was cut off."""
    try:
        kinds = decoding.from_json(parts.get("inputs.kinds", "[]"), type=list[dict[str, Any]])
        order = decoding.from_json(parts.get("inputs.order", "[]"), type=list[int])
    except msgspec.MsgspecError:
        return []
    return [kinds[index] if 0 <= index < len(kinds) else None for index in order]


def _input_text(one: dict[str, Any], other: dict[str, Any]) -> str:
    if one.get("type") != other.get("type"):
        return f"{_kind(one)} against {_kind(other)}"
    fields = [name for name in (*one, *(other.keys() - one.keys())) if one.get(name) != other.get(name)]
    if "shape" in fields and _contiguous(one) and _contiguous(other):
        fields = [name for name in fields if name not in ("stride", "storage_bytes")]
    return "; ".join(
        f"{_cut(str(name).replace('_', ' '))} {_plain(one.get(name))} against {_plain(other.get(name))}"
        for name in fields
    )


def _kind(item: dict[str, Any]) -> str:
    match item.get("type"):
        case "tensor":
            return f"tensor {_plain(item.get('dtype'))} {_plain(item.get('shape'))}"
        case "symint":
            return f"integer {_plain(item.get('expr'))}"
        case "scalar":
            return f"number {_plain(item.get('value'))}"
    return "an input of another kind"


def _contiguous(item: dict[str, Any]) -> bool:
    expected, sizes = 1, item.get("shape")
    strides = item.get("stride")
    if not isinstance(sizes, list) or not isinstance(strides, list) or len(sizes) != len(strides):
        return False
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if not isinstance(size, int) or stride != expected:
            return False
        expected *= max(size, 1)
    return True


def _numbers(indices: list[int]) -> str:
    if len(indices) == 1:
        return f"input {indices[0]}"
    shown = ", ".join(map(str, indices[:_NUMBERS]))
    rest = len(indices) - _NUMBERS
    return f"inputs {shown} and {rest} more" if rest > 0 else f"inputs {shown}"


def _entries(part: str, asked: str | None, found: str | None) -> Iterator[str]:
    """Entry by entry of a list that both sides have."""
    first, second = _decoded(asked), _decoded(found)
    if not isinstance(first, list) or not isinstance(second, list):
        return
    label = part.removesuffix("s")
    for index, (one, other) in enumerate(itertools.zip_longest(first, second)):
        if one == other:
            continue
        if one is None or other is None:
            yield f"{label} {index}: {_entry(one)} against {_entry(other)}"
        elif isinstance(one, dict) and isinstance(other, dict) and one.get("name") == other.get("name"):
            fields = [name for name in one if one[name] != other.get(name)]
            told = "; ".join(
                f"{name} {_plain(one[name])} against {_plain(other.get(name))}" for name in fields
            )
            yield f"{label} {_plain(one.get('name'))}: {told}"
        elif part == "constants" and _alike(one, other):
            yield f"{label} {index} {_entry(one)}: other values"
        else:
            yield f"{label} {index}: {_entry(one)} against {_entry(other)}"


def _tuning_lock(asked: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """A lock against none; or what two locks say of the problems that both sides kept."""
    kinds = [parts.get("tuning_lock.strict", "none") for parts in (asked, found)]
    if "none" in kinds:
        told = [
            kind
            if kind == "none"
            else f"{_cut(kind)}, {_value(parts.get('tuning_lock.count')) or '?'} entries"
            for kind, parts in zip(kinds, (asked, found), strict=True)
        ]
        return [f"tuning lock: {told[0]} against {told[1]}"]
    texts = [f"tuning lock: {_cut(kinds[0])} against {_cut(kinds[1])}"] if kinds[0] != kinds[1] else []
    first, second = _pins(asked), _pins(found)
    changes = []
    for name in sorted(first.keys() | second.keys()):
        one, other = first.get(name), second.get(name)
        if one == other:
            continue
        winners = [_cut(pin[0]) if pin is not None else "unset" for pin in (one, other)]
        what = "measured again" if winners[0] == winners[1] else f"{winners[0]} against {winners[1]}"
        changes.append(f"tuning lock: {_cut(name[0])}: {what}")
    return texts + _first(changes, "more problems") or ["tuning lock: other entries"]


def _pins(parts: Mapping[str, str]) -> dict[tuple[str, str], tuple[str, str]]:
    """(problem, place) -> (winner, digest of the entry), as far as they were kept."""
    try:
        kept = decoding.from_json(parts.get("tuning_lock.list", "[]"), type=list[dict[str, str]])
        return {(pin["name"], pin["place"]): (pin["winner"], pin["entry"]) for pin in kept}
    except (msgspec.MsgspecError, KeyError):
        return {}


def _alike(one: Any, other: Any) -> bool:
    """Constants of one dtype, shape and place: only their bytes differ."""
    return isinstance(one, list) and isinstance(other, list) and one[:4] == other[:4]


def _entry(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return " ".join(map(_plain, value[:2]))
    if isinstance(value, dict):
        if "source" in value:
            return _plain(value.get("name"))
        return f"{_plain(value.get('name'))} in [{_plain(value.get('lower'))}, {_plain(value.get('upper'))}]"
    return _plain(value)


def _decoded(text: str | None) -> Any:
    """The JSON value of a component; the text itself where it is none."""
    try:
        return decoding.from_json(text or "null")
    except (msgspec.MsgspecError, RecursionError):
        return text


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _plain(value: Any) -> str:
    """A value as Python would print it, sizes as a tuple without quotes."""
    if isinstance(value, list):
        inside = ", ".join(map(_plain, value))
        return _cut(f"({inside},)" if len(value) == 1 else f"({inside})")
    return _cut(str(value)) if value != "" else "none"


def _cut(text: str) -> str:
    """One short line, of characters that a terminal only shows."""
    text = text[: _WORDS + 1]
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= _WORDS else f"{text[:_WORDS]}…"


def _first(texts: Iterable[str], rest: str) -> list[str]:
    every = list(texts)
    shown = every[:_SHOWN]
    if len(every) > _SHOWN:
        shown.append(f"and {len(every) - _SHOWN} {rest}")
    return shown
