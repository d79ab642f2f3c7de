"""A scripted HTTP server on loopback, and the replies that a route may give."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torchrelay.compiler import errors

KEY = "ab" * 32
DONE = b'id: 9\nevent: done\ndata: {"stage": "done", "seconds": 2.0}\n\n'


class Server(ThreadingHTTPServer):
    """`routes` maps "METHOD /path" to a function of the handler; `seen` holds the requests in order."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.routes: dict[str, Callable[[Any], None]] = {}
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.connections = 0
        self.sockets: list[socket.socket] = []
        self.stopping = threading.Event()
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def get_request(self) -> tuple[socket.socket, Any]:
        self.connections += 1
        connected, address = super().get_request()
        self.sockets.append(connected)
        return connected, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of what is tested."""

    def die(self) -> None:
        """Stop listening and break every connection, as a killed process does."""
        self.stopping.set()
        self.shutdown()
        self.server_close()
        for connected in self.sockets:
            try:
                connected.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self.thread.join()

    def counted(self) -> Counter[str]:
        return Counter(line for line, _, _ in self.seen)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.server.seen.append(
            (
                f"{self.command} {self.path}",
                {name.lower(): value for name, value in self.headers.items()},
                self.rfile.read(int(self.headers.get("content-length", "0"))),
            )
        )
        route = self.server.routes.get(f"{self.command} {self.path}")
        if route is None:
            failure(errors.NotFound("no such thing"))(self)
        else:
            route(self)

    do_POST = do_PUT = do_GET  # noqa: N815 (the names are http.server's)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def answer(status: int, body: bytes = b"", **headers: str) -> Callable[[Any], None]:
    def reply(handler: Any) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return reply


def as_json(status: int, content: Any, **headers: str) -> Callable[[Any], None]:
    return answer(status, json.dumps(content).encode(), **headers)


def failure(error: errors.RelayError, status: int | None = None, **headers: str) -> Callable[[Any], None]:
    body = {"error": {"code": error.code, "message": error.message, "hint": error.advice}}
    return as_json(status or error.status, body, **headers)


def in_turn(*replies: Callable[[Any], None]) -> Callable[[Any], None]:
    """The first reply, then the second, and so on; the last one stays."""
    left = list(replies)
    return lambda handler: (left.pop(0) if len(left) > 1 else left[0])(handler)


def stream(*parts: bytes, then: Callable[[Any], None] | None = None) -> Callable[[Any], None]:
    def reply(handler: Any) -> None:
        handler.close_connection = True
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        for part in parts:
            handler.wfile.write(part)
            handler.wfile.flush()
        if then is not None:
            then(handler)

    return reply


def hang(handler: Any) -> None:
    handler.server.stopping.wait(30)


def reset(handler: Any) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def event(id: int, stage: str, **more: Any) -> bytes:
    data = json.dumps({"stage": stage, "seconds": float(id), **more})
    return f"id: {id}\nevent: {stage}\ndata: {data}\n\n".encode()


def status(stage: str, **more: Any) -> dict[str, Any]:
    paths = {"events": f"/v1/compiles/{KEY}/events", "artifact": f"/v1/artifacts/{KEY}"}
    return {"key": KEY, "stage": stage, "seconds": 1.0, **paths, "error": None, "history": [], **more}
