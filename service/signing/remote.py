"""The keys of a signer, for processes that hold none: artifacts go to it over HTTP, and come back signed.

What the signer says is checked: a signature against the keys that it is known to have, its list of keys against their
own signatures and against the list before. While it cannot be reached, signing waits for some seconds, and trust stays
as it was last known.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import msgspec
import structlog

from ...compiler import VERSION, decoding
from ...compiler.api.trace_context import TRACE_HEADER
from ...compiler.artifact import container
from ...compiler.artifact.container import ArtifactFile
from ...compiler.artifact.signing import Trust, key_id, read_key
from ...compiler.artifact.trust_document import TrustDocument, signers_of
from ...compiler.errors import (
    Overloaded,
    RelayError,
    ServiceError,
    SettingsError,
    SignatureError,
    Unauthenticated,
    Unavailable,
    from_code,
)
from ...compiler.process.own_files import UNWRITABLE, read_own
from ...compiler.request import codec
from ..base.http_bodies import ErrorReply
from ..base.tracing import trace_header
from ..storage.private_files import write_private
from .key_files import read_trusted_keys
from .messages import Revocation, RingReply, Rotation
from .trusted_keys import LoadedRing, Ring, TrustedKeys, ring_of

REFRESH_SECONDS = 1.0
PATIENCE_SECONDS = 10.0
"""For so long a signer that fails is tried again, counted from its first failure: it may be restarting."""
_WAITS = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds before each further try; the last one repeats."""
_TIMEOUT = httpx2.Timeout(60.0, connect=2.0)
"""How long signing and changes may be silent: a large artifact is checked, or a writer waits for the folder's lock."""
_RING_TIMEOUT = httpx2.Timeout(5.0, connect=2.0)
_REPLY_BYTES = 1 << 20

log = structlog.get_logger(__name__)


class SignerDown(Unavailable):
    """The signer does not answer now, and may do so in a moment."""

    hint = "Start `torchrelay signer`, or correct TORCHRELAY_SERVICE_SIGNER_URL"


