"""Stage 4, the client's side: request an artifact from the gateway's HTTP API, and receive its bytes.

POST /v1/compile answers with the artifact, or with 202; then CompileWait waits for the end of the compile, and the
artifact is fetched. Through an edge a client first asks for the artifact by key, and sends the graph if there is
none. If the service no longer knows the compile, it is requested again. Every call has a total deadline, and ends at
most one idle timeout after it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx2
import msgspec
from msgspec import Struct

from ...compiler import decoding, errors
from ...compiler.api import compiles
from ...compiler.api.admin import CallerReply
from ...compiler.api.compiles import MissExplanation
from ...compiler.api.runs import PageTicket, RunRecord, RunReply
from ...compiler.api.sign_in import SignInReply
from ...compiler.api.trace_context import TRACE_HEADER, TraceContext, new_trace
from ...compiler.api.tuning.database import BODY_LIMIT, AutotunedLibrary, AutotuneEntry
from ...compiler.artifact.programs.shared import PROGRAM_MEDIA_TYPE, ProgramReply
from ...compiler.artifact.trust_document import SignedDocument
from ...compiler.request import codec
from .connection import (
    JSON_BYTES,
    QUICK_SECONDS,
    Connection,
    Deadline,
    HttpApi,
    HttpResponse,
    backoff,
    decode,
    error_of,
    read_body,
    rebuild,
)
from .event_stream import EventStream

AUTOTUNE_SECONDS = 3.0
"""A kernel's launch waits for it."""
RECORD_SECONDS = 3.0
"""The end of a process waits for it."""
_UPLOAD_SECONDS = 60.0
_OF_THE_REQUEST = (errors.CompileFailed, errors.CompileKilled, errors.CompileTimeout, errors.VerifyFailed)
"""Failures that a service remembers for requests with the same example sizes. The key is without these."""
RECONNECT_SECONDS = 10.0
"""The longest time without an answer before the gateway counts as gone."""
POLL_SECONDS = 5.0
"""The longest that one status request may take."""
_SUBMISSIONS = 3
"""Requests for one graph, if the service forgets a compile that it had accepted."""


class FetchResult(Struct, frozen=True, kw_only=True):
    """An artifact's bytes, not yet verified.

    hit: no compile ran for this request. coalesced: another request had started the compile. wait_seconds: from the
    service's acceptance to the end of the compile. fetch_seconds: the rest, for request and download.
    """

    data: bytes
    hit: bool
    coalesced: bool
    wait_seconds: float
    fetch_seconds: float


class _Readiness(Struct):
    parts: dict[str, str] = {}


class _ProgressEvent(Struct):
    """What an event and a status have in common. A later gateway may add fields."""

    stage: compiles.Stage
    detail: str = ""
    error: compiles.ErrorBody | None = None


