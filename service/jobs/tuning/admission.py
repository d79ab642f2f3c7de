"""Checks a request for a tuning job and makes the job's record. A refusal names the line of the job's file.

It checks operators and their shapes, what the device supports, graphs as any compile checks them, the right to send
source, and that there is a worker for the job.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ....compiler import decoding
from ....compiler.api import compiles
from ....compiler.api.tuning import kernels, operators
from ....compiler.api.tuning.jobs import (
    GraphTuneItem,
    KernelTuneItem,
    OperatorTuneItem,
    TuneItem,
    TuneJob,
    TuneRequest,
)
from ....compiler.errors import BadTuneJob, NoWorker, RequestError, SourceForbidden, Unavailable
from ....compiler.request import codec, schema
from ....compiler.request.tuning_pins import tunes
from ....compiler.tuning.records import Operand, Problem
from ...access.tokens import Grant
from ...admission.admit import Admission
from ...admission.compile_request import CompileRequest
from ...admission.saved_requests import SavedRequests
from ...compile.registry import DispatcherRegistry
from ...compile.search.task import SearchTarget
from .device_ceilings import ceilings
from .records import TuningJobProgress, TuningJobRecord

MODE = "max-autotune-no-cudagraphs"
_BODIES_BYTES = 32 << 20
_STARTING_SECONDS = 15
"""Until a client retries: a worker imports PyTorch, and one with a GPU creates its context."""


@dataclass(frozen=True)
class TuningJobAdmission:
    namespace: str
    limits: codec.Limits
    admission: Admission
    saved_requests: SavedRequests
    registry: DispatcherRegistry

    async def admit(self, request: TuneRequest, grant: Grant) -> TuningJobRecord:
        """Raises BadTuneJob, SourceForbidden, NoWorker, errors of a graph's admission, each with a line; RedisError."""
        bodies: dict[int, bytes] = {}
        requests: dict[int, schema.GraphRequest] = {}
        for n, item in enumerate(request.items):
            if isinstance(item, GraphTuneItem):
                bodies[n], requests[n] = await self._graph(_where(request, item), item)
        workers = await self.registry.workers()
        search_target = _search_target(workers, request, list(requests.values()))
        items: list[TuneItem] = []
        sources: dict[str, None] = {}
        for n, item in enumerate(request.items):
            where = _where(request, item)
            if isinstance(item, OperatorTuneItem):
                _check(where, item.problem, search_target)
                items.append(msgspec.structs.replace(item, ceiling=False))
                continue
            if isinstance(item, KernelTuneItem):
                if search_target.target.kind == "cpu":
                    raise BadTuneJob(
                        f"{where}Triton kernels are for GPUs, and this job is for a CPU", hint=_GPU
                    )
                _check_device(where, [operand for _, operand in item.kernel.tensors], search_target)
                requests[n] = kernels.request(item.kernel, search_target.toolchain, search_target.target)
                bodies[n] = codec.pack_request(requests[n])
            graph = await self._parsed(where, bodies[n])
            _check_graph(workers, where, graph, grant)
            sources |= dict.fromkeys(graph.kernels)
            if isinstance(item, GraphTuneItem):
                item = msgspec.structs.replace(item, key=graph.key)
            items.append(item)
        if sum(map(len, bodies.values())) > _BODIES_BYTES:
            raise BadTuneJob(f"the job's graphs have more than {_BODIES_BYTES} bytes", hint="Split the job")
        items += ceilings(items, list(requests.values()), search_target)
        job = TuneJob(
            id=request.id or secrets.token_hex(8),
            name=request.name,
            state="waiting",
            by=grant.name,
            created=time.time(),
            toolchain=search_target.toolchain,
            target=search_target.target,
            threads=search_target.threads,
            budget=request.budget,
            file=request.file,
            items={"waiting": len(items)},
            sources=list(sources),
        )
        return TuningJobRecord(job=job, progress=TuningJobProgress(), items=items, bodies=bodies)

    async def _graph(self, where: str, item: GraphTuneItem) -> tuple[bytes, schema.GraphRequest]:
        """The saved request of a graph, changed so that its compile tunes."""
        body = await self.saved_requests.get(item.key)
        if body is None:
            raise BadTuneJob(
                f"{where}the request of graph {item.key[:12]} is not stored",
                hint="Compile it once more, or capture it: `torchrelay capture train.py`",
            )
        return await asyncio.to_thread(_tuned, body, item, self.limits)

    async def _parsed(self, where: str, body: bytes) -> CompileRequest:
        try:
            return await self.admission.parse(body, namespace=self.namespace)
        except RequestError as error:
            raise type(error)(f"{where}{error.message}", hint=error.advice) from None


def _check_graph(
    workers: list[compiles.WorkerInfo], where: str, request: CompileRequest, grant: Grant
) -> None:
    if request.kernels and not grant.source:
        raise SourceForbidden(
            f"{where}the token of {grant.name!r} may not send source: the user-written Triton kernel "
            f"{request.kernels[0]!r}"
        )
    workers = _known(workers)
    if not any((w.toolchain, w.target) == (request.toolchain, request.target) for w in workers):
        raise NoWorker(
            f"{where}no worker has {_named(request.target)} with torch {request.toolchain.torch} and "
            f"{request.toolchain.python}; there are {_listed(workers)}"
        )


