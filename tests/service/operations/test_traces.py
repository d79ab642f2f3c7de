"""One trace id leads from a client through gateway, queue and dispatcher to the worker's stages.

Spans go by OTLP over HTTP to a receiver, which decodes them by OpenTelemetry's own messages.
"""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from service_parts import (
    TOKEN,
    ArtifactPool,
    GatewayProcess,
    StartGateway,
    compiled,
    follow,
    free_port,
    graph,
    post,
)
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler import decoding
from torchrelay.compiler.api.trace_context import new_trace
from torchrelay.compiler.errors import CompileFailed, RelayError
from torchrelay.compiler.request import codec, key
from torchrelay.service.base.span_exporter import exporting_tracer
from torchrelay.workers.pool import PoolSettings, WorkerPool
from waiting import wait_until

STAGES = {"wait", "aot", "inductor", "sign", "publish"}


class Receiver:
    """An OTLP receiver: `spans` has what came, each with the name of the service that sent it."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        spans = self.spans

        class Endpoint(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    sender = {each.key: each.value.string_value for each in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        spans.extend((sender["service.name"], span) for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def of(self, trace_id: str) -> dict[str, tuple[str, Any]]:
        """The spans of a trace by name."""
        return {span.name: (sender, span) for sender, span in self.spans if span.trace_id.hex() == trace_id}

    def wait_for(self, trace_id: str, *names: str) -> dict[str, tuple[str, Any]]:
        wait_until(lambda: set(names) <= set(self.of(trace_id)), seconds=60)
        return self.of(trace_id)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    found = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield found
    found.server.shutdown()
    found.server.server_close()


def asked(url: str, body: bytes) -> tuple[str, str]:
    """(trace id, key) of what a client has asked for and received."""
    name = key.key_of(codec.unpack_request(body), codec.encode_request(codec.unpack_request(body)))
    settings = ClientSettings(url=url, token=TOKEN, cache_dir=Path("/nowhere"))
    with GatewayClient(settings) as client:
        submitted = client.submit(body, name, cache_only=False, deadline=300)
        assert not submitted.hit
        try:
            submitted.result()
        except RelayError as error:
            assert isinstance(error, CompileFailed), error
        return submitted.trace_id, name


def lines(text: str, event: str) -> list[dict[str, Any]]:
    found = [decoding.from_json(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] == event]


@pytest.mark.quick
def test_one_trace_id_leads_from_the_client_to_the_workers_stages_through_two_processes(
    receiver: Receiver,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings |= {"log_level": "info", "log_format": "json"}
    processes = []
    for role in ("gateway", "dispatcher"):
        monkeypatch.setenv("OTEL_SERVICE_NAME", role)
        processes.append(GatewayProcess(settings, 0.2, role))
    try:
        trace_id, _ = asked(processes[0].url, graph())
        found = receiver.wait_for(
            trace_id,
            "compile",
            "POST /v1/compile",
            "GET /v1/artifacts/{key}",
            "GET /v1/compiles/{key}/events",
        )
    finally:
        for process in processes:
            process.kill()
    assert {each for each, (sender, _) in found.items() if sender == "dispatcher"} == {"compile", *STAGES}

    def children(parent: str) -> set[str]:
        wanted = found[parent][1].span_id
        return {each for each, (_, span) in found.items() if span.parent_span_id == wanted}

    assert children("POST /v1/compile") == {"admission", "lookup", "queue"}
    assert children("queue") == {"compile"}
    assert children("compile") == STAGES
    by_begin = sorted(STAGES, key=lambda each: found[each][1].start_time_unix_nano)
    assert by_begin == ["wait", "aot", "inductor", "sign", "publish"]
    assert found["aot"][1].end_time_unix_nano == found["inductor"][1].start_time_unix_nano
    assert found["compile"][1].start_time_unix_nano == found["wait"][1].start_time_unix_nano
    roots = [each for each in found if each.startswith(("GET", "POST"))]
    assert len(roots) == 3
    assert len({found[each][1].parent_span_id for each in roots}) == 1  # the client

    written = capfd.readouterr().err
    for event in ("http", "published"):
        (line, *_) = [line for line in lines(written, event) if line.get("path", "") != "/livez"]
        assert line["trace_id"] == trace_id


def test_a_compile_that_another_dispatcher_takes_over_stays_in_its_trace(
    receiver: Receiver, settings: dict[str, Any]
) -> None:
    trace = new_trace()
    processes = [GatewayProcess(settings, 0.0, "gateway"), GatewayProcess(settings, 60.0, "dispatcher")]
    try:
        with processes[0].http() as client:
            client.headers["traceparent"] = trace.header
            name = post(client, graph()).json()["key"]
            next(stage for _, stage, _ in follow(client, name) if stage == "aot")
            processes[1].kill()
            processes.append(GatewayProcess(settings, 0.0, "dispatcher"))
            found = receiver.wait_for(trace.trace_id, "compile", "queue", "publish")
    finally:
        for process in processes:
            process.kill()
    compile = found["compile"][1]
    assert compile.parent_span_id == found["queue"][1].span_id
    assert {each.key: each.value.int_value for each in compile.attributes}["torchrelay.leases"] == 2


def test_who_waits_for_anothers_compile_has_a_link_to_its_trace(
    receiver: Receiver, start_gateway: StartGateway
) -> None:
    first, second = new_trace(), new_trace()
    gateway = start_gateway(ArtifactPool(seconds=1))
    for trace in (first, second):
        with gateway.http() as client:
            client.headers["traceparent"] = trace.header
            name = post(client, graph()).json()["key"]
            if trace is second:
                assert [stage for _, stage, _ in follow(client, name)][-1] == "done"
    led = receiver.wait_for(first.trace_id, "compile", "queue")
    followed = receiver.wait_for(second.trace_id, "queue")
    assert "compile" not in followed
    assert not led["queue"][1].links
    (link,) = followed["queue"][1].links
    assert (link.trace_id.hex(), link.span_id) == (first.trace_id, led["queue"][1].span_id)


def test_a_failed_compile_is_a_failed_span_and_what_has_no_token_is_none(
    receiver: Receiver, start_gateway: StartGateway
) -> None:
    pool = ArtifactPool()
    pool.errors = [CompileFailed("no")]
    gateway = start_gateway(pool)
    stranger = new_trace()
    with gateway.http(None) as client:
        client.headers["traceparent"] = stranger.header
        assert post(client, graph()).status_code == 401
    trace_id, _ = asked(gateway.url, graph())
    compile = receiver.wait_for(trace_id, "compile")["compile"][1]
    assert (compile.status.code, compile.status.message) == (2, "compile_failed")
    assert not receiver.of(stranger.trace_id)


def test_a_trace_that_its_client_does_not_record_is_not_recorded(
    receiver: Receiver, start_gateway: StartGateway
) -> None:
    trace = new_trace()
    gateway = start_gateway()
    with gateway.http() as client:
        client.headers["traceparent"] = trace.header.removesuffix("01") + "00"
        compiled(client, graph())
        del client.headers["traceparent"]
        compiled(client, graph())  # a hit, in a trace of its own
    wait_until(lambda: bool(receiver.spans), seconds=30)
    gateway.stop()  # it sends what is left
    assert not receiver.of(trace.trace_id)
    assert {span.name for _, span in receiver.spans} == {"POST /v1/compile", "admission", "lookup"}


def test_without_a_collector_no_exporter_is_imported_and_the_log_has_the_trace_id(
    settings: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    process = GatewayProcess(settings | {"log_level": "info", "log_format": "json"}, 0.0)
    try:
        trace_id, name = asked(process.url, graph())
    finally:
        process.kill()
    (published,) = lines(capfd.readouterr().err, "published")
    assert (published["trace_id"], published["key"]) == (trace_id, name)
    script = (
        "import sys; from torchrelay.service.base.settings import ServiceSettings as S\n"
        "from torchrelay.service.parts.shared import SharedParts; SharedParts(S(state_dir=sys.argv[1]))\n"
        "of_ours = ('opentelemetry.exporter', 'opentelemetry.sdk.trace', 'torchrelay.service.base.span_exporter')\n"
        "print([name for name in sys.modules if name.startswith(of_ours)])"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, settings["state_dir"]], capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"


def test_a_collector_that_is_down_costs_spans_and_nothing_else(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    process = GatewayProcess(settings | {"log_format": "json"}, 0.0)
    written = []
    try:
        with process.http() as client:
            compiled(client, graph())

        def has_said_so() -> bool:
            written.append(capfd.readouterr().err)
            return bool(lines("".join(written), "spans_not_exported"))

        wait_until(has_said_so, seconds=30)
    finally:
        process.kill()


def test_a_collector_that_is_silent_does_not_hold_up_the_end_of_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracer = exporting_tracer("0")
        with tracer.begin("any", None):
            pass
        tracer.close()
        assert "send spans" in [thread.name for thread in threading.enumerate()]  # it still tries


@pytest.mark.slow
def test_a_real_workers_stages_and_the_lines_of_its_child_have_the_clients_trace_id(
    receiver: Receiver, start_gateway: StartGateway, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = WorkerPool(PoolSettings(cpu_slots=1, gpu_slots_per_gpu=0, ray_token="test-ray-token-" + "0" * 32))
    gateway = start_gateway(pool, log_level="info", log_format="json")
    wait_until(lambda: [each.state for each in pool.workers()] == ["idle"], seconds=240)
    (worker,) = pool.workers()

    def request(body: bytes) -> bytes:
        here = {"toolchain": worker.toolchain, "target": worker.target}
        return codec.pack_request(msgspec.structs.replace(codec.unpack_request(body), **here))

    trace_id, _ = asked(gateway.url, request(graph()))
    found = receiver.wait_for(trace_id, "compile")
    assert {"wait", "aot", "inductor", "verify", "sign", "publish", "queue"} < set(found)
    assert found["inductor"][1].parent_span_id == found["compile"][1].span_id

    trace_id, name = asked(gateway.url, request(graph(target="torch.mm")))  # of vectors
    assert receiver.wait_for(trace_id, "compile")["compile"][1].status.message == "compile_failed"
    written = []

    def has_come() -> bool:
        written.append("".join(capfd.readouterr()))
        return f"job {name[:16]} trace_id={trace_id} | failed: compile_failed" in "".join(written)

    wait_until(has_come, seconds=30)
    (failed,) = lines("".join(written), "compile_failed")
    assert (failed["trace_id"], failed["key"]) == (trace_id, name)