class CompileWait:
    """The wait for one accepted compile.

    The event stream is followed, and resumed when it breaks. If the stream delivers nothing, the status is polled
    instead. If the gateway answers nothing for ten seconds, waiting ends with an error.
    """

    def __init__(
        self,
        connection: Connection,
        key: str,
        clock: Deadline,
        headers: Mapping[str, str],
        on_progress: Callable[[str, str], None] = lambda stage, detail: None,
    ) -> None:
        """headers: of each of its requests. on_progress: gets each event's stage and detail."""
        self._connection = connection
        self._path = f"/v1/compiles/{key}"
        self._clock = clock
        self._headers = headers
        self._on_progress = on_progress
        self._stream = EventStream(connection, f"{self._path}/events", clock, headers=headers)
        self._streaming = True

    def run(self) -> None:
        """Return once the compile is done. Raises its error, NotFound if the service does not know it,
        GatewayUnreachable, DeadlineExceeded."""
        attempt = 0
        while True:
            before = self._stream.last_id
            end = self._end()
            if end is not None and end.stage == "done":
                return
            if end is not None:
                raise (
                    rebuild(end.error)
                    if end.error
                    else errors.ServiceError(end.detail or "the compile failed")
                )
            attempt = attempt + 1 if self._stream.last_id == before else 0
            self._clock.sleep(backoff(attempt))

    def _end(self) -> _ProgressEvent | None:
        """The compile's last event, if it has ended: from the stream until it breaks, then from one status request."""
        try:
            return self._follow() or self._poll()
        except httpx2.TransportError as error:
            if isinstance(error, httpx2.ReadTimeout):
                self._streaming = False  # a proxy may hold the stream back
            self._clock.remaining()
            if self._silent():
                raise self._connection.unreachable(error, self._clock) from error
        except (errors.Overloaded, errors.Unavailable):
            if self._silent():
                raise
        return None

    def _follow(self) -> _ProgressEvent | None:
        with (
            contextlib.suppress(errors.Overloaded),  # its token has as many streams as it may: it polls
            contextlib.closing(self._stream.read()) as events,
        ):
            for event in events if self._streaming else ():
                if (end := self._end_of(event.data.encode())) is not None:
                    return end
        return None

    def _poll(self) -> _ProgressEvent | None:
        with self._connection.open(
            "GET", self._path, self._clock, headers=self._headers, idle=POLL_SECONDS
        ) as response:
            body = read_body(response, JSON_BYTES, self._clock)
            if response.status_code != 200:
                raise error_of(response.status_code, body)
        self._stream.last_read = time.monotonic()
        return self._end_of(body)

    def _end_of(self, body: bytes) -> _ProgressEvent | None:
        """An event or a status that says that the compile has ended."""
        event = decode(body, _ProgressEvent)
        self._on_progress(event.stage, event.detail)
        return event if event.stage in ("done", "failed") else None

    def _silent(self) -> bool:
        return time.monotonic() - self._stream.last_read > RECONNECT_SECONDS


class SubmittedCompile:
    """A request that the gateway has answered: with the artifact, or by accepting to compile it."""

    def __init__(
        self,
        client: GatewayClient,
        body: bytes,
        key: str,
        *,
        cache_only: bool,
        clock: Deadline,
        route: str = "/v1/compile",
    ) -> None:
        self._client = client
        trace = trace_of_caller()
        self.trace_id = trace.trace_id
        """The trace of the graph's requests and of all that they cause at the service: 32 hex digits."""
        self._arguments = (body, key, cache_only, clock, {TRACE_HEADER: trace.header}, route)
        self._start = time.monotonic()
        self._answer: HttpResponse
        self._accepted = 0.0

    def send(self) -> SubmittedCompile:
        """Raises as `GatewayClient.submit` does."""
        self._answer = self._client._submit(*self._arguments)
        self._accepted = time.monotonic()
        return self

    @property
    def hit(self) -> bool:
        """Whether `result` has the artifact at once."""
        return self._answer.status == 200

    @property
    def coalesced(self) -> bool:
        """Whether it waits for what another request began."""
        return not self.hit and self._answer.headers.get("x-torchrelay-cache") == "coalesced"

    def result(self, on_progress: Callable[[str, str], None] = lambda stage, detail: None) -> FetchResult:
        """The artifact, after the end of its compile. on_progress: see CompileWait. Raises as `GatewayClient.submit`
        does."""
        _, key, _, clock, headers, _ = self._arguments
        lost: errors.NotFound | None = None
        for attempt in range(_SUBMISSIONS):
            if attempt:
                self.send()
            data, waited = self._answer.body, 0.0
            if not self.hit:
                try:
                    CompileWait(self._client._connection, key, clock, headers, on_progress).run()
                    waited = time.monotonic() - self._accepted
                    data = self._client.fetch_bytes(key, clock, headers)
                except _OF_THE_REQUEST:  # with another's example sizes: this request may still be compiled
                    if attempt or not self.coalesced:
                        raise
                    continue
                except errors.NotFound as error:
                    lost = error
                    clock.sleep(backoff(0))
                    continue
            return FetchResult(
                data=data,
                hit=self.hit,
                coalesced=self.coalesced,
                wait_seconds=waited,
                fetch_seconds=time.monotonic() - self._start - waited,
            )
        raise errors.ServiceError(
            f"the service accepted {key[:12]} and forgot it {_SUBMISSIONS} times: {lost}"
        )


