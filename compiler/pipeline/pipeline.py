"""Stages 7 to 9: compiles a checked request into an unsigned artifact.

Runs in a new process for each compile (workers/fork_server/compile_engine.py), because it changes the process' ambient
state and Inductor's configuration and does not restore them.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from ..api import compiles
from ..artifact import container, symbol_versions
from ..artifact import manifest as artifact_manifest
from ..errors import CompileFailed, Unsupported, VerifyFailed
from ..graph.toolchain import local_target
from ..kernel_store import triton_cache
from ..kernel_store.libraries import KernelExchange
from ..request import cpu_isa as targets
from ..request import schema
from ..search import in_compile, ranking, user_kernels
from ..search.user_kernels import UserKernelSearch
from ..torch_internals import compatibility, counters, cpp, patching
from ..torch_internals.distributed import fake_process_group
from ..torch_internals.inductor import compile_fx, naming
from ..torch_internals.loading import preload as inductor_preload
from ..torch_internals.triton import caches as triton_caches
from ..torch_internals.triton import compile_workers
from ..torch_internals.triton import kernels as triton_kernels
from ..tuning import queries
from . import equal_layers, inductor, rebuilt_graph, warm_up
from .verification import outcomes, verify

log = logging.getLogger(__name__)


def preload() -> None:
    """Import all that a compile needs, without using a GPU. Called before a fork server forks."""
    inductor_preload.preload_compiler()


def compile_once(folder: Path) -> None:
    """What else a fork server does for all of its children: a small compile, with temporary files in `folder`."""
    try:
        warm_up.warm_up(folder)
    except Exception:  # a job that has the same problem reports it itself
        traceback.print_exc()


def compile_request(
    request: schema.GraphRequest,
    *,
    key: str,
    worker: str,
    workdir: Path,
    progress: Callable[[compiles.Stage, str], None],
    kernels: KernelExchange | None = None,
    ask: queries.SendQuery | None = None,
    threads: int = 0,
    settings: ranking.RankingSettings = ranking.DEFAULTS,
    lower_layers_once: bool = True,
    memory: int = 0,
) -> bytes:
    """Compile a request that validate.check_request accepted, into an unsigned artifact file (container.pack).

    workdir: a folder for this job alone. progress: called with each stage as it begins, and a detail. kernels: the
    store of kernels and measurements of earlier compiles; new ones are added. ask: queries the namespace's tuning
    database. threads: parallel C++ and Triton compilers; 0: one for each core that the process may use. settings: of
    searches. lower_layers_once: whether equal layers become calls of one subgraph (equal_layers.py); a graph for which
    that fails, or whose results then differ, is compiled as it is. memory: bytes that this process may hold, which
    verification keeps to; 0: no limit. Raises CompileFailed, Unsupported, VerifyFailed.
    """
    compatibility.check("load", "capture", "compile")
    clock = in_compile.StageClock(progress)
    benchmarks = counters.benchmarks_run()
    threads = threads or len(os.sched_getaffinity(0))
    with (
        inductor.full_gpu_is_no_failure(),
        patching.cache_folders(workdir),
        triton_cache.sharing_binaries(kernels),
        triton_caches.without_autotune_cache(),  # before Triton's compilers start
        user_kernels.fork_server_for(
            request
        ) as fork_server,  # before there are threads, and before the GPU is used
        compile_workers.compile_workers(request.target.kind, threads),
        cpp.sharing_cpp_libraries(kernels) as builds,
        triton_kernels.recording_triton_kernels(kernels) as triton,
    ):
        clock.enter("aot", "")
        own_kernels = UserKernelSearch(
            request,
            ask=ask,
            fork_server=fork_server,
            settings=settings,
            during=lambda problem: clock.during("autotune", problem),
            on_wait=lambda seconds: clock.move(seconds, "autotune", "queued"),
        )
        turns = clock.turns(None if kernels is None else kernels.store)
        search = in_compile.CompileSearch(
            request,
            ask=ask,
            settings=settings,
            cannot_run=why_not_runnable(request) or _why_not_measured(request),
            turns=turns,
            clock=clock,
        )
        with counters.timing_inside(turns["cuda"]):
            compiled = _compiled(request, own_kernels, search, threads, clock, lower_layers_once)
        # A CPU's kernels are measured above; several graphs are verified at once there.
        turn: AbstractContextManager[object] = (
            turns["cuda"] if request.target.kind == "cuda" else contextlib.nullcontext()
        )

        def exercise() -> None:
            with turn:
                verify.exercise(request, compiled.run)

        if any(kernel.configs for kernel in request.kernels):
            # Not during verification: measuring runs a kernel many times, and the kernel may change its inputs.
            clock.enter("autotune", "")
            exercise()
        with triton.descending_together() as descents:
            with turn:
                clock.enter("verify", "the first run measures kernels" if triton.undecided() else "")
                try:
                    verification = _verified(request, compiled, triton, clock, memory)
                except VerifyFailed as error:
                    if not compiled.layers:
                        raise
                    log.warning("compiled once more, layer by layer: %s", error)
                    clock.enter("aot", "layer by layer")
                    compiled = _compiled(request, own_kernels, search, threads, clock, False)
                    clock.enter("verify", "")
                    verification = _verified(request, compiled, triton, clock, memory)
                if triton.undecided() and verification.status == "skipped":
                    clock.enter("autotune", "")
                    exercise()
                descended = descents is not None and descents.waiting
                clock.enter("autotune", "coordinate descents" if descended else "")
            if descents is not None and descended:
                descents.settle(exercise)  # it builds between two runs
        if descended:  # the kernels are not the ones that were verified
            with turn:
                clock.enter("verify", "")
                verification = _verified(request, compiled, triton, clock, memory)
                clock.enter("autotune", "")
        clock.enter("publish", "")
        bundle, measured = triton_kernels.fix_winners(compiled.bundle, triton)
        waited = compiled.building.waited
        modules = {
            f"{container.TRITON}{name}": path.read_bytes() for name, path in sorted(triton.modules.items())
        }
        index, binaries = inductor.encode_libraries(compiled)
        clock.move(compiled.building.waited - waited, "publish", "inductor")
    files = {container.BUNDLE: bundle, container.LIBRARIES: index, **binaries, **modules}
    manifest = artifact_manifest.Manifest(
        schema=schema.SCHEMA,
        key=key,
        toolchain=request.toolchain,
        target=request.target,
        members=[container.member(name, data) for name, data in files.items()],
        guards=compiled.guards,
        stages=clock.seconds(),
        verification=verification,
        tuning=search.measurements() + own_kernels.measurements() + measured,
        kernels=len(binaries) + len(triton.live),
        kernels_built=builds.built + len(triton.live) - triton.reused,
        kernels_reused=builds.reused + triton.reused,
        searched=search.searched + own_kernels.searched,
        recalled=search.recalled + own_kernels.recalled,
        needs=_needs(request, [*binaries.values(), *modules.values()]),
        benchmarks=counters.benchmarks_run() - benchmarks,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        worker=worker,
    )
    return container.pack(manifest, files)


def _needs(request: schema.GraphRequest, libraries: Iterable[bytes]) -> dict[str, str]:
    """What a machine must have to load these libraries and, for a GPU, the kernels."""
    needs: dict[str, str] = {}
    for library in libraries:
        symbol_versions.merge(needs, symbol_versions.needed(library))
    if request.toolchain.cuda and request.target.kind == "cuda":
        # A driver runs the binaries of all toolkits of its own major version.
        needs[symbol_versions.CUDA] = request.toolchain.cuda.partition(".")[0] + ".0"
    return needs


def _verified(
    request: schema.GraphRequest,
    compiled: inductor.CompiledGraph,
    triton: triton_kernels.TritonKernels,
    clock: in_compile.StageClock,
    memory: int,
) -> artifact_manifest.Verification:
    """Verify. Time spent waiting for the C++ compiler counts for the inductor stage. The first run of compiled code
    counts for autotune where kernels are measured in it, which is done without verification too."""
    before, measures = compiled.building.waited, triton.undecided()
    runs: list[float] = []
    found = verify.verify(
        request,
        compiled.run,
        runnable=why_not_runnable(request) or _why_not_simulated(request, compiled.bundle),
        halves=compiled.halves,
        on_run=runs.append,
        memory=memory,
    )
    waited = compiled.building.waited - before
    measured = max(0.0, runs[0] - waited) if measures and runs else 0.0
    clock.move(waited, "verify", "inductor")
    clock.move(measured, "verify", "autotune")
    return msgspec.structs.replace(found, seconds=found.seconds - waited - measured)


def _compiled(
    request: schema.GraphRequest,
    own_kernels: UserKernelSearch,
    search: in_compile.CompileSearch,
    threads: int,
    clock: in_compile.StageClock,
    lower_layers_once: bool,
) -> inductor.CompiledGraph:
    """Compile, again where the first try does not give the result.

    A dry run is followed by a lowering that has the winners of the problems it found. If Inductor cannot generate a
    template that won, the graph is lowered once more with PyTorch's own kernels; if it cannot compile a graph whose
    equal layers are one subgraph, the graph is lowered as it is.
    """
    while True:
        rebuilt = rebuilt_graph.rebuild(request)
        own_kernels.choose(rebuilt.gm)
        search.begin()
        again = ""
        draws = bool(outcomes.random_node(rebuilt.gm))
        layers = equal_layers.outline(rebuilt, request) if lower_layers_once else 0
        try:
            with naming.restoring_graph_counters():
                compiled = inductor.compile_rebuilt(
                    rebuilt,
                    request,
                    threads=threads,
                    progress=clock.enter,
                    search=search,
                    keep_halves=draws,
                )
                return msgspec.structs.replace(compiled, layers=layers)
        except compile_fx.DryRunFinished:
            search.finish_dry_run()
        except (CompileFailed, Unsupported) as error:
            if layers and type(error) in (CompileFailed, Unsupported):
                lower_layers_once = False
                log.warning("compiled once more, layer by layer: %s", error)
                again = "layer by layer"
            elif search.in_dry_run and isinstance(error, CompileFailed):
                search.abandon_dry_run()
                log.warning("compiled without others' searches: %s", error)
            elif type(error) is CompileFailed and search.avoid_templates():
                log.warning("compiled once more without templates: %s", error)
                again = "without templates"
            else:
                raise
        clock.enter("aot", again)


def why_not_runnable(request: schema.GraphRequest) -> str:
    """Why this machine cannot run code for the request's CPU; '' if it can."""
    build = targets.target_of(request.target)
    if not build.is_native:
        return f"this worker's machine is not {build.machine}"
    missing = sorted(set(request.target.cpu) - set(local_target("cpu").cpu))
    vectors = targets.vector_sets(request.target.cpu)
    return f"this worker's CPU lacks {', '.join(missing)} ({vectors})" if missing else ""


def _why_not_measured(request: schema.GraphRequest) -> str:
    """Why kernels of its target cannot be measured; '' if they can. Searchers build for the machine's own target."""
    build = targets.target_of(request.target)
    return "" if build == targets.NATIVE else f"kernels for the target {build.name} are not measured"


def _why_not_simulated(request: schema.GraphRequest, bundle: bytes) -> str:
    """Why a fake process group cannot stand in for the other ranks in verification; '' if it can."""
    if not request.meshes:
        return ""
    name = fake_process_group.unfilled_collective(bundle)
    return f"this torch cannot simulate {name}" if name else ""
