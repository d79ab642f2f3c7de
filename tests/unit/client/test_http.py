"""The transport over real sockets: a scripted HTTP server on loopback answers, stalls, breaks and dies."""

from __future__ import annotations

import gzip
import json
import os
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from http_parts import (
    DONE,
    KEY,
    Server,
    answer,
    as_json,
    event,
    failure,
    hang,
    in_turn,
    reset,
    status,
    stream,
)
from torchrelay.clients.gateway import compile_client, connection
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import ClientSettings, CredentialsWarning
from torchrelay.compiler import errors
from torchrelay.compiler.api import compiles
from torchrelay.compiler.request import codec, schema


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    if not started.stopping.is_set():
        started.die()


def settings(url: str, **more: Any) -> ClientSettings:
    return ClientSettings(url=url, token="secret", cache_dir=Path("/nonexistent"), **more)


@pytest.fixture
def gateway(server: Server) -> Iterator[GatewayClient]:
    with GatewayClient(settings(server.url, idle_timeout=2.0)) as opened:
        yield opened


def accepted(server: Server, *events: Callable[[Any], None]) -> None:
    """Routes of a compile that is accepted, whose event stream is each of `events` in turn."""
    server.routes["POST /v1/compile"] = as_json(202, status("queued"), X_Torchrelay_Key=KEY)
    server.routes[f"GET /v1/compiles/{KEY}/events"] = in_turn(*events)
    server.routes[f"GET /v1/compiles/{KEY}"] = as_json(200, status("aot"))
    server.routes[f"GET /v1/artifacts/{KEY}"] = answer(200, b"artifact")


def compile_graph(gateway: GatewayClient, deadline: float = 20.0, **more: Any) -> Any:
    return gateway.submit(b"graph", KEY, deadline=deadline, **{"cache_only": False, **more}).result()


# --- hits and compiles -----------------------------------------------------------------------------------


def test_a_hit_is_one_request_with_token_and_media_type(server: Server, gateway: GatewayClient) -> None:
    server.routes["POST /v1/compile"] = answer(
        200, b"artifact", X_Torchrelay_Key=KEY, X_Torchrelay_Cache="hit"
    )
    found = compile_graph(gateway)
    assert (found.data, found.hit, found.coalesced, found.wait_seconds) == (b"artifact", True, False, 0.0)
    ((line, headers, body),) = server.seen
    assert (line, body) == ("POST /v1/compile", b"graph")
    assert headers["authorization"] == "Bearer secret"
    assert headers["content-type"] == codec.GRAPH_MEDIA_TYPE
    assert headers["accept-encoding"] == "identity"


def test_a_miss_follows_the_events_and_fetches_the_artifact(server: Server, gateway: GatewayClient) -> None:
    accepted(server, stream(b": keep-alive\n\n", event(1, "queued"), event(2, "aot", detail="joint"), DONE))
    found = compile_graph(gateway)
    assert (found.data, found.hit, found.coalesced) == (b"artifact", False, False)
    assert f"GET /v1/compiles/{KEY}" not in server.counted()


def test_each_event_of_a_compile_is_told(server: Server, gateway: GatewayClient) -> None:
    told: list[tuple[str, str]] = []
    accepted(server, stream(event(1, "queued"), event(2, "aot", detail="joint"), DONE))
    submitted = gateway.submit(b"graph", KEY, deadline=20.0, cache_only=False)
    submitted.result(lambda stage, detail: told.append((stage, detail)))
    assert told == [("queued", ""), ("aot", "joint"), ("done", "")]


def test_a_compile_that_another_request_started_counts_as_coalesced(
    server: Server, gateway: GatewayClient
) -> None:
    accepted(server, stream(DONE))
    server.routes["POST /v1/compile"] = as_json(202, status("aot"), X_Torchrelay_Cache="coalesced")
    assert compile_graph(gateway).coalesced


def test_connections_are_reused(server: Server, gateway: GatewayClient) -> None:
    server.routes["POST /v1/compile"] = answer(200, b"artifact")
    for _ in range(5):
        compile_graph(gateway)
    assert server.connections == 1


