"""Where bytes become a verified artifact, in this one place: signature, key, digests, toolchain, target, needs.

Which keys are trusted is in one file in the state folder, shared by all processes of a user: for each installation that
the user ever trusted a key of, its keys, the highest serial and epoch, and every revocation. It only grows, so that a
gateway that is impersonated cannot take back what the real one said. Trust begins with the keys in the settings;
learned keys stay trusted until these are revoked.

Imports no torch: the thread that prefetches verifies too.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from ...compiler import decoding
from ...compiler.api.runs import Outcome
from ...compiler.artifact import container, symbol_versions, trust_document
from ...compiler.artifact.container import Artifact
from ...compiler.artifact.signing import Trust, key_id, read_key
from ...compiler.artifact.trust_document import KnownKeys, ListedKey, SignedDocument
from ...compiler.errors import RelayError, SettingsError, SignatureError, ToolchainMismatch
from ...compiler.process import own_files
from ...compiler.process.fork_safe_lock import ForkSafeLock
from ...compiler.request import schema
from ..atomic_file import locked, write_atomically
from ..reports.run_report import RunReport
from ..settings import ClientSettings

if TYPE_CHECKING:
    from ..gateway.compile_client import GatewayClient

FILE = "trust.json"
_LOCK = ".trust.lock"
_STALE_SECONDS = 3600
"""A process that is served from its own disk fetches the document after this."""
Fetch = Callable[[], SignedDocument]


class VerifiedArtifact(Struct, frozen=True):
    """A verified artifact, its file, and where it came from. early: it was fetched before it was needed."""

    data: bytes
    opened: Artifact
    outcome: Outcome
    early: bool = False

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def verify(data: bytes, trust: Trust, *, key: str, request: schema.GraphRequest) -> Artifact:
    """Open an artifact that answers `request`. Raises SignatureError, ArtifactError, ToolchainMismatch, CannotLoad."""
    opened = container.verify(data, trust, key=key)
    _check_fit(opened, request)
    return opened


def _check_fit(opened: Artifact, request: schema.GraphRequest) -> None:
    """Whether a verified artifact was built for this process and this machine. Raises ToolchainMismatch, CannotLoad."""
    built = opened.manifest
    if built.toolchain != request.toolchain:
        raise ToolchainMismatch(f"artifact is for {built.toolchain}, this process is {request.toolchain}")
    if built.target != request.target:
        raise ToolchainMismatch(f"artifact is for {built.target}, this process is {request.target}")
    symbol_versions.check_needs(built.needs, symbol_versions.offered(), "this machine")


class Verifier:
    """What this process verifies with: the keys that are trusted now, as far as it has learned."""

    def __init__(self, settings: ClientSettings, report: RunReport, gateway: GatewayClient) -> None:
        self._report = report
        self._gateway = gateway
        self._may_ask = bool(settings.url)
        self._store = TrustStore(settings)

    def answers(self, data: bytes, key: str, request: schema.GraphRequest, *, kept: bool = False) -> Artifact:
        """An artifact's file as the answer to `request`. kept: it lay on this machine, and is not just received. Raises
        as `verify` does."""
        trust = self._trust(kept=kept)
        with self._report.timed("verify"):
            return verify(data, trust, key=key, request=request)

    def still_answers(self, artifact: VerifiedArtifact, request: schema.GraphRequest) -> None:
        """Whether a file that was verified before its graph came is still trusted, and fits. Raises likewise."""
        with self._report.timed("verify"):
            self._store.trust().key_for(artifact.opened.statement)
            _check_fit(artifact.opened, request)

    def signed(self, data: bytes, key: str) -> Artifact:
        """Any file of the gateway's or the disk's. Raises SignatureError, ArtifactError."""
        return container.verify(data, self._trust(kept=True), key=key)

    def _trust(self, *, kept: bool) -> Trust:
        if kept and self._may_ask:
            self._store.refresh_if_stale(self._gateway.trust_document)
        self._store.refresh_if_newer(self._gateway.trust_serial, self._gateway.trust_document)
        return self._store.trust()


# --- the keys that are trusted ---------------------------------------------------------------------------


class TrustStore:
    """Safe for threads, and for processes that share the state folder."""

    def __init__(self, settings: ClientSettings) -> None:
        """Raises SignatureError for a public key that is none."""
        try:
            keys = [ListedKey(id=key_id(read_key(text)), public=text) for text in settings.public_keys]
        except ValueError as error:
            raise SignatureError(f"a trusted public key cannot be read: {error}") from None
        self._pinned = KnownKeys(keys=keys)
        self._namespace = settings.namespace
        self._folder = settings.state_dir
        self._lock = ForkSafeLock()
        self._known = self._pinned
        self._seen: tuple[int, int] | None = None  # the file's time and inode when it was last read
        self._reread()
        self._requested = 0  # the serial that was requested last, whatever came of it
        self._refreshing: threading.Thread | None = None

    def trust(self) -> Trust:
        """The keys that are trusted now."""
        with self._lock:
            self._reread()
            return trust_document.trust(self._known, namespace=self._namespace, now=time.time())

    def refresh_if_newer(self, serial: int, fetch: Fetch) -> None:
        """Fetch the gateway's document if `serial`, from its latest answer, is newer than the known one. Never raises
        RelayError: after a failure the known document stays in force."""
        with self._lock:
            self._reread()
            if serial <= self._known.serial or serial == self._requested:
                return
            self._requested = serial
        self._fetch(fetch)

    def refresh_if_stale(self, fetch: Fetch) -> None:
        """Fetch the document in a thread, if no process on this machine has for an hour. A check in the future, from
        before the clock was set back, counts as none."""
        with self._lock:
            if self._refreshing is not None or 0 <= time.time() - self._known.checked < _STALE_SECONDS:
                return
            self._refreshing = threading.Thread(target=self._fetch, args=(fetch,), daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can start, as at exit
            self._refreshing.start()

    def learn(self, signed: SignedDocument) -> None:
        """Raises SignatureError for a document that no known key signed."""
        with self._lock:
            known = trust_document.learn(self._known, signed)
            self._known = msgspec.structs.replace(known, checked=int(time.time()))
            self._known = self._write(self._known)

    def _fetch(self, fetch: Fetch) -> None:
        try:
            self.learn(fetch())
        except RelayError as error:
            _complain(f"the gateway's list of keys could not be fetched: {error}", error.code)

    # --- the file ------------------------------------------------------------------------------------------

    def _reread(self) -> None:
        """Add what other processes have learned since the file was last read."""
        if self._folder is None:
            return
        try:
            status = (self._folder / FILE).stat()
        except OSError:
            return
        if self._seen != (seen := (status.st_mtime_ns, status.st_ino)):
            self._seen = seen
            self._known = _add(self._known, _read(self._folder / FILE))

    def _write(self, known: KnownKeys) -> KnownKeys:
        """Add to the file what this process knows; returns both together."""
        if self._folder is None:
            return known
        try:
            with locked(self._folder / _LOCK):
                recorded = _read(self._folder / FILE)
                known = _add(known, recorded)
                others = [record for record in recorded if not _same(record, known)]
                write_atomically(self._folder / FILE, msgspec.json.encode([*others, known]), synced=True)
        except OSError as error:
            _complain(f"{FILE} cannot be written: {error}; other processes learn this by themselves", FILE)
        return known


def _complain(text: str, about: str) -> None:
    from ..reports.run_report import process_report

    process_report().complain_once(text, about=f"trust {about}")


def _read(path: Path) -> list[KnownKeys]:
    """The records of all installations; none for a file that cannot be read."""
    try:
        return decoding.from_json(own_files.read_own(path, own_files.UNWRITABLE), type=list[KnownKeys])
    except FileNotFoundError:
        return []
    except (OSError, SettingsError, msgspec.MsgspecError) as error:
        _complain(f"{path} cannot be read: {error}; revocations learned before are not known", str(path))
        return []


def _add(known: KnownKeys, recorded: list[KnownKeys]) -> KnownKeys:
    """`known` with what is recorded of the same installation. A key of the settings that an installation does not list
    (another's) stays."""
    for record in recorded:
        if _same(record, known):
            known = trust_document.merge(known, record)
    return known


def _same(first: KnownKeys, second: KnownKeys) -> bool:
    """Whether two records are of one installation: they share a key."""
    return not {key.id for key in first.keys}.isdisjoint(key.id for key in second.keys)
