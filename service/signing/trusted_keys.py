"""Which keys the installation has, and whose signatures count: what everyone may know of its keys.

keyring.py reads it from the folder of private keys, remote.py gets it from the signer.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Struct

from ...compiler.artifact import container
from ...compiler.artifact.container import ArtifactFile
from ...compiler.artifact.signing import Trust
from ...compiler.artifact.trust_document import ListedKey, SignedDocument, TrustDocument


class Ring(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The installation's keys, as ring.json holds them. The last of `keys` signs."""

    serial: int
    epoch: int
    changed: int
    """Seconds since 1970."""
    keys: list[ListedKey]
    revoked: list[str]


def document_of(ring: Ring) -> TrustDocument:
    """What clients are told of a ring."""
    return TrustDocument(
        serial=ring.serial, epoch=ring.epoch, issued=ring.changed, keys=ring.keys, revoked=ring.revoked
    )


def ring_of(document: TrustDocument) -> Ring:
    return Ring(
        serial=document.serial,
        epoch=document.epoch,
        changed=document.issued,
        keys=document.keys,
        revoked=document.revoked,
    )


class LoadedRing(Struct, frozen=True):
    """A ring with its public keys by id, the document that tells clients of it, and other sites' keys by id."""

    ring: Ring
    public: Mapping[str, Ed25519PublicKey]
    document: SignedDocument
    sites: Mapping[str, Ed25519PublicKey]


T = TypeVar("T")

_THREADS = max(4, len(os.sched_getaffinity(0)))


class TrustedKeys(ABC):
    """Signs artifacts, changes the keys, and says which signatures count. Safe for threads. What it says of trust it
    says at once, without waiting for anything."""

    reachable = True
    """Whether it can sign now, as far as is known."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sign")
        """Its own, so that nothing but signing waits for a signer that is silent."""

    async def in_thread(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Signs, or changes the keys, without stopping the event loop. `call`: a method of this object."""
        context = contextvars.copy_context()
        run = partial(context.run, call, *arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    @abstractmethod
    def _current(self) -> LoadedRing:
        """The ring as it is now, or was up to about a second ago."""

    @property
    def current(self) -> str:
        """Id of the key that signs now."""
        return self.ring.keys[-1].id

    @property
    def public(self) -> list[Ed25519PublicKey]:
        """Keys that clients are to trust, the current one first."""
        return list(self.trust("").keys.values())[::-1]

    @property
    def ring(self) -> Ring:
        return self._current().ring

    def trust(self, namespace: str) -> Trust:
        """What may be served in `namespace`: signed by this installation."""
        loaded, now = self._current(), self._clock()
        ring, revoked = loaded.ring, frozenset(loaded.ring.revoked)
        counting = [k.id for k in ring.keys if k.id not in revoked and (k.until is None or now < k.until)]
        keys = {name: loaded.public[name] for name in counting}
        return Trust(keys=keys, namespace=namespace, epoch=ring.epoch, revoked=revoked)

    def import_trust(self) -> Trust:
        """What may be imported: signed by this installation in any namespace, or by a site that it trusts."""
        return msgspec.structs.replace(self.trust(""), sites=self._current().sites)

    def vouches_for(self, origin: str) -> bool:
        """Whether an artifact that was imported because `origin` had signed it may still be served."""
        loaded = self._current()
        return origin not in loaded.ring.revoked and (origin in loaded.sites or origin in loaded.public)

    def document(self) -> SignedDocument:
        return self._current().document

    def sign(self, data: bytes, *, key: str, namespace: str, origin: str = "") -> bytes:
        """An artifact with this installation's signature added. Arguments and errors: of `signed_head`."""
        head = self.signed_head(data, key=key, namespace=namespace, origin=origin)
        return container.with_head(data, head)

    @abstractmethod
    def signed_head(self, data: ArtifactFile, *, key: str, namespace: str, origin: str = "") -> bytes:
        """What stands before an artifact's members once this installation's signature is added. `origin`: the key whose
        signature it rests on, of an import. Raises ArtifactError if it is damaged, SignatureError if `origin` is not
        trusted or did not sign it."""

    @abstractmethod
    def rotate(self, overlap_seconds: int | None) -> Ring:
        """A new key signs from now on. What the last one signed counts for `overlap_seconds` more; None: for good."""

    @abstractmethod
    def revoke(self, name: str) -> Ring:
        """From now on nothing counts that the key signed, or that was imported because of its signature. If it is the
        current key, a new one signs. Raises NotFound for an unknown id, MalformedRequest for a revoked one."""

    @abstractmethod
    def disown(self) -> Ring:
        """Raises the epoch: no signature made until now counts any more."""

    @abstractmethod
    def close(self) -> None:
        """Ends what runs in the background."""
