"""Stages 7 to 9, as one function that reads like the list: a checked request in; an unsigned artifact out.

Runs in a fresh process of its own (workers/compile_child.py): it changes the process' ambient state and
Inductor's configuration and leaves them so.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from . import (
    aot,
    artifact,
    autotune,
    inductor,
    kernel_search,
    measure,
    members,
    search,
    torch_internals,
    torch_internals_train,
    triton_store,
    tuning,
    verify,
    warm,
    wire,
)
from . import target as targets
from .errors import CompileFailed
from .kernel_search import KernelSearch
from .kernel_store import Exchange
from .toolchain import local_target

log = logging.getLogger(__name__)


class PipelineSettings(Struct, frozen=True, kw_only=True):
    threads: int = 0
    """Parallel C++ and Triton compilers; 0: as many as the process may use cores."""
    verify: verify.VerifySettings = verify.VerifySettings()
    search: measure.Settings = measure.DEFAULTS


DEFAULTS = PipelineSettings()


def preload() -> None:
    """Import all that a compile needs, and compile once; never touches a GPU. A fork server does it before it forks."""
    torch_internals.preload_compiler()
    try:
        warm.warm_up()
    except Exception:  # jobs do without: each works it out for itself, and says what is wrong
        traceback.print_exc()


def compile_request(
    request: wire.GraphRequest,
    *,
    key: str,
    worker: str,
    workdir: Path,
    progress: Callable[[wire.Stage, str], None],
    kernels: Exchange | None = None,
    ask: tuning.Ask | None = None,
    settings: PipelineSettings = DEFAULTS,
) -> bytes:
    """Compile a request that check.check has passed; returns an unsigned artifact file (artifact.pack).

    workdir: a folder of this job alone. progress: told each stage as it begins, with a detail. kernels: where
    what earlier compiles built and measured is found, and what is new laid. ask: the team's tuning database.
    Raises CompileFailed, Unsupported, VerifyFailed.
    """
    clock = _Clock(progress)
    benchmarks = torch_internals.benchmarks_run()
    threads = settings.threads or len(os.sched_getaffinity(0))
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(workdir / "inductor"),
        "TRITON_CACHE_DIR": str(workdir / "triton"),
    }
    with (
        torch_internals.environment(**caches),
        triton_store.sharing_binaries(kernels),
        torch_internals.without_tuning_caches(),  # before there are Triton's compilers
        kernel_search.nursery_for(request) as nursery,  # before there are threads, and a GPU in use
        _kernel_processes(request, threads),
        torch_internals.sharing_libraries(kernels) as builds,
        torch_internals.recording_kernels(kernels) as triton,
    ):
        clock.enter("aot", "")
        own_kernels = KernelSearch(
            request,
            ask=ask,
            nursery=nursery,
            settings=settings.search,
            during=lambda problem: clock.during("autotune", problem),
        )
        winners = search.Search(
            request,
            ask=ask,
            settings=settings.search,
            unable=_why_not_runnable(request),
            beside=None if kernels is None else kernels.store,
            clock=clock,
        )
        compiled = _compiled(request, own_kernels, winners, threads, clock)
        if any(kernel.configs for kernel in request.kernels):
            # Measuring runs a kernel many times on the memory that it may change: not while results are compared.
            clock.enter("autotune", "")
            verify.exercise(request, compiled.run, settings.verify)
        clock.enter("verify", "")
        with triton.descending_together() as descents:
            verification = _verified(request, compiled, settings.verify, clock)
            if triton.undecided() and verification.status == "skipped":
                verify.exercise(request, compiled.run, settings.verify)
            descended = descents is not None and descents.waiting
            if descents is not None and descended:
                clock.enter("autotune", "coordinate descents")
                descents.settle(lambda: verify.exercise(request, compiled.run, settings.verify))
        if descended:  # other code than was verified
            clock.enter("verify", "")
            verification = _verified(request, compiled, settings.verify, clock)
        clock.enter("autotune", "")
        bundle, measured = autotune.fix_winners(compiled.bundle, triton)
        clock.enter("publish", "")
        waited = compiled.building.waited
        modules = {
            f"{members.TRITON}{name}": path.read_bytes() for name, path in sorted(triton.modules.items())
        }
        index, binaries = inductor.encode_libraries(inductor.libraries(compiled))
        clock.move(compiled.building.waited - waited, "publish", "inductor")
    files = {members.BUNDLE: bundle, members.LIBRARIES: index, **binaries, **modules}
    manifest = wire.Manifest(
        schema=wire.SCHEMA,
        key=key,
        toolchain=request.toolchain,
        target=request.target,
        members=[artifact.member(name, data) for name, data in files.items()],
        guards=compiled.guards,
        stages=clock.seconds(),
        verification=verification,
        tuning=winners.measurements() + own_kernels.measurements() + measured,
        kernels=len(binaries) + len(triton.live),
        kernels_built=builds.built + len(triton.live) - triton.reused,
        kernels_reused=builds.reused + triton.reused,
        searched=winners.searched + own_kernels.searched,
        recalled=winners.recalled + own_kernels.recalled,
        benchmarks=torch_internals.benchmarks_run() - benchmarks,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        worker=worker,
    )
    return artifact.pack(manifest, files)


def _verified(
    request: wire.GraphRequest, compiled: inductor.Compiled, settings: verify.VerifySettings, clock: _Clock
) -> wire.Verification:
    """The C++ compiler's time is the inductor stage's, whoever had to wait for it."""
    before = compiled.building.waited
    found = verify.verify(
        request,
        compiled.run,
        settings,
        runnable=_why_not_runnable(request) or _why_not_pretended(request, compiled.bundle),
        halves=compiled.halves,
    )
    waited = compiled.building.waited - before
    clock.move(waited, "verify", "inductor")
    return msgspec.structs.replace(found, seconds=found.seconds - waited)


def _compiled(
    request: wire.GraphRequest,
    own_kernels: KernelSearch,
    winners: search.Search,
    threads: int,
    clock: _Clock,
) -> inductor.Compiled:
    """Compile; once more when all is known that the first time had others search; where Inductor cannot generate a
    template that won, once more with PyTorch's own kernels."""
    while True:
        program = aot.rebuild(request)
        own_kernels.settle(program.gm)
        winners.begin()
        again = ""
        try:
            with torch_internals.numbering_afresh():
                return inductor.compile_program(
                    program,
                    request,
                    threads=threads,
                    progress=clock.enter,
                    choose=winners.choose,
                    guide=winners,
                    keep_halves=verify.draws_random_numbers(program.gm),
                )
        except torch_internals.Scouted:
            winners.hand_over()
        except CompileFailed as error:
            if winners.scouting:
                winners.give_up_scouting()
                log.warning("compiled without others' searches: %s", error)
            elif type(error) is CompileFailed and winners.do_without_templates():
                log.warning("compiled once more without templates: %s", error)
                again = "without templates"
            else:
                raise
        clock.enter("aot", again)