def test_a_forked_child_opens_its_own_connection(server: Server, gateway: GatewayClient) -> None:
    server.routes["GET /v1/stats"] = as_json(200, {"hits": 1})
    gateway.stats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the server's threads are not needed in the child
        child = os.fork()
    if child == 0:
        os._exit(0 if gateway.stats() == {"hits": 1} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gateway.stats() == {"hits": 1}
    assert server.connections == 2


def test_many_threads_share_one_gateway(server: Server, gateway: GatewayClient) -> None:
    accepted(server, stream(event(1, "aot"), DONE))
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(compile_graph(gateway).data)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"artifact"] * 8


def test_cache_only_never_asks_for_a_compile(server: Server, gateway: GatewayClient) -> None:
    server.routes["POST /v1/compile?wait=cache"] = failure(errors.NotFound("not compiled"))
    with pytest.raises(errors.NotCached):
        compile_graph(gateway, cache_only=True)
    assert server.counted() == {"POST /v1/compile?wait=cache": 1}


def test_another_key_than_the_clients_is_a_mismatch(server: Server, gateway: GatewayClient) -> None:
    server.routes["POST /v1/compile"] = answer(200, b"artifact", X_Torchrelay_Key="cd" * 32)
    with pytest.raises(errors.SchemaMismatch, match="cdcdcd"):
        compile_graph(gateway)


@pytest.mark.parametrize("stated", ["0", "none"])
def test_a_gateway_that_is_too_old_is_named(server: Server, gateway: GatewayClient, stated: str) -> None:
    server.routes["POST /v1/compile"] = answer(200, b"artifact", Torchrelay_Protocol=stated)
    with pytest.raises(errors.ProtocolMismatch, match=server.url):
        compile_graph(gateway)


@pytest.mark.parametrize("stated", [{}, {"Torchrelay_Protocol": "1"}, {"Torchrelay_Protocol": "9"}])
def test_an_older_gateway_and_a_newer_one_are_used(
    server: Server, gateway: GatewayClient, stated: dict[str, str]
) -> None:
    server.routes["POST /v1/compile"] = answer(200, b"artifact", **stated)
    assert compile_graph(gateway).data == b"artifact"


# --- errors the service answers --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [errors.NoWorker, errors.ForbiddenTarget, errors.Unauthenticated])
def test_an_error_that_retrying_cannot_cure_is_raised_at_once(
    server: Server, gateway: GatewayClient, kind: type[errors.RelayError]
) -> None:
    server.routes["POST /v1/compile"] = failure(kind("what is wrong"), Retry_After="1")
    with pytest.raises(kind, match="what is wrong"):
        compile_graph(gateway)
    assert len(server.seen) == 1


@pytest.mark.parametrize("kind", [errors.Overloaded, errors.Unavailable])
def test_a_busy_service_is_asked_three_times(
    server: Server, gateway: GatewayClient, kind: type[errors.RelayError]
) -> None:
    busy = failure(kind("busy"))
    server.routes["POST /v1/compile"] = in_turn(busy, busy, answer(200, b"artifact"))
    assert compile_graph(gateway).data == b"artifact"
    server.routes["POST /v1/compile"] = busy
    with pytest.raises(kind):
        compile_graph(gateway)
    assert len(server.seen) == 6


