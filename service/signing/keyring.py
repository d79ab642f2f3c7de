"""Stage 9: the installation's keys sign artifacts, and say which signatures the service and its clients trust.

One Ed25519 key signs; those before it are trusted until their overlap ends or they are revoked. ring.json says which
is which, and carries revocations, the epoch and a serial that grows with every change. All files have mode 0600. The
gateways of one installation share the folder and see each other's changes within a second. Redis never holds a
private key, and a writer to Redis changes nothing here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ...compiler import decoding
from ...compiler.artifact import container
from ...compiler.artifact.container import ArtifactFile
from ...compiler.artifact.signing import PrivateKey, key_id, key_text
from ...compiler.artifact.trust_document import ListedKey, sign_document
from ...compiler.errors import MalformedRequest, NotFound, RelayError, SettingsError, SignatureError
from ...compiler.process.own_files import UNWRITABLE, read_own
from ..storage.private_files import private_folder, write_private
from .key_files import FileKeys, KeyStore
from .trusted_keys import LoadedRing, Ring, TrustedKeys, document_of

_RING = "ring.json"
_LOCK = ".lock"
_CHECK_SECONDS = 1.0
"""How often to check for another gateway's changes."""
_WAIT_SECONDS = 0.05
"""How long a caller waits for such a check, which may be on the event loop: the folder may be on a disk that hangs."""

log = structlog.get_logger(__name__)


class _OpenRing(LoadedRing, frozen=True):
    """With the private keys, by id."""

    signers: dict[str, PrivateKey]


class Keyring(TrustedKeys):
    """The keys of a folder, with which this process signs. Safe for threads and processes.

    `sites`: other installations' public keys by id, whose artifacts may be imported. `store`: where new keys are made,
    and those are that have no file in the folder; default the folder.
    """

    def __init__(
        self,
        folder: Path,
        sites: Mapping[str, Ed25519PublicKey],
        *,
        store: KeyStore | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens the folder; makes it, and a first key, if need be. Raises SettingsError, OSError, Unavailable."""
        super().__init__(clock)
        self.folder = folder
        self._sites = sites
        self._files = FileKeys(folder)
        self._store = store or self._files
        private_folder(folder)
        with self._locked():
            if not (folder / _RING).exists():
                self._write(Ring(serial=1, epoch=0, changed=int(clock()), keys=[self._new_key()], revoked=[]))
        self._loaded = self._open(self.load_ring())
        self.next_check = time.monotonic() + _CHECK_SECONDS
        self._check: threading.Thread | None = None
        """The last check, until the next one is begun."""

    def signed_head(self, data: ArtifactFile, *, key: str, namespace: str, origin: str = "") -> bytes:
        signature = self.signature(data, key=key, namespace=namespace, origin=origin)
        return container.head_with(data, signature)

    def signature(
        self, data: ArtifactFile, *, key: str, namespace: str, origin: str = ""
    ) -> container.Signature:
        """What `signed_head` adds to an artifact. Raises as it does."""
        loaded = self._current()
        if origin:
            trust = self.import_trust()
            accepted = container.check_head(data, len(data), trust, key=key)
            if accepted.key_id != origin:
                raise SignatureError(f"artifact rests on key {accepted.key_id!r}, not {origin!r}")
        return container.make_signature(
            data,
            loaded.signers[loaded.ring.keys[-1].id],
            key=key,
            namespace=namespace,
            epoch=loaded.ring.epoch,
            signed_at=int(self._clock()),
            origin=origin,
        )

    def rotate(self, overlap_seconds: int | None) -> Ring:
        with self._locked():
            ring = self.load_ring()
            now = int(self._clock())
            until = None if overlap_seconds is None else now + overlap_seconds
            last = msgspec.structs.replace(ring.keys[-1], until=until)
            self._change(ring, keys=[*ring.keys[:-1], last, self._new_key()])
        return self.ring

    def revoke(self, name: str) -> Ring:
        with self._locked():
            ring = self.load_ring()
            if name not in self._sites and name not in {listed.id for listed in ring.keys}:
                raise NotFound(f"there is no key {name}", hint="`torchrelay keys ls` lists them")
            if name in ring.revoked:
                raise MalformedRequest(f"key {name} is revoked already", hint="Nothing needs to be done")
            keys = [*ring.keys, self._new_key()] if ring.keys[-1].id == name else ring.keys
            self._change(ring, keys=keys, revoked=sorted({*ring.revoked, name}))
        return self.ring

    def disown(self) -> Ring:
        with self._locked():
            ring = self.load_ring()
            self._change(ring, epoch=ring.epoch + 1)
        return self.ring

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _new_key(self) -> ListedKey:
        public = self._store.make().public_key()
        return ListedKey(id=key_id(public), public=key_text(public), created=int(self._clock()))

    def _change(self, ring: Ring, **changes: Any) -> None:
        ring = msgspec.structs.replace(ring, serial=ring.serial + 1, changed=int(self._clock()), **changes)
        self._write(ring)
        self._loaded = self._open(ring)

    def _write(self, ring: Ring) -> None:
        write_private(self.folder / _RING, msgspec.json.format(msgspec.json.encode(ring)) + b"\n")

    def _current(self) -> _OpenRing:
        """The loaded ring, after a check of the folder if the last one was a while ago and the folder answers."""
        if time.monotonic() >= self.next_check:
            self.next_check = time.monotonic() + _CHECK_SECONDS
            if self._check is not None and self._check.is_alive():
                if self.reachable:
                    log.error("keys_not_read", folder=str(self.folder), error="the folder does not answer")
                self.reachable = False
            else:
                self._check = threading.Thread(target=self._look, name="check the keys", daemon=True)
                self._check.start()
                self._check.join(_WAIT_SECONDS)
        return self._loaded

    def _look(self) -> None:
        try:
            ring = self.load_ring()
            if ring.serial > self._loaded.ring.serial:
                self._loaded = self._open(ring)
        except (RelayError, OSError) as error:  # it goes on with what it has
            log.error("keys_not_read", folder=str(self.folder), error=str(error))
        else:
            self.reachable = True

    def _open(self, ring: Ring) -> _OpenRing:
        signers = {listed.id: self._key(listed.id) for listed in ring.keys}
        public = {name: signer.public_key() for name, signer in signers.items()}
        document = sign_document(document_of(ring), signers.values())
        return _OpenRing(ring, public, document, self._sites, signers)

    def _key(self, name: str) -> PrivateKey:
        """A folder whose keys were files before it had another store needs both, for all keys sign the document."""
        return (self._files if self._files.has(name) else self._store).load(name)

    def load_ring(self) -> Ring:
        path = self.folder / _RING
        try:
            return decoding.from_json(read_own(path, UNWRITABLE), type=Ring)
        except msgspec.MsgspecError as error:
            raise SettingsError(f"{path} cannot be read: {error}", hint="Restore it from a backup") from None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One change at a time, over all gateways that share the folder."""
        descriptor = os.open(self.folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
