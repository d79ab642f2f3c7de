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
from ...base.worker_pools import CompilePool
from ...compile.search.queue import SearchQueue
from ...compile.search.task import SearchTarget
from .device_ceilings import ceilings
from .records import TuningJobRecord

MODE = "max-autotune-no-cudagraphs"
_BODIES_BYTES = 32 << 20
_STARTING_SECONDS = 15
"""Until a client retries: a worker imports PyTorch, and one with a GPU creates its context."""


@dataclass(frozen=True)
class TuningJobAdmission:
    """Admits the tuning jobs of one namespace."""

    limits: codec.Limits
    admission: Admission
    saved_requests: SavedRequests
    pool: CompilePool
    queue: SearchQueue

    async def admit(self, job_request: TuneRequest, grant: Grant) -> TuningJobRecord:
        """Raises BadTuneJob, SourceForbidden, NoWorker, errors of a graph's admission, each with a line; RedisError."""
        bodies: dict[int, bytes] = {}
        requests: dict[int, schema.GraphRequest] = {}
        for n, item in enumerate(job_request.items):
            if isinstance(item, GraphTuneItem):
                bodies[n], requests[n] = await self._graph(_where(job_request, item), item)
        search_target = self._search_target(job_request, list(requests.values()))
        if any(isinstance(item, OperatorTuneItem) for item in job_request.items):
            self.queue.check(search_target)
        items: list[TuneItem] = []
        sources: dict[str, None] = {}
        for n, item in enumerate(job_request.items):
            where = _where(job_request, item)
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
            request = await self._parsed(where, bodies[n])
            self._check_graph(where, request, grant)
            sources |= dict.fromkeys(request.kernels)
            named = (
                item if isinstance(item, KernelTuneItem) else msgspec.structs.replace(item, key=request.key)
            )
            items.append(named)
        if sum(map(len, bodies.values())) > _BODIES_BYTES:
            raise BadTuneJob(f"the job's graphs have more than {_BODIES_BYTES} bytes", hint="Split the job")
        items += ceilings(items, list(requests.values()), search_target)
        job = TuneJob(
            id=job_request.id or secrets.token_hex(8),
            name=job_request.name,
            state="waiting",
            by=grant.name,
            created=time.time(),
            toolchain=search_target.toolchain,
            target=search_target.target,
            threads=search_target.threads,
            budget=job_request.budget,
            file=job_request.file,
            items={"waiting": len(items)},
            sources=list(sources),
        )
        return TuningJobRecord(job=job, items=items, bodies=bodies, progress={})

    async def _graph(self, where: str, item: GraphTuneItem) -> tuple[bytes, schema.GraphRequest]:
        """The saved request of a graph, changed so that its compile tunes."""
        body = await self.saved_requests.get(item.key)
        if body is None:
            raise BadTuneJob(
                f"{where}the request of graph {item.key[:12]} is not kept",
                hint="Compile it once more, or capture it: `torchrelay capture train.py`",
            )
        return await asyncio.to_thread(_tuned, body, item, self.limits)

    async def _parsed(self, where: str, body: bytes) -> CompileRequest:
        try:
            return await self.admission.parse(body)
        except RequestError as error:
            raise type(error)(f"{where}{error.message}", hint=error.advice) from None

    def _check_graph(self, where: str, request: CompileRequest, grant: Grant) -> None:
        if request.kernels and not grant.source:
            raise SourceForbidden(
                f"{where}the token of {grant.name!r} may not send source: the user-written Triton kernel "
                f"{request.kernels[0]!r}"
            )
        workers = self._workers()
        if not any((w.toolchain, w.target) == (request.toolchain, request.target) for w in workers):
            raise NoWorker(
                f"{where}no worker has {_named(request.target)} with torch {request.toolchain.torch} and "
                f"{request.toolchain.python}; there are {_listed(workers)}"
            )

    def _workers(self) -> list[compiles.WorkerInfo]:
        """Those whose devices are known. Raises Unavailable while there is none."""
        workers = self.pool.workers()
        known = [worker for worker in workers if worker.state in ("idle", "busy")]
        if workers and not known and any(worker.state == "starting" for worker in workers):
            raise Unavailable(
                "no worker has started yet", hint="Try again in a minute", retry_after=_STARTING_SECONDS
            )
        return known

    def _search_target(
        self, job_request: TuneRequest, requests: Sequence[schema.GraphRequest]
    ) -> SearchTarget:
        """The kind of worker that the job's kernels are for; a GPU where the request does not say."""
        workers = self._workers()
        where = _at(job_request, job_request.lines.get("device", job_request.lines.get("torch", 0)))
        fitting = [
            w
            for w in workers
            if job_request.device in ("", w.target.kind if w.target.kind == "cpu" else w.target.name)
            and job_request.torch in ("", w.toolchain.torch)
        ]
        if not fitting:
            wanted = job_request.device or "any device"
            with_torch = f" with torch {job_request.torch}" if job_request.torch else ""
            raise NoWorker(f"{where}no worker has {wanted}{with_torch}; there are {_listed(workers)}")
        if not job_request.device:
            of_graphs = [w for w in fitting if requests and w.target == requests[0].target]
            fitting = of_graphs or self._with_gpu(fitting)
        if len({(_named(w.target), w.toolchain.torch) for w in fitting}) > 1:
            raise BadTuneJob(
                f"{where}the workers are of several kinds: {_listed(fitting)}",
                hint="Say `device:` and, if need be, `torch:`",
            )
        counted = Counter(
            (msgspec.json.encode(w.toolchain), msgspec.json.encode(w.target)) for w in fitting
        ).most_common()
        most = max(count for _, count in counted)
        toolchain, target = sorted(pair for pair, count in counted if count == most)[-1]
        aimed = decoding.from_json(target, type=schema.Target)
        threads = 0
        if aimed.kind == "cpu":
            threads = job_request.threads or next((r.ambient.threads for r in requests), 0)
            if not threads:
                raise BadTuneJob(
                    f"{where}a job for a CPU says in how many threads its kernels run", hint="Say `threads:`"
                )
            # a worker that does not report its processors may have any number
            most = max((w.processors or job_request.threads for w in fitting if w.target == aimed), default=0)
            if job_request.threads > most:
                raise NoWorker(
                    f"{_at(job_request, job_request.lines.get('threads', 0))}{job_request.threads} threads are more than any such "
                    f"worker has processors ({most})",
                    hint="Say `threads:`",
                )
        return SearchTarget(decoding.from_json(toolchain, type=schema.Toolchain), aimed, threads)

    def _with_gpu(self, fitting: list[compiles.WorkerInfo]) -> list[compiles.WorkerInfo]:
        """Those with a GPU, or all if no worker has one: a host with GPUs has workers for CPUs too. Raises Unavailable
        while no worker with a GPU has started."""
        found = [w for w in fitting if w.target.kind != "cpu"]
        if not found and any(w.target.kind != "cpu" and w.state == "starting" for w in self.pool.workers()):
            raise Unavailable(
                "no worker with a GPU has started yet",
                hint="Try again in a minute, or say `device: cpu`",
                retry_after=_STARTING_SECONDS,
            )
        return found or fitting


def _tuned(body: bytes, item: GraphTuneItem, limits: codec.Limits) -> tuple[bytes, schema.GraphRequest]:
    """The request, changed so that it tunes and pins nothing. Raises subclasses of RequestError."""
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


def _where(job_request: TuneRequest, item: TuneItem) -> str:
    return _at(job_request, item.line)


def _at(job_request: TuneRequest, line: int) -> str:
    named = job_request.file or "the job"
    return f"{named}, line {line}: " if line else f"{named}: "


def _named(target: schema.Target) -> str:
    return target.name or target.kind


def _listed(workers: Sequence[compiles.WorkerInfo]) -> str:
    kinds = sorted({f"{_named(w.target)} with torch {w.toolchain.torch}" for w in workers})
    return "; ".join(kinds[:10]) or "no workers at all"
