"""Bodies that unpack to far more than they are: 413 at once, and no memory for them in the gateway."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import pytest
from service_parts import compiled, graph, post
from torchrelay.compiler.errors import LimitExceeded, MalformedRequest
from torchrelay.compiler.request import codec, validate
from watched import WatchedGateway
from zstd_frames import frame

GROWTH_BYTES = 64 << 20


def lists(count: int) -> bytes:
    """A request of four bytes a value on the wire, and a hundred in memory: empty lists in a list."""
    plain = codec.encode_request(codec.unpack_request(graph()))
    start = plain.index(b"\x92\xa1n\x00")
    body = plain[:start] + b"\x92\xa1l\xdd" + struct.pack(">I", count) + b"\x92\xa1l\x90" * count
    return codec.compress(body + plain[start + len(b"\x92\xa1n\x00") :])


BOMBS = {
    "64 GiB, size unknown": frame(64 << 30, declared=None),
    "64 GiB, size told": frame(64 << 30, declared=64 << 30),
    "129 MiB, size unknown": frame(129 << 20, declared=None),
    "129 MiB, size told": codec.compress(bytes(129 << 20)),
    "30 million empty lists": lists(30_000_000),
}
LIARS = {
    "64 GiB, said to hold 2^64 - 2": frame(64 << 30, declared=(1 << 64) - 2),
    "64 GiB, said to hold 100 bytes": frame(64 << 30, declared=100),
    "64 GiB, said to hold 1 MiB": frame(64 << 30, declared=1 << 20),
    "cut short": frame(100 << 20, declared=None)[:-4],
    "a frame in front": codec.compress(b"\x80") + frame(64 << 30, declared=None),
    "120 MiB of zeros": codec.compress(bytes(120 << 20)),
}


def test_the_bombs_are_bombs() -> None:
    assert codec.unpacked_size(frame(100 << 20, declared=None), 1 << 30) == 100 << 20
    assert codec.decompress(frame(1 << 20, declared=1 << 20), 1 << 20) == bytes(1 << 20)
    assert len(codec.decompress(lists(1000), 1 << 20)) > 3000
    assert all(len(bomb) < 3 << 20 for bomb in BOMBS.values())


@pytest.mark.parametrize("what", [*BOMBS, *LIARS])
def test_a_bomb_is_refused_and_the_gateway_does_not_grow(
    what: str, watch_gateway: Callable[..., WatchedGateway], record_property: Callable[[str, object], None]
) -> None:
    gateway = watch_gateway()
    expected = (413, "limit_exceeded") if what in BOMBS else (422, "malformed")
    body = (BOMBS | LIARS)[what]
    with gateway.http() as http:
        compiled(http, graph(nodes=40_000))
        post(http, bytes(len(body)))  # memory for a body's own bytes is there
        before = gateway.resident_bytes()
        began = time.perf_counter()
        answer = post(http, body)
        seconds, growth = time.perf_counter() - began, gateway.resident_bytes() - before
        record_property("seconds", round(seconds, 3))
        record_property("growth", growth)
        assert (answer.status_code, answer.json()["error"]["code"]) == expected
        assert growth < GROWTH_BYTES
        assert gateway.peak_growth(lambda: post(http, body)) < GROWTH_BYTES
        compiled(http, graph(9))


def test_counting_a_frame_keeps_nothing_of_it() -> None:
    with pytest.raises(LimitExceeded):
        codec.unpacked_size(frame(64 << 30, declared=None), 1 << 20)
    for damaged in (b"", b"\x28\xb5\x2f\xfd", frame(1 << 20, declared=None)[:20], b"garbage"):
        with pytest.raises(MalformedRequest):
            codec.unpacked_size(damaged, 1 << 30)


def test_a_request_with_more_values_than_any_graph_is_refused() -> None:
    request = codec.unpack_request(lists(2_000))
    validate.check_request(request, codec.Limits())
    with pytest.raises(LimitExceeded, match="values"):
        validate.check_request(request, codec.Limits(values=2_000))
