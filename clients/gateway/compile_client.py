"""Stage 4, the client's side: request an artifact from the gateway's HTTP API, and receive its bytes.

POST /v1/compile answers with the artifact, or with 202; then follow_compile.py follows the compile to its end, and
the artifact is fetched. A service that forgot the compile (restarted, evicted) is asked again. Every call has a
total deadline and may overrun it by one idle timeout at the very most.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import Struct

from ...compiler import decoding
from ...compiler.api import compiles
from ...compiler.api.compiles import MissExplanation
from ...compiler.artifact.trust_document import SignedDocument
from ...compiler.errors import GatewayUnreachable, NotCached, NotFound, SchemaMismatch, ServiceError
from ...compiler.request import codec
from .connection import JSON_BYTES, HttpResponse, backoff, error_of
from .deadline import Deadline
from .follow_compile import CompileWait, OnProgress
from .http_api import QUICK_SECONDS, HttpApi

_SUBMISSIONS = 3
"""Of one graph, when the service forgets a compile it had accepted."""


class FetchResult(Struct, frozen=True, kw_only=True):
    """An artifact's bytes, not yet verified, and how they were had."""

    data: bytes
    hit: bool
    """It was there already; no compile ran for this request."""
    coalesced: bool
    """Waited for a compile that another request had started."""
    wait_seconds: float
    """From the service's acceptance to the end of the compile; 0 for a hit."""
    fetch_seconds: float
    """The rest: sending the request and receiving the artifact."""


class Readiness(Struct, frozen=True, kw_only=True):
    """Answer of /readyz. `body`: the gateway's own account of Redis and workers."""

    ready: bool
    body: dict[str, Any]