def test_retry_after_is_heeded_unless_the_deadline_comes_first(
    server: Server, gateway: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    busy = failure(errors.Overloaded("queue full"), Retry_After="3")
    server.routes["POST /v1/compile"] = in_turn(busy, answer(200, b"artifact"))
    compile_graph(gateway)
    assert slept == [3.0]
    server.routes["POST /v1/compile"] = busy
    with pytest.raises(errors.Overloaded):
        compile_graph(gateway, deadline=2.0)
    assert slept == [3.0]


@pytest.mark.parametrize(
    ("code", "kind"),
    [(401, errors.Unauthenticated), (413, errors.LimitExceeded), (500, errors.ServiceError)],
)
def test_a_page_that_is_not_ours_becomes_an_error_by_its_status(
    server: Server, gateway: GatewayClient, code: int, kind: type[errors.RelayError]
) -> None:
    server.routes["POST /v1/compile"] = answer(code, b"<html>nginx</html>")
    with pytest.raises(kind, match=f"HTTP {code}"):
        compile_graph(gateway)


def test_a_server_that_is_no_gateway_is_said_to_be_none(server: Server, gateway: GatewayClient) -> None:
    with pytest.raises(errors.GatewayUnreachable, match="no torchrelay gateway"):
        compile_graph(gateway)


def test_a_failed_compile_raises_its_own_error(server: Server, gateway: GatewayClient) -> None:
    error = {"code": "verify_failed", "message": "differs by 3", "hint": "please report"}
    accepted(server, stream(event(1, "verify"), event(2, "failed", error=error)))
    with pytest.raises(errors.VerifyFailed, match=r"differs by 3\. please report"):
        compile_graph(gateway)


@pytest.mark.parametrize("code", ["unavailable", "overloaded"])
def test_a_compile_that_ended_is_not_waited_for_even_if_its_error_is_a_busy_one(
    server: Server, gateway: GatewayClient, code: str
) -> None:
    accepted(server, stream(event(1, "failed", error={"code": code, "message": "no room", "hint": ""})))
    with pytest.raises(errors.ServiceError, match="no room"):
        compile_graph(gateway)
    assert len(server.seen) == 2


def test_redirects_are_not_followed_so_the_token_stays_here(server: Server, gateway: GatewayClient) -> None:
    server.routes["POST /v1/compile"] = answer(307, Location=f"{server.url}/elsewhere")
    with pytest.raises(errors.GatewayUnreachable, match="redirects"):
        compile_graph(gateway)
    assert len(server.seen) == 1


def test_an_answer_that_was_compressed_on_the_way_is_refused(server: Server, gateway: GatewayClient) -> None:
    server.routes["POST /v1/compile"] = answer(200, gzip.compress(b"x" * 10**6), Content_Encoding="gzip")
    with pytest.raises(errors.GatewayUnreachable, match="compresses"):
        compile_graph(gateway)


@pytest.mark.parametrize("announced", [True, False])
def test_an_answer_over_the_limit_is_refused(server: Server, announced: bool) -> None:
    reply = answer(200, b"x" * 5000) if announced else stream(b"x" * 5000)
    server.routes["POST /v1/compile"] = reply
    with (
        GatewayClient(settings(server.url, max_response_bytes=4999)) as gateway,
        pytest.raises(errors.ArtifactError, match="MAX_RESPONSE_BYTES"),
    ):
        compile_graph(gateway)
    with GatewayClient(settings(server.url, max_response_bytes=5000)) as gateway:
        assert len(compile_graph(gateway).data) == 5000


# --- streams that break, services that forget, gateways that die -----------------------------------------


def test_a_broken_stream_is_resumed_after_the_last_event(server: Server, gateway: GatewayClient) -> None:
    accepted(
        server, stream(event(1, "queued"), event(2, "aot"), then=reset), stream(event(3, "inductor"), DONE)
    )
    assert compile_graph(gateway).data == b"artifact"
    resumed = [headers for line, headers, _ in server.seen if line.endswith("/events")]
    assert [headers.get("last-event-id") for headers in resumed] == [None, "2"]


def test_a_stream_that_ends_without_an_end_is_checked_by_polling(
    server: Server, gateway: GatewayClient
) -> None:
    accepted(server, stream(event(1, "aot")))
    server.routes[f"GET /v1/compiles/{KEY}"] = as_json(200, status("done"))
    assert compile_graph(gateway).data == b"artifact"


def test_a_stream_that_something_holds_back_is_replaced_by_polling(server: Server) -> None:
    accepted(server, hang)
    server.routes[f"GET /v1/compiles/{KEY}"] = in_turn(
        as_json(200, status("aot")), as_json(200, status("aot")), as_json(200, status("done"))
    )
    with GatewayClient(settings(server.url, idle_timeout=0.3)) as gateway:
        assert compile_graph(gateway).data == b"artifact"
    counted = server.counted()
    assert counted[f"GET /v1/compiles/{KEY}/events"] == 1
    assert counted[f"GET /v1/compiles/{KEY}"] == 3


def test_keep_alives_hold_a_slow_compile_open(server: Server) -> None:
    def slow(handler: Any) -> None:
        for _ in range(10):
            handler.server.stopping.wait(0.3)
            handler.wfile.write(b": keep-alive\n\n")
            handler.wfile.flush()
        handler.wfile.write(DONE)

    accepted(server, stream(then=slow))
    with GatewayClient(settings(server.url, idle_timeout=2.0)) as gateway:
        assert compile_graph(gateway).data == b"artifact"
    assert server.counted()[f"GET /v1/compiles/{KEY}/events"] == 1


def test_a_service_that_forgot_the_compile_is_asked_again(server: Server, gateway: GatewayClient) -> None:
    accepted(server, failure(errors.NotFound("unknown")), stream(DONE))
    assert compile_graph(gateway).data == b"artifact"
    assert server.counted()["POST /v1/compile"] == 2


def test_a_service_that_always_forgets_is_given_up(server: Server, gateway: GatewayClient) -> None:
    accepted(server, failure(errors.NotFound("unknown")))
    with pytest.raises(errors.ServiceError, match="forgot it 3 times"):
        compile_graph(gateway)


def test_a_restarted_gateway_is_found_again(server: Server, gateway: GatewayClient) -> None:
    waiting = threading.Event()
    accepted(server, stream(event(4, "aot"), then=lambda handler: (waiting.set(), hang(handler))[1]))
    found: list[Any] = []
    client = threading.Thread(target=lambda: found.append(compile_graph(gateway)))
    client.start()
    assert waiting.wait(10)
    server.die()
    again = Server(server.server_port)
    accepted(again, stream(DONE))
    client.join()
    again.die()
    assert found[0].data == b"artifact"
    assert [headers.get("last-event-id") for line, headers, _ in again.seen if "events" in line] == ["4"]


def test_a_gateway_killed_while_waiting_is_given_up(
    server: Server, gateway: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_client, "RECONNECT_SECONDS", 0.5)
    accepted(server, stream(event(1, "aot"), then=lambda handler: handler.server.stopping.wait(0.2)))
    killer = threading.Timer(0.1, server.die)
    killer.start()
    with pytest.raises(errors.GatewayUnreachable):
        compile_graph(gateway, deadline=300)
    killer.join()


def test_a_gateway_that_hangs_while_waiting_is_given_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_client, "RECONNECT_SECONDS", 0.5)
    accepted(server, hang)
    server.routes[f"GET /v1/compiles/{KEY}"] = hang
    with (
        GatewayClient(settings(server.url, idle_timeout=0.3)) as gateway,
        pytest.raises(errors.GatewayUnreachable),
    ):
        compile_graph(gateway, deadline=300)