def _known(workers: list[compiles.WorkerInfo]) -> list[compiles.WorkerInfo]:
    """The workers whose devices are known. Raises Unavailable while workers start and none is known."""
    known = [worker for worker in workers if worker.state in ("idle", "busy")]
    if workers and not known and any(worker.state == "starting" for worker in workers):
        raise Unavailable(
            "no worker has started yet", hint="Try again in a minute", retry_after=_STARTING_SECONDS
        )
    return known


def _search_target(
    there: list[compiles.WorkerInfo], request: TuneRequest, requests: Sequence[schema.GraphRequest]
) -> SearchTarget:
    """The kind of worker that the job's kernels are for; a GPU where the request does not say."""
    workers = _known(there)
    where = _at(request, request.lines.get("device", request.lines.get("torch", 0)))
    fitting = [
        w
        for w in workers
        if request.device in ("", w.target.kind if w.target.kind == "cpu" else w.target.name)
        and request.torch in ("", w.toolchain.torch)
    ]
    if not fitting:
        wanted = request.device or "any device"
        with_torch = f" with torch {request.torch}" if request.torch else ""
        raise NoWorker(f"{where}no worker has {wanted}{with_torch}; there are {_listed(workers)}")
    if not request.device:
        of_graphs = [w for w in fitting if requests and w.target == requests[0].target]
        fitting = of_graphs or _with_gpu(there, fitting)
    if len({(_named(w.target), w.toolchain.torch) for w in fitting}) > 1:
        raise BadTuneJob(
            f"{where}the workers are of several kinds: {_listed(fitting)}",
            hint="Say `device:` and, if need be, `torch:`",
        )
    counts = Counter((msgspec.json.encode(w.toolchain), msgspec.json.encode(w.target)) for w in fitting)
    toolchain, target = max(counts, key=lambda kind: (counts[kind], kind))
    chosen = decoding.from_json(target, type=schema.Target)
    threads = 0
    if chosen.kind == "cpu":
        threads = _threads(request, requests, [w for w in fitting if w.target == chosen], where)
    return SearchTarget(decoding.from_json(toolchain, type=schema.Toolchain), chosen, threads)


def _with_gpu(
    there: list[compiles.WorkerInfo], fitting: list[compiles.WorkerInfo]
) -> list[compiles.WorkerInfo]:
    """The workers with a GPU, or all if no worker has one: hosts with GPUs have workers for CPUs too. Raises
    Unavailable while workers with a GPU start."""
    found = [w for w in fitting if w.target.kind != "cpu"]
    if not found and any(w.target.kind != "cpu" and w.state == "starting" for w in there):
        raise Unavailable(
            "no worker with a GPU has started yet",
            hint="Try again in a minute, or say `device: cpu`",
            retry_after=_STARTING_SECONDS,
        )
    return found or fitting


def _threads(
    request: TuneRequest,
    graphs: Sequence[schema.GraphRequest],
    workers: Sequence[compiles.WorkerInfo],
    where: str,
) -> int:
    """The number of threads in which a CPU's kernels run. Raises BadTuneJob, NoWorker."""
    threads = request.threads or next((graph.ambient.threads for graph in graphs), 0)
    if not threads:
        raise BadTuneJob(
            f"{where}a job for a CPU says in how many threads its kernels run", hint="Say `threads:`"
        )
    # a worker that does not report its processors may have any number
    most = max(worker.processors or request.threads for worker in workers)
    if request.threads > most:
        raise NoWorker(
            f"{_at(request, request.lines.get('threads', 0))}{request.threads} threads are more than any such "
            f"worker has processors ({most})",
            hint="Say `threads:`",
        )
    return threads


def _tuned(body: bytes, item: GraphTuneItem, limits: codec.Limits) -> tuple[bytes, schema.GraphRequest]:
    """The request, changed so that its compile tunes, without a tuning lock. Raises subclasses of RequestError."""
    request = codec.unpack_request(body, limits)
    mode = item.mode or (request.mode if tunes(request) else MODE)
    request = msgspec.structs.replace(request, mode=mode, tuning_lock=None)
    return codec.pack_request(request), request


def _check(where: str, problem: Problem, search_target: SearchTarget) -> None:
    try:
        operators.check(problem)
        operators.check_device(problem, search_target.target)
    except ValueError as error:
        raise BadTuneJob(f"{where}{error}") from None


_GPU = "Say `device:`, with the name of a GPU that a worker has"


def _check_device(where: str, tensors: Sequence[Operand], search_target: SearchTarget) -> None:
    """Raises BadTuneJob if the device cannot compute with a tensor's dtype."""
    for operand in tensors:
        try:
            operators.check_device(Problem("triton", (operand,), operand), search_target.target)
        except ValueError as error:
            raise BadTuneJob(f"{where}{error}") from None


def _where(request: TuneRequest, item: TuneItem) -> str:
    return _at(request, item.line)


def _at(request: TuneRequest, line: int) -> str:
    named = request.file or "the job"
    return f"{named}, line {line}: " if line else f"{named}: "


def _named(target: schema.Target) -> str:
    return target.name or target.kind


def _listed(workers: Sequence[compiles.WorkerInfo]) -> str:
    kinds = sorted({f"{_named(w.target)} with torch {w.toolchain.torch}" for w in workers})
    return "; ".join(kinds[:10]) or "no workers at all"
