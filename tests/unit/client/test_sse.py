"""The event-stream parser against the HTML standard, section 9.2, in any chunks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrelay.clients.gateway.server_sent_events import EventParser, ServerSentEvent
from torchrelay.compiler.errors import MalformedRequest


def parse(stream: bytes) -> list[ServerSentEvent]:
    return EventParser().feed(stream)


def chunked(stream: bytes, cuts: list[int]) -> list[ServerSentEvent]:
    parser = EventParser()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    return [event for a, b in itertools.pairwise(edges) for event in parser.feed(stream[a:b])]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [ServerSentEvent("message", "a", "")]),
        (b"event: aot\nid: 3\ndata: {}\n\n", [ServerSentEvent("aot", "{}", "3")]),
        (b"data: a\ndata: b\n\n", [ServerSentEvent("message", "a\nb", "")]),
        (
            b"data:a\n\ndata:  b\n\n",
            [ServerSentEvent("message", "a", ""), ServerSentEvent("message", " b", "")],
        ),
        (b": keep-alive\n\n", []),
        (b"data\n\n", [ServerSentEvent("message", "", "")]),
        (b"event: aot\n\ndata: x\n\n", [ServerSentEvent("message", "x", "")]),
        (
            b"id: 1\ndata: x\n\ndata: y\n\n",
            [ServerSentEvent("message", "x", "1"), ServerSentEvent("message", "y", "1")],
        ),
        (
            b"id: 1\ndata: x\n\nid\ndata: y\n\n",
            [ServerSentEvent("message", "x", "1"), ServerSentEvent("message", "y", "")],
        ),
        (b"id: 1\0\ndata: x\n\n", [ServerSentEvent("message", "x", "")]),
        (b"retry: 5\nother: 6\ndata: x\n\n", [ServerSentEvent("message", "x", "")]),
        (
            b"data: x\r\rdata: y\r\n\r\n",
            [ServerSentEvent("message", "x", ""), ServerSentEvent("message", "y", "")],
        ),
        (b"\xef\xbb\xbfdata: x\n\n", [ServerSentEvent("message", "x", "")]),
        (b"data: cut off\n", []),
        (b"data: \xff\n\n", [ServerSentEvent("message", "\ufffd", "")]),
    ],
)
def test_streams_of_the_standard(stream: bytes, events: list[ServerSentEvent]) -> None:
    assert parse(stream) == events
    assert chunked(stream, list(range(len(stream)))) == events


LINES = st.sampled_from(
    [
        b"data: x",
        b'data: {"a": 1}',
        b"data",
        b"event: aot",
        b"id: 7",
        b"id",
        b": c",
        b"",
        b"",
        b"\xef\xbb\xbf",
    ]
)
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])


@given(st.lists(st.tuples(LINES, ENDS), max_size=30), st.lists(st.integers(0, 300), max_size=20))
def test_where_a_stream_is_cut_does_not_matter(lines: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(line + end for line, end in lines)
    assert chunked(stream, cuts) == parse(stream)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=20))
def test_any_bytes_parse_the_same_in_any_chunks(stream: bytes, cuts: list[int]) -> None:
    assert chunked(stream, cuts) == parse(stream)


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)


@given(st.lists(st.tuples(TEXT.filter(str.strip), st.lists(TEXT, min_size=1, max_size=3)), max_size=5))
def test_what_is_written_is_read_back(events: list[tuple[str, list[str]]]) -> None:
    stream = "".join(
        f"event: {name}\nid: {n}\n" + "".join(f"data: {line}\n" for line in data) + "\n"
        for n, (name, data) in enumerate(events)
    )
    found = parse(stream.encode())
    assert found == [ServerSentEvent(name, "\n".join(data), str(n)) for n, (name, data) in enumerate(events)]


def test_an_endless_line_is_refused_before_it_fills_memory() -> None:
    parser = EventParser()
    with pytest.raises(MalformedRequest, match="1 MiB"):
        for _ in range(100):
            parser.feed(b"data: " + b"x" * 65536)


def test_an_event_of_endless_lines_is_refused() -> None:
    parser = EventParser()
    with pytest.raises(MalformedRequest, match="1 MiB"):
        for _ in range(100):
            parser.feed((b"data: " + b"x" * 1000 + b"\n") * 64)


def test_a_long_stream_of_small_events_passes() -> None:
    parser = EventParser()
    assert sum(len(parser.feed(b"data: x\n\n: keep-alive\n\n" * 4096)) for _ in range(50)) == 50 * 4096
