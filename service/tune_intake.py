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

from ..compiler import decoding, tune_kernels, tune_operators, wire
from ..compiler.errors import BadTuneJob, NoWorker, RequestError, SourceForbidden, Unavailable
from ..compiler.pinned import tunes
from ..compiler.records import GraphItem, KernelItem, OperatorItem, TuneItem, TuneJob, TuneRequest
from ..compiler.tuning import Operand, Problem, contiguous
from .auth import Grant
from .dispatch import CompilePool
from .farm import Aim, Farm
from .intake import Ask, Intake
from .kept_requests import KeptRequests
from .tunes import Loaded

MODE = "max-autotune-no-cudagraphs"
_BODIES_BYTES = 32 << 20
_STARTING_SECONDS = 15
"""Until a client asks again: a worker imports PyTorch, and one with a GPU begins its context."""
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}
_SIDE = {"cuda": 8192, "cpu": 2048}
_SLOW_SIDE = 256
_INSTRUCTIONS = {
    "float16": {"avx512_fp16", "amx_fp16"},
    "bfloat16": {"avx512bw", "avx512_bf16", "amx_bf16"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8"},
}
"""Without any of these a CPU multiplies a dtype in a plain loop, a hundred times slower."""


class TuneIntake:
    """One namespace's batch jobs on their way in."""

    def __init__(
        self, limits: wire.Limits, intake: Intake, kept: KeptRequests, pool: CompilePool, farm: Farm
    ) -> None:
        self._limits = limits
        self._intake = intake
        self._kept = kept
        self._pool = pool
        self._farm = farm

    async def admit(self, asked: TuneRequest, grant: Grant) -> Loaded:
        """Raises BadTuneJob, SourceForbidden, NoWorker, what a graph is refused with, all with a line; RedisError."""
        bodies: dict[int, bytes] = {}
        requests: dict[int, wire.GraphRequest] = {}
        for n, item in enumerate(asked.items):
            if isinstance(item, GraphItem):
                bodies[n], requests[n] = await self._graph(_where(asked, item), item)
        aim = self._aim(asked, list(requests.values()))
        if any(isinstance(item, OperatorItem) for item in asked.items):
            self._farm.check(aim)
        items: list[TuneItem] = []
        sources: dict[str, None] = {}
        for n, item in enumerate(asked.items):
            where = _where(asked, item)
            if isinstance(item, OperatorItem):
                _check(where, item.problem, aim)
                items.append(msgspec.structs.replace(item, ceiling=False))
                continue
            if isinstance(item, KernelItem):
                if aim.target.kind == "cpu":
                    raise BadTuneJob(
                        f"{where}Triton kernels are for GPUs, and this job is for a CPU", hint=_GPU
                    )
                _check_device(where, [operand for _, operand in item.kernel.tensors], aim)
                requests[n] = tune_kernels.request(item.kernel, aim.toolchain, aim.target)
                bodies[n] = wire.pack_request(requests[n])
            ask = await self._parsed(where, bodies[n])
            self._check_graph(where, ask, grant)
            sources |= dict.fromkeys(ask.kernels)
            named = item if isinstance(item, KernelItem) else msgspec.structs.replace(item, key=ask.key)
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
        return Loaded(job=job, items=items, bodies=bodies, progress={})

    async def _graph(self, where: str, item: GraphItem) -> tuple[bytes, wire.GraphRequest]:
        """The kept request of a graph, made to tune."""
        body = await self._kept.get(item.key)
        if body is None:
            raise BadTuneJob(
                f"{where}the request of graph {item.key[:12]} is not kept",
                hint="Compile it once more, or capture it: `torchrelay capture train.py`",
            )
        return await asyncio.to_thread(_tuned, body, item, self._limits)

    async def _parsed(self, where: str, body: bytes) -> Ask:
        try:
            return await self._intake.parse(body)
        except RequestError as error:
            raise type(error)(f"{where}{error.message}", hint=error.advice) from None

    def _check_graph(self, where: str, ask: Ask, grant: Grant) -> None:
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

    def _workers(self) -> list[wire.WorkerInfo]:
        """Those that have told what they are. Raises Unavailable while none has."""
        workers = self._pool.workers()
        told = [worker for worker in workers if worker.state in ("idle", "busy")]
        if workers and not told and any(worker.state == "starting" for worker in workers):
            raise Unavailable(
                "no worker has started yet", hint="Try again in a minute", retry_after=_STARTING_SECONDS
            )
        return told

    def _aim(self, asked: TuneRequest, requests: Sequence[wire.GraphRequest]) -> Aim:
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
        aimed = decoding.from_json(target, type=wire.Target)
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
        return Aim(decoding.from_json(toolchain, type=wire.Toolchain), aimed, threads)

    def _with_gpu(self, fitting: list[wire.WorkerInfo]) -> list[wire.WorkerInfo]:
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


def _tuned(body: bytes, item: GraphItem, limits: wire.Limits) -> tuple[bytes, wire.GraphRequest]:
    """A request as it is when it tunes and nothing is pinned. Raises RequestError's children."""
    request = wire.unpack_request(body, limits)
    mode = item.mode or (request.mode if tunes(request) else MODE)
    request = msgspec.structs.replace(request, mode=mode, tuning_lock=None)
    return wire.pack_request(request), request


def _check(where: str, problem: Problem, aim: Aim) -> None:
    try:
        tune_operators.check(problem)
        tune_operators.check_device(problem, aim.target)
    except ValueError as error:
        raise BadTuneJob(f"{where}{error}") from None


_GPU = "Say `device:`, with the name of a GPU that a worker has"


def _check_device(where: str, tensors: Sequence[Operand], aim: Aim) -> None:
    """A kernel's arguments have dtypes that the device computes with."""
    for operand in tensors:
        try:
            tune_operators.check_device(Problem("triton", (operand,), operand), aim.target)
        except ValueError as error:
            raise BadTuneJob(f"{where}{error}") from None


def _where(asked: TuneRequest, item: TuneItem) -> str:
    return _at(asked, item.line)


def _at(asked: TuneRequest, line: int) -> str:
    named = asked.file or "the job"
    return f"{named}, line {line}: " if line else f"{named}: "


def _named(target: wire.Target) -> str:
    return target.name or target.kind


def _listed(workers: Sequence[wire.WorkerInfo]) -> str:
    kinds = sorted({f"{_named(w.target)} with torch {w.toolchain.torch}" for w in workers})
    return "; ".join(kinds[:10]) or "no workers at all"


# --- what the device can do at most ------------------------------------------------------------------------


def ceilings(
    items: Sequence[TuneItem], requests: Sequence[wire.GraphRequest], aim: Aim
) -> list[OperatorItem]:
    """Tasks that measure the device's ceilings beside the job's own: a large copy, and a large square product for each
    dtype and precision that the job has."""
    kind = aim.target.kind
    count = _COPY_BYTES[kind] // 4
    memory = Operand("float32", (count,), (1,))
    found = [Problem("copy", (memory,), memory)]
    wanted: dict[tuple[str, str], None] = {}
    for item in items:
        if isinstance(item, OperatorItem):
            wanted[item.problem.operands[0].dtype, dict(item.problem.settings).get("precision", "")] = None
    for request in requests:
        wanted |= dict.fromkeys(_dtypes(request))
    for dtype, precision in wanted:
        problem = _square(dtype, precision, _side(dtype, aim.target))
        if problem is not None:
            found.append(problem)
    return [
        OperatorItem(0, problem, ceiling=True) for problem in dict.fromkeys(found) if _possible(problem, aim)
    ]


def _side(dtype: str, target: wire.Target) -> int:
    if target.kind == "cpu" and dtype in _INSTRUCTIONS and not _INSTRUCTIONS[dtype] & set(target.cpu):
        return _SLOW_SIDE
    return _SIDE[target.kind] // (2 if dtype in ("float32", "float64") else 1)


def _dtypes(request: wire.GraphRequest) -> list[tuple[str, str]]:
    """Dtypes and precisions that a graph's products may have."""
    dtypes = [
        each.dtype for each in request.inputs if isinstance(each, wire.TensorInput) and len(each.shape) > 1
    ]
    dtypes += [each.dtype for each in request.ambient.autocast if each.device == request.target.kind]
    precision = request.ambient.matmul_precision
    return [(dtype, precision if dtype == "float32" else "") for dtype in dict.fromkeys(dtypes)]


def _square(dtype: str, precision: str, side: int) -> Problem | None:
    size = (side, side)
    row = Operand(dtype, size, contiguous(size))
    if dtype in tune_operators.FP8:
        one = Operand("float32", (), ())
        a = msgspec.structs.replace(row, dtype=tune_operators.FP8[0])
        b = msgspec.structs.replace(a, stride=(1, side))
        result = msgspec.structs.replace(row, dtype="bfloat16")
        return Problem("scaled_mm", (a, b, one, one), result, (("arg.use_fast_accum", "True"),))
    if dtype == "int8":
        return Problem("int_mm", (row, row), msgspec.structs.replace(row, dtype="int32"))
    if dtype not in tune_operators.FLOATS:
        return None
    return Problem("mm", (row, row), row, (("precision", precision),) if precision else ())


def _possible(problem: Problem, aim: Aim) -> bool:
    try:
        tune_operators.check(problem)
        tune_operators.check_device(problem, aim.target)
    except ValueError:
        return False
    return True
