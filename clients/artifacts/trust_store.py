"""Stores a gateway's keys and revocations for all processes of a user, and makes the Trust that verifies artifacts.

One file in the state folder, shared by all processes: for each installation that the user ever trusted a key of, its
keys, the highest serial and epoch, and every revocation. It only grows, so that a gateway that is impersonated cannot
take back what the real one said. Trust begins with the keys in the settings; learned keys stay trusted until these
are revoked.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...compiler import decoding
from ...compiler.artifact import trust_document
from ...compiler.artifact.signing import Trust, read_key
from ...compiler.artifact.trust_document import KnownKeys, SignedDocument
from ...compiler.errors import RelayError, SettingsError, SignatureError
from ...compiler.process import own_files
from ...compiler.process.fork_safe_lock import ForkSafeLock
from ..atomic_file import locked, write_atomically
from ..settings import ClientSettings

FILE = "trust.json"
_LOCK = ".trust.lock"
_STALE_SECONDS = 3600
"""A process that is served from its own disk fetches the document after this."""
Fetch = Callable[[], SignedDocument]


class TrustStore:
    """Safe for threads, and for processes that share the state folder."""

    def __init__(self, settings: ClientSettings) -> None:
        """Raises SignatureError for a public key that is none."""
        try:
            keys = [read_key(text) for text in settings.public_keys]
        except ValueError as error:
            raise SignatureError(f"a trusted public key cannot be read: {error}") from None
        self._pinned = trust_document.known_from_settings(keys, settings.public_keys)
        self._namespace = settings.namespace
        self._folder = settings.state_dir
        self._lock = ForkSafeLock()
        self._known = self._pinned
        self._seen: tuple[int, int] | None = None  # the file's time and inode when it was last read
        self._reread()
        self._asked = 0  # the serial that was asked for last, whatever came of it
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
            if serial <= self._known.serial or serial == self._asked:
                return
            self._asked = serial
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