class RemoteKeyring(TrustedKeys):
    """Signing and the changes wait for the signer: call them in threads. All else answers from what is known."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        ca_file: Path | None = None,
        known: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`url`: http://, https:// or unix:///path. `ca_file`: certificate authorities, PEM; default the system's.
        `known`: a file of this user's, where the last list of keys is stored; while the signer is away, this starts
        with that. Without one it waits some seconds for the signer. Raises SettingsError, Unavailable."""
        super().__init__(clock)
        self._url = url
        self._http = _client(url, token, ca_file)
        self._lock = threading.Lock()
        """Held by whoever replaces `_loaded`."""
        self._ended = threading.Event()
        self._known = known
        stored = self._stored()
        patience = PATIENCE_SECONDS if stored is None else 0.0
        try:
            reply = self._ask("GET", "/v1/ring", RingReply, patience=patience, timeout=_RING_TIMEOUT)
            self._loaded = _verified(reply, None)
            self._store(reply)
        except SignerDown as error:
            if stored is None:
                self._http.close()
                raise
            self._loaded, self.reachable = stored, False
            log.error("signer_keys_not_read", signer=url, error=str(error), known=str(known))
        except SignatureError as error:
            self._http.close()
            raise Unavailable(f"the signer at {url} has no good list of keys: {error.message}") from None
        except RelayError:
            self._http.close()
            raise
        self._refresher = threading.Thread(target=self._keep_fresh, name="the signer's keys", daemon=True)
        self._refresher.start()

    def close(self) -> None:
        self._ended.set()
        self._refresher.join(1.0)  # a signer that is silent does not hold it up
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def signed_head(self, data: ArtifactFile, *, key: str, namespace: str, origin: str = "") -> bytes:
        """See the base class. Raises Unavailable too, after some seconds without a signer."""
        path = "/v1/sign?" + urlencode({"key": key, "namespace": namespace, "origin": origin})
        refusal = ""
        for _ in range(2):
            signature = self._ask("POST", path, container.Signature, data, patience=PATIENCE_SECONDS)
            try:
                return _signed(data, signature, self.trust(namespace), origin=origin)
            except SignatureError as error:
                refusal = error.message
            with suppress(SignatureError):  # the background tells of it
                self._refresh(patience=PATIENCE_SECONDS)  # the keys may have changed a moment ago
        raise Unavailable(
            f"what the signer at {self._url} signed is not used: {refusal}",
            hint="If its keys were replaced on purpose, restart what asks it",
        )

    def rotate(self, overlap_seconds: int | None) -> Ring:
        return self._change("/v1/rotate", codec.to_json(Rotation(overlap_seconds)))

    def revoke(self, name: str) -> Ring:
        return self._change("/v1/revoke", codec.to_json(Revocation(name)))

    def disown(self) -> Ring:
        return self._change("/v1/disown", b"")

    def _change(self, path: str, body: bytes) -> Ring:
        """Asked once: whether a signer that fails meanwhile has made the change, the next refresh shows."""
        self._learn("POST", path, body)
        return self.ring

    def _current(self) -> LoadedRing:
        return self._loaded

    def _keep_fresh(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            try:
                self._refresh()
            except Exception as error:  # it goes on with what it has
                if self.reachable and not self._ended.is_set():
                    log.error("signer_keys_not_read", signer=self._url, error=str(error))
                self.reachable = False
            else:
                if not self.reachable:
                    log.info("signer_keys_read_again", signer=self._url)
                self.reachable = True

    def _refresh(self, *, patience: float = 0.0) -> None:
        self._learn("GET", "/v1/ring", patience=patience, timeout=_RING_TIMEOUT)

    def _learn(self, method: str, path: str, body: bytes = b"", **options: Any) -> None:
        """Takes over the list of keys that the signer answers. Raises as `_ask`; SignatureError for one that is not
        believed."""
        before = self._loaded
        reply = self._ask(method, path, RingReply, body, **options)
        told = _verified(reply, before)
        with self._lock:
            serial = self._loaded.ring.serial
            if told.ring.serial >= serial:  # else a later answer has come first
                self._loaded = told
            if told.ring.serial > serial:
                self._store(reply)

    def _store(self, reply: RingReply) -> None:
        if self._known is not None:
            try:
                write_private(self._known, codec.to_json(reply))
            except OSError as error:
                log.warning("signer_keys_not_stored", file=str(self._known), error=str(error))

    def _stored(self) -> LoadedRing | None:
        """What `_store` wrote; None if it cannot be used."""
        if self._known is None:
            return None
        try:
            return _verified(decoding.from_json(read_own(self._known, UNWRITABLE), type=RingReply), None)
        except FileNotFoundError:
            return None
        except (OSError, SettingsError, msgspec.MsgspecError, SignatureError) as error:
            log.warning("signer_keys_not_usable", file=str(self._known), error=str(error))
            return None

    def _ask(
        self,
        method: str,
        path: str,
        type: Any,
        body: ArtifactFile = b"",
        *,
        patience: float = 0.0,
        timeout: httpx2.Timeout = _TIMEOUT,
    ) -> Any:
        """The signer's answer. `patience`: for so many seconds after a failure it is tried again. Raises the error that
        the signer answers, Unavailable."""
        failing_since, tries = None, 0
        while True:
            try:
                return _decoded(self._exchange(method, path, body, timeout), type)
            except (SignerDown, Overloaded):
                now = time.monotonic()
                failing_since = failing_since or now
                left = failing_since + patience - now
                if left <= 0 or self._ended.wait(min(left, _WAITS[min(tries, len(_WAITS) - 1)])):
                    raise
            tries += 1

    def _exchange(self, method: str, path: str, body: ArtifactFile, timeout: httpx2.Timeout) -> bytes:
        """One request, and the body of a good answer."""
        headers = {"Content-Length": str(len(body))}  # the signer makes room for so much
        if header := trace_header():
            headers[TRACE_HEADER] = header
        content = body if isinstance(body, bytes) else container.pieces(body)
        try:
            with self._http.stream(
                method, path, content=content, headers=headers, timeout=timeout
            ) as response:
                parts: list[bytes] = []
                size = 0
                for part in response.iter_raw():
                    parts.append(part)
                    size += len(part)
                    if size > _REPLY_BYTES:
                        raise ServiceError(
                            f"the signer at {self._url} answers with more than {_REPLY_BYTES} bytes"
                        )
        except httpx2.TransportError as error:
            reason = str(error) or type(error).__name__
            raise SignerDown(f"the signer at {self._url} cannot be reached: {reason}") from None
        if response.is_success:
            return b"".join(parts)
        raise self._error(response.status_code, b"".join(parts))

    def _error(self, status: int, body: bytes) -> RelayError:
        try:
            told = decoding.from_json(body, type=ErrorReply).error
        except msgspec.MsgspecError:
            kind = SignerDown if status in (502, 503, 504) else ServiceError
            return kind(f"the signer at {self._url} answers HTTP {status}")
        error = from_code(told.code, told.message, told.hint)
        if isinstance(error, Unauthenticated):  # not the fault of who asks this process
            return Unavailable(f"the signer at {self._url} refuses: {error.message}", hint=error.advice)
        return error


def _client(url: str, token: str, ca_file: Path | None) -> httpx2.Client:
    headers = {
        "Authorization": f"Bearer {token}",
        "User-Agent": f"torchrelay/{VERSION}",
        "Accept-Encoding": "identity",
    }
    path = url.removeprefix("unix://")
    if path != url:
        if not path.startswith("/"):
            raise SettingsError(f"the signer's URL {url} names no absolute path", hint="unix:///path")
        transport = httpx2.HTTPTransport(uds=path)
        return httpx2.Client(base_url="http://signer", headers=headers, transport=transport, trust_env=False)
    if not url.startswith(("http://", "https://")):
        raise SettingsError(
            f"the signer's URL {url} cannot be used", hint="http://, https:// or unix:///path"
        )
    verify: ssl.SSLContext | bool = False
    if url.startswith("https://"):
        try:
            verify = ssl.create_default_context(cafile=ca_file)
        except OSError as error:
            raise SettingsError(
                f"the certificates in {ca_file} cannot be read: {error.strerror or error}",
                hint="Correct TORCHRELAY_SERVICE_SIGNER_CA_FILE: certificates in PEM",
            ) from None
    return httpx2.Client(base_url=url, headers=headers, verify=verify, trust_env=False)


def _decoded(body: bytes, type: Any) -> Any:
    try:
        return decoding.from_json(body, type=type)
    except msgspec.MsgspecError as error:
        raise ServiceError(f"the signer's answer is no {type.__name__}: {error}") from None


def _signed(data: ArtifactFile, signature: container.Signature, trust: Trust, *, origin: str) -> bytes:
    """The artifact's head with the signature, which must be good. Raises SignatureError, ArtifactError."""
    statement = signature.statement
    if (statement.namespace, statement.origin) != (trust.namespace, origin):
        raise SignatureError(f"it is for namespace {statement.namespace!r} with origin {statement.origin!r}")
    return container.head_with(data, signature, trust)


def _verified(reply: RingReply, before: LoadedRing | None) -> LoadedRing:
    """The ring in a signer's answer. Each of its keys must have signed it; one that was
    there before must be there still; and it must not be older. Raises SignatureError."""
    signed = reply.trust
    try:
        document = decoding.from_msgpack(signed.document, type=TrustDocument)
        public = {listed.id: read_key(listed.public) for listed in document.keys}
        sites = read_trusted_keys(",".join(reply.sites))
        if not public or any(key_id(key) != name for name, key in public.items()):
            raise ValueError("a key is missing, or has another id")
        missing = public.keys() - signers_of(signed, document.keys)
    except (ValueError, SettingsError) as error:
        raise SignatureError(f"the signer's list of keys cannot be read: {error}") from None
    if missing:
        raise SignatureError(f"the signer's list of keys is not signed by {', '.join(sorted(missing))}")
    if before is not None:
        if not before.public.keys() & public.keys():
            raise SignatureError(
                "the signer has none of its keys of before",
                hint="If they were replaced on purpose, restart what asks it",
            )
        if document.serial < before.ring.serial:
            raise SignatureError(
                f"the signer's list of keys has serial {document.serial}, and had {before.ring.serial}",
                hint="If a backup was restored on purpose, restart what asks it",
            )
    return LoadedRing(ring_of(document), public, signed, sites)
