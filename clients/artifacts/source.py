"""Stages 4 and 10 together, the client's side: what this process obtains by itself, from the nearest source; loads it.

The sources in order: prefetched artifacts, this machine's disk, a baked file, the gateway. In a job of several
processes one process obtains the artifact for all (ranks/job_source.py). A graph that is yet to be compiled may run
eagerly (background.py).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

from ...compiler import errors
from ...compiler.api.runs import Outcome
from ...compiler.graph.captured_graph import CapturedGraph
from ...compiler.request import codec
from ..reports.run_report import RunReport
from ..reports.start_trace import About
from ..reports.wait_line import WaitLines
from ..settings import ClientSettings
from . import load
from .disk_cache import BakedFile, DiskCache
from .prefetch import Prefetch
from .verification import VerifiedArtifact, Verifier

if TYPE_CHECKING:
    from ..gateway.compile_client import SubmittedCompile

_UNUSABLE = (errors.ArtifactError, errors.SignatureError, errors.ToolchainMismatch)


class ArtifactRequest(Struct, frozen=True):
    """A captured graph, its canonical bytes and its key."""

    captured: CapturedGraph
    canonical: bytes
    key: str

    def with_exact_sizes(self) -> ArtifactRequest:
        """The same for no sizes but those of the example inputs."""
        from ...compiler.request.key import key_of

        request = msgspec.structs.replace(self.captured.request, exact_sizes=True)
        captured = msgspec.structs.replace(self.captured, request=request)
        canonical = codec.encode_request(request)
        return ArtifactRequest(captured, canonical, key_of(request, canonical))

    def without_inputs(self) -> ArtifactRequest:
        return msgspec.structs.replace(self, captured=self.captured.without_inputs())


class LoadedArtifact(Struct, frozen=True):
    """What a graph runs as, the key it is under, where it came from, and the artifact's file."""

    key: str
    compiled: Callable[..., Any]
    outcome: Outcome
    data: bytes
    early: bool = False
    """It was fetched before it was needed."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


A = TypeVar("A", VerifiedArtifact, LoadedArtifact)


class LocalSource:
    """Where one process obtains artifacts by itself."""

    def __init__(
        self,
        settings: ClientSettings,
        report: RunReport,
        prefetch: Prefetch | None,
        *,
        shows_waits: bool = True,
    ) -> None:
        """shows_waits: a line says what the program waits for."""
        from ..gateway.compile_client import GatewayClient

        self.settings = settings
        self.report = report
        self.gateway = GatewayClient(settings)
        self._prefetch = prefetch
        self._shows_waits = shows_waits
        self.disk = DiskCache(settings.cache_dir, settings.disk_cache_bytes)
        self._baked = None if settings.baked is None else BakedFile(settings.baked)
        self.verifier = Verifier(settings, report, self.gateway)

    @functools.cached_property
    def _waits(self) -> WaitLines:
        return WaitLines(silent=not self._shows_waits)

    def obtain(self, wanted: ArtifactRequest) -> LoadedArtifact:
        found = self.at_hand(wanted, lambda fetched: self.loaded(fetched, wanted))
        if found is None:
            with _importing_loader():
                fetched = self.answered(self.submit(wanted), wanted)
            found = self.loaded(fetched, wanted)
        return found

    def at_hand(self, wanted: ArtifactRequest, use: Callable[[VerifiedArtifact], A]) -> A | None:
        """`use` of what needs no request. Raises GatewayUnreachable if there is no gateway to send one to."""
        for source in (self._prefetched, self._stored, self._from_file):
            try:
                if (found := source(wanted)) is not None:
                    return use(found)
            except (
                errors.CannotLoad,
                errors.SizesDiffer,
            ):  # the service has the same one: do not download it again
                raise
            except _UNUSABLE:
                if source == self._from_file and not self.settings.url:
                    raise
                self.disk.remove(wanted.key)  # damaged, or signed by a key since withdrawn: ask the service
        if self._baked is not None and not self.settings.url:
            raise errors.NotCached(
                f"{self._baked.path} does not have graph {wanted.key[:12]}",
                hint="Run this script with a service, and then `torchrelay bake` again",
            )
        if not self.settings.url:
            raise errors.GatewayUnreachable("no gateway is configured")
        return None

    def _prefetched(self, wanted: ArtifactRequest) -> VerifiedArtifact | None:
        with self.report.timed("wait"):
            early = None if self._prefetch is None else self._prefetch.take(wanted.key)
        if early is not None:
            self.verifier.still_answers(early, wanted.captured.request)
        return early

    def _stored(self, wanted: ArtifactRequest) -> VerifiedArtifact | None:
        stored = self.disk.get(wanted.key)
        if stored is None:
            return None
        opened = self.verifier.answers(stored, wanted.key, wanted.captured.request, kept=True)
        return VerifiedArtifact(stored, opened, "disk_hit")

    def _from_file(self, wanted: ArtifactRequest) -> VerifiedArtifact | None:
        data = None if self._baked is None else self._baked.get(wanted.key)
        if data is None:
            return None
        opened = self.verifier.answers(data, wanted.key, wanted.captured.request, kept=True)
        return VerifiedArtifact(data, opened, "disk_hit")

    def submit(self, wanted: ArtifactRequest) -> SubmittedCompile:
        """Ask the gateway, in the caller's thread so that Ctrl-C ends the wait at once."""
        gateway = self.gateway
        submit = gateway.submit_lowering if wanted.captured.request.levels else gateway.submit
        return submit(
            codec.compress(wanted.canonical),
            wanted.key,
            cache_only=self.settings.mode == "cache",
            deadline=self.settings.deadline,
        )

    def answered(
        self, submitted: SubmittedCompile, wanted: ArtifactRequest, *, waits: bool = True
    ) -> VerifiedArtifact:
        """The gateway's artifact, on the disk from now on. waits: the program does."""
        if not waits or submitted.hit:
            answer = submitted.result()
        else:
            with self._waits.following(wanted.key) as on_progress:
                answer = submitted.result(on_progress)
        if waits:
            about: About = {"trace_id": submitted.trace_id}
            self.report.add_seconds("wait", answer.wait_seconds, ago=answer.fetch_seconds, about=about)
            self.report.add_seconds("fetch", answer.fetch_seconds, about=about)
        try:
            opened = self.verifier.answers(answer.data, wanted.key, wanted.captured.request)
        except errors.CannotLoad:  # the service has the same one: do not download it at each start
            self.disk.put(wanted.key, answer.data)
            raise
        self.disk.put(wanted.key, answer.data)
        outcome: Outcome = "hit" if answer.hit else "coalesced" if answer.coalesced else "miss"
        return VerifiedArtifact(answer.data, opened, outcome)

    def loaded(self, fetched: VerifiedArtifact, wanted: ArtifactRequest) -> LoadedArtifact:
        try:
            with self.report.timed("load"):
                compiled = load.load(fetched.opened, wanted.captured, self.settings.cache_dir)
        except (errors.CannotLoad, errors.SizesDiffer):
            raise
        except _UNUSABLE:
            self.disk.remove(wanted.key)
            raise
        compiled = self.report.first_call(wanted.key, compiled)
        return LoadedArtifact(wanted.key, compiled, fetched.outcome, fetched.data, fetched.early)

    def used(self, artifact: LoadedArtifact) -> LoadedArtifact:
        """Report that the program uses it: to the user, and for the next start of the script."""
        if artifact.early:
            self.report.count("prefetched")
        # A shared one is reported by the process that obtained it.
        if self._prefetch is not None and artifact.outcome != "shared":
            self._prefetch.used(artifact.key, early=artifact.early)
        return artifact


@contextlib.contextmanager
def _importing_loader() -> Iterator[None]:
    """Import meanwhile, in a thread, what loading an artifact needs. Where no thread can start, as at exit, loading
    imports it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):
            pool = stack.enter_context(
                concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="torchrelay")
            )
            pool.submit(load.preload)
        yield