class GatewayClient(HttpApi):
    """Compiles, artifacts, and what is known of a service and its keys."""

    # --- compile -------------------------------------------------------------------------------------------

    def compile(
        self,
        body: bytes,
        key: str,
        *,
        cache_only: bool,
        deadline: float,
        on_progress: OnProgress | None = None,
    ) -> FetchResult:
        """The artifact for `body` (codec.pack_request) with key `key`, within `deadline` seconds from now.

        `cache_only` never starts a compile. Raises NotCached then; GatewayUnreachable, DeadlineExceeded,
        SchemaMismatch when the gateway computes another key, and whatever typed error the service answers.
        """
        clock = Deadline(deadline)
        start = time.monotonic()
        lost: NotFound | None = None
        for _ in range(_SUBMISSIONS):
            answer = self._submit(body, key, cache_only, clock)
            coalesced = answer.headers.get("x-torchrelay-cache", "") == "coalesced"
            if answer.status == 200:
                total = time.monotonic() - start
                return FetchResult(
                    data=answer.body, hit=True, coalesced=False, wait_seconds=0.0, fetch_seconds=total
                )
            accepted = time.monotonic()
            try:
                CompileWait(self._connection, key, clock, on_progress).run()
                waited = time.monotonic() - accepted
                data = self._connection.request(
                    "GET", f"/v1/artifacts/{key}", clock, limit=self._settings.max_response_bytes
                )
            except NotFound as error:
                lost = error
                clock.sleep(backoff(0))
                continue
            total = time.monotonic() - start
            return FetchResult(
                data=data.body,
                hit=False,
                coalesced=coalesced,
                wait_seconds=waited,
                fetch_seconds=total - waited,
            )
        raise ServiceError(f"the service accepted {key[:12]} and forgot it {_SUBMISSIONS} times: {lost}")

    def _submit(self, body: bytes, key: str, cache_only: bool, clock: Deadline) -> HttpResponse:
        path = "/v1/compile?wait=cache" if cache_only else "/v1/compile"
        headers = {"Content-Type": codec.GRAPH_MEDIA_TYPE}
        limit = self._settings.max_response_bytes
        try:
            answer = self._connection.request("POST", path, clock, content=body, headers=headers, limit=limit)
        except NotFound:
            if cache_only:
                raise NotCached(f"nobody has compiled {key[:12]} yet") from None
            raise GatewayUnreachable(f"{self._settings.url} is no torchrelay gateway") from None
        theirs = answer.headers.get("x-torchrelay-key", key)
        if theirs != key:
            raise SchemaMismatch(f"the gateway computed key {theirs[:12]}, this client {key[:12]}")
        return answer

    def artifact(self, key: str, *, deadline: float) -> bytes:
        """A published artifact's bytes, not yet verified. Raises NotFound."""
        limit = self._settings.max_response_bytes
        return self._send("GET", f"/v1/artifacts/{key}", seconds=deadline, limit=limit)

    # --- jobs and scripts ----------------------------------------------------------------------------------

    def decide(self, job: str, key: str, verdict: compiles.AgreedOutcome) -> compiles.AgreedOutcome:
        """What the job `job` (64 hex digits) agreed on for `key`: `verdict`, unless another process was first."""
        return self._call("PUT", f"/v1/jobs/{job}/{key}", compiles.AgreedOutcome, verdict)

    def used_by(self, script: str) -> compiles.ScriptArtifacts:
        """What a script (64 hex digits) used lately and the service still has, in order of use."""
        return self._call("GET", f"/v1/prefetch/{script}", compiles.ScriptArtifacts)

    def report_used(self, used: compiles.ScriptUse, *, deadline: float) -> None:
        """Have the service remember what a script used."""
        headers = {"Content-Type": "application/json"}
        self._connection.exchange(
            "POST", "/v1/prefetch", Deadline(deadline), msgspec.json.encode(used), headers, JSON_BYTES
        )

    # --- the small calls -----------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """{version, schema, namespace, key_ids, public_keys}."""
        return self._call("GET", "/v1/info", dict[str, Any])

    @property
    def trust_serial(self) -> int:
        """Serial of `trust_document` as the gateway's latest answer told it; 0 when none has."""
        return self._connection.trust_serial

    def trust_document(self) -> SignedDocument:
        """The gateway's keys, revocations and epoch, to be verified."""
        return self._call("GET", "/v1/trust", SignedDocument)

    def stats(self, namespace: str = "") -> dict[str, Any]:
        """requests, hits, misses, compiles, coalesced, failures, seconds_saved, and more: of `namespace`, or of all
        that the token may see, together and each."""
        path = f"/v1/stats?namespace={namespace}" if namespace else "/v1/stats"
        return self._call("GET", path, dict[str, Any])

    def workers(self) -> list[compiles.WorkerInfo]:
        return self._call("GET", "/v1/workers", list[compiles.WorkerInfo])

    def status(self, key: str, *, deadline: float = QUICK_SECONDS) -> compiles.CompileStatus:
        """Where a compile is. Raises NotFound."""
        return self._call("GET", f"/v1/compiles/{key}", compiles.CompileStatus, seconds=deadline)

    def explain(self, key: str) -> MissExplanation:
        """The entry nearest to a request that missed. Raises NotFound if the service does not know it."""
        return self._call("GET", f"/v1/explain/{key}", MissExplanation)

    def ready(self) -> Readiness:
        """Whether a compile would be accepted now. Raises GatewayUnreachable when nothing answers."""
        answer = self._connection.exchange("GET", "/readyz", Deadline(QUICK_SECONDS), None, {}, JSON_BYTES)
        try:
            body = decoding.from_json(answer.body, type=dict[str, Any])
        except msgspec.MsgspecError:
            body = {}
        return Readiness(ready=answer.status == 200, body=body)

    def report(self, reason: str, count: int = 1) -> None:
        """Tell the service that this client compiled locally `count` times because of error code `reason`."""
        content = msgspec.json.encode({"reason": reason, "count": count})
        headers = {"Content-Type": "application/json"}
        answer = self._connection.exchange(
            "POST", "/v1/report", Deadline(QUICK_SECONDS), content, headers, JSON_BYTES
        )
        if answer.status >= 300:
            raise error_of(answer.status, answer.body)
