"""Stage 3: canonical request -> cache key; and the digests of its parts, to explain why two keys differ.

A request holds nothing that differs between two ranks, users or checkouts that ask for the same thing, and
its encoding has one form, so the key is a digest of the bytes.
"""

from __future__ import annotations

import hashlib

import msgspec

from . import wire

DOMAIN = b"torchrelay request v1\0"


def key_of(request: wire.GraphRequest) -> str:
    """64 hex digits: SHA-256 over a domain prefix and the request's canonical bytes."""
    return key_of_bytes(wire.encode_request(request))


def key_of_bytes(data: bytes) -> str:
    """The key of `wire.encode_request`'s bytes."""
    return hashlib.sha256(DOMAIN + data).hexdigest()


def components(request: wire.GraphRequest) -> dict[str, str]:
    """Each part that the key covers, by name: short parts as text, long ones as 16 hex digits of a digest."""
    parts = {
        "schema": str(request.schema),
        "graph": _digest(request.graph),
        "graph.nodes": str(_count(request.graph)),
        "inputs": _digest(request.inputs),
        "inputs.shapes": _digest([_shape(item) for item in request.inputs]),
        "symbols": _digest(request.symbols),
        "relations": _digest(request.relations),
        "constants": _digest(request.constants),
        "mode": request.mode,
    }
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


def _text(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 200 else _digest(value)


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(value)).hexdigest()[:16]


def _shape(item: wire.Input) -> object:
    return item.shape if isinstance(item, wire.TensorInput) else None


def _count(graph: wire.Graph) -> int:
    total, todo = 0, [graph]
    while todo:
        last = todo.pop()
        total += len(last.nodes)
        todo += last.subgraphs
    return total