@contextmanager
def _kernel_processes(request: wire.GraphRequest, threads: int) -> Iterator[None]:
    """For GPU targets, Triton's compilers: forked before the GPU is touched, gone with the job."""
    if request.target.kind != "cuda" or threads <= 1:
        yield
        return
    torch_internals.start_kernel_processes(threads)
    try:
        yield
    finally:
        torch_internals.stop_kernel_processes()


def _why_not_runnable(request: wire.GraphRequest) -> str:
    """'' if this host can run code for the request's CPU, else what it lacks."""
    missing = sorted(set(request.target.cpu) - set(local_target("cpu").cpu))
    vectors = targets.vector_sets(request.target.cpu)
    return f"this worker's CPU lacks {', '.join(missing)} ({vectors})" if missing else ""


def _why_not_pretended(request: wire.GraphRequest, bundle: bytes) -> str:
    """'' if what other ranks would bring can be pretended, so that two runs can be compared."""
    if not request.meshes:
        return ""
    name = torch_internals_train.unpretended_collective(bundle)
    return f"this torch cannot pretend {name}" if name else ""


class _Clock:
    """Tells progress and keeps each stage's seconds; a stage entered again adds up."""

    def __init__(self, progress: Callable[[wire.Stage, str], None]) -> None:
        self._progress = progress
        self._seconds: dict[str, float] = {}
        self._stage: wire.Stage | None = None
        self._detail = ""
        self._since = 0.0

    def enter(self, stage: wire.Stage, detail: str) -> None:
        self._leave()
        self._stage, self._detail, self._since = stage, detail, time.perf_counter()
        self._progress(stage, detail)

    @contextmanager
    def during(self, stage: wire.Stage, detail: str) -> Iterator[None]:
        """A stage inside another one, which goes on afterwards."""
        around = self._stage, self._detail
        self.enter(stage, detail)
        try:
            yield
        finally:
            if around[0] is not None:
                self.enter(around[0], around[1])

    def move(self, seconds: float, source: wire.Stage, target: wire.Stage) -> None:
        """Count seconds of one stage as another's."""
        self._seconds[source] = self._seconds.get(source, 0.0) - seconds
        self._seconds[target] = self._seconds.get(target, 0.0) + seconds

    def seconds(self) -> list[tuple[str, float]]:
        self._leave()
        return [(stage, round(seconds, 6)) for stage, seconds in self._seconds.items()]

    def _leave(self) -> None:
        if self._stage:
            spent = time.perf_counter() - self._since
            self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + spent
            self._stage = None