def test_redis_away_during_a_wait_is_waited_out(server: Server, gateway: GatewayClient) -> None:
    accepted(server, failure(errors.Unavailable("Redis is away")), stream(DONE))
    assert compile_graph(gateway).data == b"artifact"


def test_a_connection_that_was_closed_between_requests_is_opened_again(
    server: Server, gateway: GatewayClient
) -> None:
    server.routes["GET /v1/stats"] = in_turn(as_json(200, {}), reset, as_json(200, {"hits": 2}))
    gateway.stats()
    assert gateway.stats() == {"hits": 2}


def test_nobody_listening_is_unreachable_after_one_try() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with GatewayClient(settings(url)) as gateway, pytest.raises(errors.GatewayUnreachable, match=url):
        compile_graph(gateway)


def test_without_a_url_nothing_is_contacted() -> None:
    with (
        GatewayClient(settings("")) as gateway,
        pytest.raises(errors.GatewayUnreachable, match="torchrelay up"),
    ):
        compile_graph(gateway)


def test_after_a_connect_that_timed_out_calls_fail_at_once_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[httpx2.Request] = []

    def blackhole(request: httpx2.Request) -> httpx2.Response:
        tries.append(request)
        raise httpx2.ConnectTimeout("timed out")

    with GatewayClient(settings("http://127.0.0.1:1"), httpx2.MockTransport(blackhole)) as gateway:
        for _ in range(3):
            with pytest.raises(errors.GatewayUnreachable):
                compile_graph(gateway)
        assert len(tries) == 1
        monkeypatch.setattr(connection, "BLACKHOLE_SECONDS", 0.0)
        gateway._connection._dead_until = 0.0
        for _ in range(2):
            with pytest.raises(errors.GatewayUnreachable):
                compile_graph(gateway)
        assert len(tries) == 3


