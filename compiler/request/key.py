"""Stage 3: canonical request -> cache key; and the digests of its parts, to explain why two keys differ.

A request holds nothing that differs between two ranks, users or checkouts that ask for the same thing, and its encoding
has one form, so the key is a digest of the bytes. Example values of symbolic sizes (hints) are left out: the first that
is compiled serves all sizes that its guards allow, as in PyTorch's own caches. So the first size decides between codes
that are all right, one thread or several for instance; mark_dynamic's hint_override names a size, and is in the key. A
request that tunes is for the sizes that it measures.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import msgspec

from . import codec, schema, tuning_pins
from .operator_table.table import all_nodes

DOMAIN = b"torchrelay request v%d\0" % schema.PIPELINE

DETAIL_BYTES = 16 << 10
"""The most that one component holds, as JSON."""
_TEXT = 600
_KINDS = 512
_NODES = 1500
_INPUTS = 5000


def key_of(request: schema.GraphRequest, canonical: bytes | None = None) -> str:
    """64 hex digits: SHA-256 over a domain prefix and the request's canonical bytes, without hints unless its sizes are
    exact. canonical: `codec.encode_request(request)`, if the caller has it."""
    keyed = _keyed(request)
    data = canonical if keyed is request and canonical is not None else codec.encode_request(keyed)
    return hashlib.sha256(DOMAIN + data).hexdigest()


def _keyed(request: schema.GraphRequest) -> schema.GraphRequest:
    """What the key covers."""
    if not request.symbols or request.exact_sizes or tuning_pins.tunes(request):
        return request
    symbols = [
        symbol if symbol.hint is None else msgspec.structs.replace(symbol, hint=0)
        for symbol in request.symbols
    ]
    return msgspec.structs.replace(request, symbols=symbols)


def unkeyed(request: schema.GraphRequest) -> str:
    """A digest of what the key leaves out and a compile may fail of: the hints; '' if it leaves out nothing."""
    return "" if _keyed(request) is request else _digest(request.symbols)


def _without_hint(symbol: schema.Symbol) -> dict[str, str | int | None]:
    return {name: value for name, value in msgspec.structs.asdict(symbol).items() if name != "hint"}


def components(request: schema.GraphRequest) -> dict[str, str]:
    """Each part that the key covers, by name, as text; what compiler/request/key_diff.py compares.

    Long parts are a digest of 16 hex digits, and beside it as much of what they hold as DETAIL_BYTES allows:
    a request with 12 layers of a transformer has about 10 KB, and none has more than 200 KB.
    """
    whole, request = request, _keyed(request)
    symbols = request.symbols if request is whole else [_without_hint(symbol) for symbol in request.symbols]
    parts = {
        "schema": str(request.schema),
        "graph": _digest(request.graph),
        "inputs": _digest(request.inputs),
        "inputs.count": str(len(request.inputs)),
        "symbols": _digest(request.symbols),
        "symbols.list": _list(symbols),
        "relations": _digest(request.relations),
        "relations.list": _list(request.relations),
        "constants": _digest(request.constants),
        "constants.list": _list(
            [item.dtype, item.shape, item.device, item.requires_grad, _digest(item.data)]
            for item in request.constants
        ),
        "mode": request.mode,
    }
    if request.exact_sizes:
        parts["exact_sizes"] = "true"
    if request.kernels:
        parts["kernels"] = _digest(request.kernels)
        parts["kernels.list"] = _list(
            {"name": item.name, "source": _digest(item.source), "configurations": _digest(item.configs)}
            for item in request.kernels
        )
    if schema.PIPELINE > 1:
        parts["pipeline"] = str(schema.PIPELINE)
    if request.bases:
        parts["bases"] = _digest(request.bases)
    if request.levels:
        parts["levels"] = " ".join(request.levels)
    if request.unbacked:
        parts["unbacked"] = _digest(request.unbacked)
    if request.eager:
        parts["eager"] = _digest(request.eager)
    if request.meshes:
        parts["meshes"] = ", ".join(
            f"{'x'.join(map(str, mesh.shape))} at {' '.join(map(str, mesh.coordinate))}"
            for mesh in request.meshes
        )
    for library in request.libraries:
        parts[f"libraries.{library.name}"] = f"{library.version} ({library.source[:16]})"
    if request.tuning_lock is not None:
        parts |= _lock_details(request.tuning_lock)
    parts |= _graph_details(request.graph) | _input_details(request.inputs)
    for prefix, struct in (
        ("ambient", request.ambient),
        ("toolchain", request.toolchain),
        ("target", request.target),
    ):
        for field in struct.__struct_fields__:
            if field != "flags":
                parts[f"{prefix}.{field}"] = _text(getattr(struct, field))
    parts |= {f"ambient.flags.{name}": _text(value) for name, value in request.ambient.flags}
    parts |= {f"options.{name}": _text(value) for name, value in request.options}
    parts |= {f"aot_options.{name}": _text(value) for name, value in request.aot_options}
    return parts


def _graph_details(graph: schema.Graph) -> dict[str, str]:
    """`kinds`: [operator, count] of all subgraphs together, by falling count. `order`: the outer graph's
    nodes, each the position of its operator in `kinds` ('' if it was cut off) and 4 digits of its digest."""
    counts = Counter(map(_kind, all_nodes(graph)))
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    position = {kind: index for index, (kind, _) in enumerate(ranked[:_KINDS])}
    return {
        "graph.nodes": str(counts.total()),
        "graph.kinds": _list(ranked[:_KINDS]),
        "graph.order": " ".join(
            f"{position.get(_kind(node), '')}:{_digest(node)[:4]}" for node in graph.nodes[:_NODES]
        ),
    }


def _kind(node: schema.Node) -> str:
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    return node.target or node.op


def _input_details(inputs: list[schema.Input]) -> dict[str, str]:
    """`kinds`: the distinct inputs. `order`: for each input its position there, -1 if it was cut off."""
    position: dict[bytes, int] = {}
    order = []
    for item in inputs[:_INPUTS]:
        order.append(position.setdefault(msgspec.json.encode(item), len(position)))
    kinds, size = [], 0
    for text in position:
        size += len(text)
        if size > DETAIL_BYTES:
            break
        kinds.append(msgspec.Raw(text))
    return {
        "inputs.kinds": msgspec.json.encode(kinds).decode(),
        "inputs.order": _list(index if index < len(kinds) else -1 for index in order),
    }


def _lock_details(lock: schema.TuningLock) -> dict[str, str]:
    return {
        "tuning_lock": _digest(lock),
        "tuning_lock.strict": "strict" if lock.strict else "loose",
        "tuning_lock.count": str(len(lock.entries)),
        "tuning_lock.list": _list(
            {
                "name": entry.problem.text(),
                "place": entry.place.digest(),
                "winner": entry.winner.candidate,
                "entry": _digest(entry),
            }
            for entry in lock.entries
        ),
    }


def _list(items: Iterable[object]) -> str:
    """A JSON array of the first items, at most DETAIL_BYTES of them."""
    kept, size = [], 0
    for item in items:
        text = msgspec.json.encode(item)
        size += len(text) + 1
        if size > DETAIL_BYTES:
            break
        kept.append(msgspec.Raw(text))
    return msgspec.json.encode(kept).decode()


def _text(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _TEXT else _digest(value)


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(value)).hexdigest()[:16]
