"""Server-sent events: a stream's bytes in, in any chunks, events out.

The format is the HTML standard's section 9.2 ("Server-sent events"). The `retry` field is not used.
"""

from __future__ import annotations

import codecs

from msgspec import Struct

from ...compiler.errors import MalformedRequest

_EVENT_BYTES = 1 << 20
"""The most that one event may hold; more means that this is no event stream."""


class ServerSentEvent(Struct, frozen=True):
    """One dispatched event. `id` is the last id seen so far, which outlives its event."""

    name: str
    data: str
    id: str


class EventParser:
    """An incremental parser: `feed` takes the next bytes and returns the events that they complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._started = False
        self._after_cr = False
        self._name = ""
        self._data: list[str] = []
        self._size = 0
        self._id = ""

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Raises MalformedRequest when one event passes 1 MiB."""
        events = [event for line in self._lines(chunk) if (event := self._take(line)) is not None]
        if self._size + len(self._rest) > _EVENT_BYTES:
            raise MalformedRequest("the event stream holds an event of more than 1 MiB")
        return events

    def _lines(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes, without their ends (LF, CR or CR LF)."""
        if not chunk:
            return []
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        text = self._rest + chunk
        if not self._started:
            if len(text) < len(codecs.BOM_UTF8) and codecs.BOM_UTF8.startswith(text):
                self._rest = text
                return []
            text = text.removeprefix(codecs.BOM_UTF8)
            self._started = True
        lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()
        return lines

    def _take(self, line: bytes) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._name = value
        elif name == "data":
            self._data.append(value)
            self._size += len(value)
        elif name == "id" and "\0" not in value:
            self._id = value
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        name, data = self._name, self._data
        self._name, self._data, self._size = "", [], 0
        if not data:
            return None
        return ServerSentEvent(name or "message", "\n".join(data), self._id)
