"""The sockets on which roles listen, and what they print."""

from __future__ import annotations

import socket
from typing import Any

from ...compiler.errors import SettingsError

_ACCEPTED_AT_ONCE = 64


class Listener(socket.socket):
    """Accepts some connections at a time, and none after one that found no descriptor.

    asyncio accepts as many as the backlog in one turn of its loop, and goes on when descriptors have run out: each try
    is a traceback in the log, two thousand of them in a turn.
    """

    _accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self._accepted >= _ACCEPTED_AT_ONCE:
            self._accepted = 0
            raise BlockingIOError
        try:
            accepted = super().accept()
        except BlockingIOError:
            self._accepted = 0
            raise
        except OSError:
            self._accepted = _ACCEPTED_AT_ONCE
            raise
        self._accepted += 1
        return accepted


def listen(host: str, port: int, *, any_port_will_do: bool) -> socket.socket:
    """A listening socket. any_port_will_do: on any free port if `port` is taken. Raises SettingsError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = Listener(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # fails at once if another process has bound the port and does not listen yet
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if any_port_will_do and port:
            return listen(host, 0, any_port_will_do=False)
        raise SettingsError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="Give another --port; 0 finds a free one",
        ) from None
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """The URL for a client on this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def say(text: str) -> None:
    """A line for whoever started this."""
    print(f"torchrelay: {text}", flush=True)
