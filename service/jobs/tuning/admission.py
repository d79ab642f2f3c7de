"""A batch job as it is asked for in; the job as it is driven, or the line of its file that cannot be, out.

All is held to closed tables before the job exists: operators and their shapes, what the device lacks, graphs as any
compile's, who may send source, and that a worker for it is there.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Sequence

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
"""Until a client asks again: a worker imports PyTorch, and one with a GPU begins its context."""


class TuningJobAdmission:
    """One namespace's batch jobs on their way in."""

    def __init__(
        self,
        limits: codec.Limits,
        intake: Admission,
        kept: SavedRequests,
        pool: CompilePool,
        farm: SearchQueue,
    ) -> None:
        self._limits = limits
        self._intake = intake
        self._kept = kept
        self._pool = pool
        self._farm = farm

    async def admit(self, asked: TuneRequest, grant: Grant) -> TuningJobRecord:
        """Raises BadTuneJob, SourceForbidden, NoWorker, what a graph is refused with, all with a line; RedisError."""
        bodies: dict[int, bytes] = {}
        requests: dict[int, schema.GraphRequest] = {}
        for n, item in enumerate(asked.items):
            if isinstance(item, GraphTuneItem):
                bodies[n], requests[n] = await self._graph(_where(asked, item), item)
        aim = self._aim(asked, list(requests.values()))
        if any(isinstance(item, OperatorTuneItem) for item in asked.items):
            self._farm.check(aim)
        items: list[TuneItem] = []
        sources: dict[str, None] = {}
        for n, item in enumerate(asked.items):
            where = _where(asked, item)
            if isinstance(item, OperatorTuneItem):
                _check(where, item.problem, aim)
                items.append(msgspec.structs.replace(item, ceiling=False))
                continue
            if isinstance(item, KernelTuneItem):
                if aim.target.kind == "cpu":
                    raise BadTuneJob(
                        f"{where}Triton kernels are for GPUs, and this job is for a CPU", hint=_GPU
                    )
                _check_device(where, [operand for _, operand in item.kernel.tensors], aim)
                requests[n] = kernels.request(item.kernel, aim.toolchain, aim.target)
                bodies[n] = codec.pack_request(requests[n])
            ask = await self._parsed(where, bodies[n])
            self._check_graph(where, ask, grant)
            sources |= dict.fromkeys(ask.kernels)
            named = item if isinstance(item, KernelTuneItem) else msgspec.structs.replace(item, key=ask.key)
            items.append(named)
        if sum(map(len, bodies.values())) > _BODIES_BYTES:
            raise BadTuneJob(f"the job's graphs have more than {_BODIES_BYTES} bytes", hint="Split the job")
        items += ceilings(items, list(requests.values()), aim)
        job = TuneJob(
            id=asked.id or secrets.token_hex(8),
            name=asked.name,
            state="waiting",
            by=grant.name,
            created=time.time(),
            toolchain=aim.toolchain,
            target=aim.target,
            threads=aim.threads,
            budget=asked.budget,
            file=asked.file,
            items={"waiting": len(items)},
            sources=list(sources),
        )
        return TuningJobRecord(job=job, items=items, bodies=bodies, progress={})

    async def _graph(self, where: str, item: GraphTuneItem) -> tuple[bytes, schema.GraphRequest]:
        """The kept request of a graph, made to tune."""
        body = await self._kept.get(item.key)
        if body is None:
            raise BadTuneJob(
                f"{where}the request of graph {item.key[:12]} is not kept",
                hint="Compile it once more, or capture it: `torchrelay capture train.py`",
            )
        return await asyncio.to_thread(_tuned, body, item, self._limits)

    async def _parsed(self, where: str, body: bytes) -> CompileRequest:
        try:
            return await self._intake.parse(body)
        except RequestError as error:
            raise type(error)(f"{where}{error.message}", hint=error.advice) from None

    def _check_graph(self, where: str, ask: CompileRequest, grant: Grant) -> None:
        if ask.kernels and not grant.source:
            raise SourceForbidden(
                f"{where}the token of {grant.name!r} may not send source: the user-written Triton kernel "
                f"{ask.kernels[0]!r}"
            )
        workers = self._workers()
        if not any((w.toolchain, w.target) == (ask.toolchain, ask.target) for w in workers):
            raise NoWorker(
                f"{where}no worker has {_named(ask.target)} with torch {ask.toolchain.torch} and "
                f"{ask.toolchain.python}; there are {_listed(workers)}"
            )

    def _workers(self) -> list[compiles.WorkerInfo]:
        """Those that have told what they are. Raises Unavailable while none has."""
        workers = self._pool.workers()
        told = [worker for worker in workers if worker.state in ("idle", "busy")]
        if workers and not told and any(worker.state == "starting" for worker in workers):
            raise Unavailable(
                "no worker has started yet", hint="Try again in a minute", retry_after=_STARTING_SECONDS
            )
        return told

    def _aim(self, asked: TuneRequest, requests: Sequence[schema.GraphRequest]) -> SearchTarget:
        """What the job's kernels are for: one kind of worker that there is; a GPU, where nothing says which."""
        there = self._workers()
        where = _at(asked, asked.lines.get("device", asked.lines.get("torch", 0)))
        fitting = [
            w
            for w in there
            if asked.device in ("", w.target.kind if w.target.kind == "cpu" else w.target.name)
            and asked.torch in ("", w.toolchain.torch)
        ]
        if not fitting:
            wanted = asked.device or "any device"
            with_torch = f" with torch {asked.torch}" if asked.torch else ""
            raise NoWorker(f"{where}no worker has {wanted}{with_torch}; there are {_listed(there)}")
        if not asked.device:
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
            threads = asked.threads or next((r.ambient.threads for r in requests), 0)
            if not threads:
                raise BadTuneJob(
                    f"{where}a job for a CPU says in how many threads its kernels run", hint="Say `threads:`"
                )
            # a worker that does not tell may have any number
            most = max((w.processors or asked.threads for w in fitting if w.target == aimed), default=0)
            if asked.threads > most:
                raise NoWorker(
                    f"{_at(asked, asked.lines.get('threads', 0))}{asked.threads} threads are more than any such "
                    f"worker has processors ({most})",
                    hint="Say `threads:`",
                )
        return SearchTarget(decoding.from_json(toolchain, type=schema.Toolchain), aimed, threads)

    def _with_gpu(self, fitting: list[compiles.WorkerInfo]) -> list[compiles.WorkerInfo]:
        """Those with a GPU, or all if no worker has one: a host with GPUs has workers for CPUs too. Raises Unavailable
        while none of its GPUs can be used yet."""
        found = [w for w in fitting if w.target.kind != "cpu"]
        if not found and any(w.target.kind != "cpu" and w.state == "starting" for w in self._pool.workers()):
            raise Unavailable(
                "no worker with a GPU has started yet",
                hint="Try again in a minute, or say `device: cpu`",
                retry_after=_STARTING_SECONDS,
            )
        return found or fitting