@pytest.mark.parametrize("part", [b"data: " + b"x" * 65536, (b"data: " + b"x" * 1000 + b"\n") * 64])
def test_an_event_without_end_is_refused_before_it_fills_memory(
    server: Server, gateway: GatewayClient, part: bytes
) -> None:
    accepted(server, stream(*[part] * 100))
    with pytest.raises(errors.MalformedRequest, match="byte limit"):
        compile_graph(gateway)


# --- deadlines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["request", "stream", "artifact", "dripping artifact", "busy stream"])
def test_the_total_deadline_ends_every_wait(server: Server, gateway: GatewayClient, where: str) -> None:
    def drip(handler: Any) -> None:
        while not handler.server.stopping.wait(0.05):
            handler.wfile.write(b": x\n")
            handler.wfile.flush()

    accepted(server, stream(DONE))
    slow = {
        "request": ("POST /v1/compile", hang),
        "stream": (f"GET /v1/compiles/{KEY}/events", stream(then=hang)),
        "artifact": (f"GET /v1/artifacts/{KEY}", hang),
        "dripping artifact": (f"GET /v1/artifacts/{KEY}", stream(then=drip)),
        "busy stream": (f"GET /v1/compiles/{KEY}/events", stream(then=drip)),
    }
    path, reply = slow[where]
    server.routes[path] = reply
    with pytest.raises(errors.DeadlineExceeded, match=r"0\.4 s"):
        compile_graph(gateway, deadline=0.4)


# --- the small calls -------------------------------------------------------------------------------------


def test_readiness_is_an_answer_either_way(server: Server, gateway: GatewayClient) -> None:
    server.routes["GET /readyz"] = as_json(503, {"parts": {"redis": "ok", "workers": "none"}})
    assert gateway.parts() == {"redis": "ok", "workers": "none"}
    server.routes["GET /readyz"] = answer(200, b"ok")
    assert gateway.parts() == {}


def test_a_fallback_is_reported(server: Server, gateway: GatewayClient) -> None:
    server.routes["POST /v1/report"] = answer(204)
    gateway.report("no_worker")
    assert json.loads(server.seen[0][2]) == {"reason": "no_worker", "count": 1}


def test_workers_are_typed(server: Server, gateway: GatewayClient) -> None:
    worker = compiles.WorkerInfo(
        id="w1",
        toolchain=schema.Toolchain(
            python="cp311", torch="2.13.0+cpu", triton="", cuda="", platform="linux-x86_64"
        ),
        target=schema.Target(kind="cpu", name="", capability="", units=0, cpu=["avx2"]),
        state="idle",
        jobs_done=3,
    )
    server.routes["GET /v1/workers"] = answer(200, codec.to_json([worker]))
    assert gateway.workers() == [worker]


def test_an_answer_of_another_shape_is_a_mismatch(server: Server, gateway: GatewayClient) -> None:
    server.routes["GET /v1/workers"] = as_json(200, [{"id": 5}])
    with pytest.raises(errors.SchemaMismatch):
        gateway.workers()


# --- tokens and proxies ----------------------------------------------------------------------------------


def test_a_token_over_plain_http_to_another_machine_warns() -> None:
    with pytest.warns(CredentialsWarning, match="unencrypted"):
        GatewayClient(settings("http://relay.example"))


@pytest.mark.parametrize("url", ["https://relay.example", "http://127.0.0.1:5", "http://localhost"])
def test_elsewhere_a_token_does_not_warn(url: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GatewayClient(settings(url))


def test_a_proxy_of_the_environment_is_not_used_on_this_machine(
    server: Server, gateway: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    server.routes["GET /v1/stats"] = as_json(200, {"hits": 1})
    assert gateway.stats() == {"hits": 1}


@pytest.mark.parametrize(
    ("url", "checked"),
    [("http://127.0.0.1:1", False), ("https://127.0.0.1:1", True), ("http://10.0.0.1", True)],
)
def test_certificates_go_unchecked_only_where_no_connection_is_encrypted(
    url: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    real = httpx2.Client

    def spy(**options: Any) -> httpx2.Client:
        context = options["verify"]
        checks = context and context.verify_mode == ssl.CERT_REQUIRED and context.check_hostname
        asked.append((checks, options["follow_redirects"]))
        return real(**options)

    monkeypatch.setattr(httpx2, "Client", spy)
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, json={}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CredentialsWarning)
        with GatewayClient(settings(url), transport) as gateway:
            gateway.stats()
    assert asked == [(checked, False)]