class GatewayClient(HttpApi):
    """Compiles, artifacts, and what is known of a service and its keys."""

    # --- compile -------------------------------------------------------------------------------------------

    def submit(self, body: bytes, key: str, *, cache_only: bool, deadline: float) -> SubmittedCompile:
        """Send the request `body` (compressed) with key `key`, without a wait for its compile. deadline: seconds up to
        the end of that. cache_only: no compile is started; NotCached if there is no artifact.

        Raises GatewayUnreachable, DeadlineExceeded, SchemaMismatch if the gateway computes another key, and the typed
        error that the service answers.
        """
        return SubmittedCompile(self, body, key, cache_only=cache_only, clock=Deadline(deadline)).send()

    def submit_lowering(
        self, body: bytes, key: str, *, cache_only: bool, deadline: float
    ) -> SubmittedCompile:
        """The same for a request that names levels."""
        clock = Deadline(deadline)
        return SubmittedCompile(self, body, key, cache_only=cache_only, clock=clock, route="/v1/lower").send()

    def _submit(
        self,
        body: bytes,
        key: str,
        cache_only: bool,
        clock: Deadline,
        headers: Mapping[str, str],
        route: str,
    ) -> HttpResponse:
        limit = self._settings.max_response_bytes
        if self._connection.behind_edge:
            use = {**headers, compiles.USE_HEADER: "hit"}
            found = self._connection.exchange("GET", f"/v1/artifacts/{key}", clock, headers=use, limit=limit)
            if found.status == 200:
                return found
        path = f"{route}?wait=cache" if cache_only else route
        headers = {**headers, "Content-Type": codec.GRAPH_MEDIA_TYPE}
        try:
            answer = self._connection.request("POST", path, clock, content=body, headers=headers, limit=limit)
        except errors.NotFound:
            if cache_only:
                raise errors.NotCached(f"{key[:12]} is not compiled yet") from None
            raise errors.GatewayUnreachable(
                f"{self._settings.url} is no torchrelay gateway, or has no {route}"
            ) from None
        theirs = answer.headers.get("x-torchrelay-key", key)
        if theirs != key:
            raise errors.SchemaMismatch(f"the gateway computed key {theirs[:12]}, this client {key[:12]}")
        return answer

    def artifact(self, key: str, *, deadline: float) -> bytes:
        """A published artifact's bytes, not yet verified. Raises NotFound."""
        return self.fetch_bytes(key, Deadline(deadline))

    def fetch_bytes(self, key: str, clock: Deadline, headers: Mapping[str, str] | None = None) -> bytes:
        limit = self._settings.max_response_bytes
        path = f"/v1/artifacts/{key}"
        return self._connection.request("GET", path, clock, headers=headers, limit=limit).body

    # --- scripts -------------------------------------------------------------------------------------------

    def used_by(self, script: str) -> compiles.ScriptArtifacts:
        """What a script (64 hex digits) used lately and the service still has, in order of use."""
        return self._call("GET", f"/v1/prefetch/{script}", compiles.ScriptArtifacts)

    def report_used(self, used: compiles.ScriptUse, *, deadline: float) -> None:
        """Report which artifacts a script used, for the next start of it."""
        self._send("POST", "/v1/prefetch", msgspec.json.encode(used), "application/json", seconds=deadline)

    # --- programs ------------------------------------------------------------------------------------------

    def program(self, function: str, slot: int) -> bytes:
        """A function's program as an artifact's file, not yet verified. function: 64 hex digits. Raises NotFound."""
        limit = self._settings.max_response_bytes
        path = f"/v1/programs/{function}/{slot}"
        return self._connection.request("GET", path, Deadline(QUICK_SECONDS), limit=limit).body

    def store_program(self, function: str, slot: int, body: bytes, *, replace: bool) -> ProgramReply:
        """Give a program (shared.encode_upload) to the namespace's clients. Raises Forbidden, LimitExceeded."""
        path = f"/v1/programs/{function}/{slot}" + ("?replace=true" if replace else "")
        found = self._send("PUT", path, body, PROGRAM_MEDIA_TYPE, seconds=_UPLOAD_SECONDS)
        return decode(found, ProgramReply)

    # --- winners of Triton's and Helion's autotuners ----------------------------------------------------------

    def autotune(self, library: AutotunedLibrary, key: str) -> AutotuneEntry:
        """The winner that the team has for `key` (64 hex digits). Raises NotFound."""
        path = f"/v1/autotunes/{library}/{key}"
        return self._call("GET", path, AutotuneEntry, seconds=AUTOTUNE_SECONDS, limit=BODY_LIMIT)

    def store_autotune(self, library: AutotunedLibrary, key: str, entry: AutotuneEntry) -> AutotuneEntry:
        """Store a winner, unless there is one. Returns the one that stands. Raises Forbidden, LimitExceeded."""
        path = f"/v1/autotunes/{library}/{key}"
        return self._call("PUT", path, AutotuneEntry, entry, seconds=AUTOTUNE_SECONDS, limit=BODY_LIMIT)

    # --- the small calls -----------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """{version, schema, pipeline, namespace, key_ids, public_keys}."""
        return self._call("GET", "/v1/info", dict[str, Any])

    def whoami(self) -> CallerReply:
        return self._call("GET", "/v1/whoami", CallerReply)

    def sign_in(self) -> SignInReply:
        """Where people get tokens for this gateway. Needs none."""
        return self._call("GET", "/v1/sign-in", SignInReply)

    @property
    def trust_serial(self) -> int:
        """Serial of the trust document, from the gateway's latest answer; 0 before the first answer."""
        return self._connection.trust_serial

    def trust_document(self) -> SignedDocument:
        """The gateway's keys, revocations and epoch, to be verified."""
        return self._call("GET", "/v1/trust", SignedDocument)

    def stats(self, namespace: str = "") -> dict[str, Any]:
        """Counters (requests, hits, misses, compiles ...) of `namespace`, or of all that the token may see."""
        path = f"/v1/stats?namespace={namespace}" if namespace else "/v1/stats"
        return self._call("GET", path, dict[str, Any])

    def workers(self) -> list[compiles.WorkerInfo]:
        return self._call("GET", "/v1/workers", list[compiles.WorkerInfo])

    def explain(self, key: str) -> MissExplanation:
        """The entry nearest to a request that missed. Raises NotFound if the service does not know it."""
        return self._call("GET", f"/misses/{key}", MissExplanation)

    def record_run(self, record: RunRecord) -> RunReply:
        """Tell of this process's run."""
        return self._call("POST", "/v1/runs", RunReply, record, seconds=RECORD_SECONDS)

    def has(self, path: str) -> bool:
        """Whether there is what an address of the API names."""
        try:
            self._send("GET", path, seconds=QUICK_SECONDS)
        except errors.NotFound:
            return False
        return True

    def page_ticket(self) -> PageTicket:
        """What signs a browser in, once."""
        return self._call("POST", "/v1/page-tickets", PageTicket)

    def parts(self) -> dict[str, str]:
        """The state of Redis and of the workers, whatever it is. Raises GatewayUnreachable."""
        answer = self._connection.exchange("GET", "/readyz", Deadline(QUICK_SECONDS))
        try:
            return decoding.from_json(answer.body, type=_Readiness).parts
        except msgspec.MsgspecError:
            return {}

    def report(self, reason: str) -> None:
        """Count at the service that this client compiled a graph locally because of error code `reason`."""
        body = msgspec.json.encode({"reason": reason, "count": 1})
        self._send("POST", "/v1/report", body, "application/json", seconds=QUICK_SECONDS)


def trace_of_caller() -> TraceContext:
    """The trace of a graph's requests: part of the program's own OpenTelemetry trace if it has an active span, else a
    new one. OpenTelemetry is not imported: a program that has an active span has done so."""
    get_current_span = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    span = None if get_current_span is None else get_current_span().get_span_context()
    if span is None or not span.is_valid:
        return new_trace()
    return TraceContext(f"{span.trace_id:032x}", f"{span.span_id:016x}", bool(span.trace_flags.sampled))