def _tuned(body: bytes, item: GraphTuneItem, limits: codec.Limits) -> tuple[bytes, schema.GraphRequest]:
    """A request as it is when it tunes and nothing is pinned. Raises RequestError's children."""
    request = codec.unpack_request(body, limits)
    mode = item.mode or (request.mode if tunes(request) else MODE)
    request = msgspec.structs.replace(request, mode=mode, tuning_lock=None)
    return codec.pack_request(request), request


def _check(where: str, problem: Problem, aim: SearchTarget) -> None:
    try:
        operators.check(problem)
        operators.check_device(problem, aim.target)
    except ValueError as error:
        raise BadTuneJob(f"{where}{error}") from None


_GPU = "Say `device:`, with the name of a GPU that a worker has"


def _check_device(where: str, tensors: Sequence[Operand], aim: SearchTarget) -> None:
    """A kernel's arguments have dtypes that the device computes with."""
    for operand in tensors:
        try:
            operators.check_device(Problem("triton", (operand,), operand), aim.target)
        except ValueError as error:
            raise BadTuneJob(f"{where}{error}") from None


def _where(asked: TuneRequest, item: TuneItem) -> str:
    return _at(asked, item.line)


def _at(asked: TuneRequest, line: int) -> str:
    named = asked.file or "the job"
    return f"{named}, line {line}: " if line else f"{named}: "


def _named(target: schema.Target) -> str:
    return target.name or target.kind


def _listed(workers: Sequence[compiles.WorkerInfo]) -> str:
    kinds = sorted({f"{_named(w.target)} with torch {w.toolchain.torch}" for w in workers})
    return "; ".join(kinds[:10]) or "no workers at all"
