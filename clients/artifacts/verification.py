"""Where bytes become a verified artifact, in this one place: signature, key, digests, toolchain, target, needs.

What this machine offers to an artifact's binaries is read from the C library and from the libraries that this process
has mapped: an artifact's library gets those, because torch has loaded them before. Imports no torch: the thread that
prefetches verifies too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from ...compiler.artifact import container, symbol_versions
from ...compiler.artifact.container import Artifact
from ...compiler.artifact.signing import Trust
from ...compiler.errors import CannotLoad, ToolchainMismatch
from ...compiler.request import schema
from ..gateway.compile_client import GatewayClient
from ..reports.run_report import Outcome, RunReport
from ..settings import ClientSettings
from .trust_store import TrustStore

_MAPPED = re.compile(r"\S*/lib(?:stdc\+\+|gcc_s|gomp)[-.][^/\n]*$", re.MULTILINE)
"""The libraries, beside the C library, whose versions a kernel can need."""


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
    check_needs(built.needs, offered(), "this machine")


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

    def still_answers(self, found: VerifiedArtifact, request: schema.GraphRequest) -> None:
        """Whether a file that was verified before its graph came is still trusted, and fits. Raises likewise."""
        with self._report.timed("verify"):
            self._store.trust().key_for(found.opened.statement)
            _check_fit(found.opened, request)

    def signed(self, data: bytes, key: str) -> Artifact:
        """Any file of the gateway's or the disk's. Raises SignatureError, ArtifactError."""
        return container.verify(data, self._trust(kept=True), key=key)

    def _trust(self, *, kept: bool) -> Trust:
        if kept and self._may_ask:
            self._store.refresh_if_stale(self._gateway.trust_document)
        self._store.refresh_if_newer(self._gateway.trust_serial, self._gateway.trust_document)
        return self._store.trust()


# --- what a machine offers ------------------------------------------------------------------------------


class Machine(Struct, frozen=True):
    """What a process can load. `offered`: the versions of `offered()`. `problem`: why it can load no library at all, or
    ''."""

    offered: dict[str, str]
    problem: str = ""


def check_needs(needs: Mapping[str, str], has: Mapping[str, str], where: str) -> None:
    """Raises CannotLoad, with both versions, if the machine `where` offers less than an artifact `needs`."""
    lacking = symbol_versions.lacking(needs, has)
    if lacking:
        wanted = ", ".join(f"{name} {needs[name]}" for name in lacking)
        found = ", ".join(f"{name} {has[name]}" for name in lacking)
        raise CannotLoad(
            f"the artifact was built for {wanted}, {where} has {found}",
            hint="Run the workers on a system that is no newer than this one, and remove the artifact (`torchrelay "
            "cache rm`, and from TORCHRELAY_CACHE_DIR); or use a newer system here",
        )


@functools.cache
def offered() -> dict[str, str]:
    """The version of each family (symbol_versions.py), where it can be known. Call it after torch was imported."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):  # ValueError: another C library
        _, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        found["GLIBC"] = version
    with contextlib.suppress(OSError):
        for path in set(_MAPPED.findall(Path("/proc/self/maps").read_text(errors="replace"))):
            with contextlib.suppress(OSError, ValueError):  # replaced since: the loader decides
                symbol_versions.merge(found, symbol_versions.defined(Path(path).read_bytes()))
    if (driver := _cuda_driver()) is not None:
        found[symbol_versions.CUDA] = driver
    return found


def _cuda_driver() -> str | None:
    """The latest version of CUDA that the GPU's driver supports; None without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"
