"""Stage 8, for user-written Triton kernels: a graph's calls of them in; each left with the configuration that won.

A call whose problem the lock or the team's database knows takes that winner: the others are not even compiled. What
nobody knows is measured in copies of the process (user_kernel_benchmark.py) if the request tunes; else
Inductor measures it
when the graph first runs, as ever. What is measured is told: a winner counts for its own source alone (tune_kernels).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch
from msgspec import Struct

from .. import decoding
from ..api.tuning import kernels as tuning_kernels
from ..artifact import manifest
from ..errors import TuningUnknown, Unavailable
from ..forking.clean_fork_server import CleanForkServer
from ..forking.forked_process import ForkedProcessLost
from ..graph import triton_kernels
from ..graph.device_environment import device_environment
from ..request import schema, tuning_pins
from ..torch_internals.dynamo import kernel_side_table
from ..tuning import queries, records
from ..tuning.records import CandidateFailure, Operand, Problem, Timing, TuningEntry
from . import ranking, user_kernel_benchmark
from .user_kernel_benchmark import (
    BenchmarkStopped,
    CandidateFails,
    CandidatesRanked,
    CandidateStarted,
    KernelBenchmarkOrder,
)

log = logging.getLogger(__name__)

SILENT_SECONDS = 120.0
RUN_SECONDS = 30.0
"""For so long a search may be silent while it compiles, and while a candidate first runs; then it counts as hung."""
_LOSSES = 8
"""Of copies in one search: by then the device itself is to blame."""


class KernelCall(Struct, frozen=True):
    """A call of a kernel with several configurations, on arguments whose sizes are known."""

    node: torch.fx.Node
    source: schema.KernelSource
    grids: list[tuple[int, int, int]]
    tensors: list[tuple[str, Operand]]
    constants: list[tuple[str, schema.KernelConstant]]

    @property
    def problem(self) -> Problem:
        return tuning_kernels.problem_of(self.source, self.tensors, self.constants, self.grids)


class UserKernelSearch:
    """What one compile chooses. searched, recalled: calls' problems that it measured, and that were known.

    ask: the team's database. nursery: measures (user_kernel_benchmark.run_benchmark); None: nothing is
    measured. during(problem): around the work on one.
    """

    def __init__(
        self,
        request: schema.GraphRequest,
        *,
        ask: queries.SendQuery | None,
        nursery: CleanForkServer | None,
        settings: ranking.RankingSettings,
        during: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.searched = 0
        self.recalled = 0
        self._request = request
        self._ask = ask
        self._place = device_environment(
            request.toolchain, request.target, request.target.kind, request.ambient.threads
        )
        self._nursery = nursery
        self._settings = settings
        self._during = during
        self._entries: dict[Problem, TuningEntry | None] = {}
        self._uses: dict[Problem, int] = {}

    def settle(self, gm: torch.fx.GraphModule) -> None:
        """Leave each call in the graph with its winner. The same graph again, rebuilt, is left with the same ones.
        Raises TuningUnknown."""
        self._uses.clear()
        for call in calls(gm, self._request.kernels):
            problem = call.problem
            texts = [tuning_kernels.config_text(config) for config in call.source.configs]
            if problem not in self._entries:
                with self._during(problem.text()):
                    self._entries[problem] = self._entry(call, problem, texts)
            entry = self._entries[problem]
            if entry is not None:
                self._uses[problem] = self._uses.get(problem, 0) + 1
                _keep_only(call, texts.index(entry.winner.candidate))

    def _entry(self, call: KernelCall, problem: Problem, texts: list[str]) -> TuningEntry | None:
        """None: the choice is Inductor's."""
        entry = self._known(problem, texts)
        if entry is not None:
            self.recalled += 1
        elif self._nursery is not None:
            entry = self._measured(call, texts, self._nursery)
            self.searched += entry is not None
        return entry

    def measurements(self) -> list[manifest.Measurement]:
        """What was taken for each problem that was measured or known."""
        return [
            manifest.Measurement(
                problem=problem.text(),
                winner=entry.winner.candidate,
                milliseconds=entry.winner.milliseconds,
                candidates=entry.candidates,
                uses=self._uses[problem],
            )
            for problem, entry in self._entries.items()
            if entry is not None
        ]

    # --- known winners ---------------------------------------------------------------------------------

    def _known(self, problem: Problem, texts: list[str]) -> TuningEntry | None:
        lock = self._request.tuning_lock
        if lock is not None:
            for entry in lock.entries:
                if self._fits(entry, problem, texts):
                    return entry
            if lock.strict:
                raise TuningUnknown(
                    f"the tuning lock has no winner for {problem.text()} on {self._place.device}"
                )
        return self._standing(queries.EntryLookup(self._place, [problem]), problem, texts)

    def _standing(
        self, question: queries.TuningQuery, problem: Problem, texts: list[str]
    ) -> TuningEntry | None:
        if self._ask is None:
            return None
        try:
            entries = queries.entries_of(self._ask(question))
        except Unavailable as error:
            log.warning("%s: without the tuning database: %s", problem.text(), error)
            return None
        return next((entry for entry in entries if self._fits(entry, problem, texts)), None)

    def _fits(self, entry: TuningEntry, problem: Problem, texts: list[str]) -> bool:
        return entry.problem == problem and entry.place == self._place and entry.winner.candidate in texts

    # --- measured winners ------------------------------------------------------------------------------

    def _measured(self, call: KernelCall, texts: list[str], nursery: CleanForkServer) -> TuningEntry | None:
        """Measure and tell; what stands for everyone now, unless it failed here. None: it cannot be
        measured, or no configuration works."""
        begun = time.monotonic()
        problem = call.problem
        failed: dict[int, str] = {}
        ranked = self._ranked(call, nursery, failed)
        for candidate, why in sorted(failed.items()):
            log.warning("%s: %s %s", problem.text(), texts[candidate], why)
        if ranked is None:
            return None
        if ranked.winner is None:
            log.warning("%s: no configuration works here; Inductor will say whether one does", problem.text())
            return None
        timings = {candidate: _timing(texts[candidate], told) for candidate, told in ranked.timed}
        fastest = sorted(timings.values(), key=lambda timing: (timing.milliseconds, timing.candidate))
        winner = timings[ranked.winner]
        entry = TuningEntry(
            problem=problem,
            place=self._place,
            winner=winner,
            runner_up=next((timing for timing in fastest if timing is not winner), None),
            candidates=len(texts),
            failed=len(failed),
            clock=ranked.clock,
            seconds=round(time.monotonic() - begun, 3),
        )
        failures = [
            CandidateFailure(texts[candidate], why[:400]) for candidate, why in sorted(failed.items())
        ]
        found = queries.SearchResult(entry, timings=fastest, failures=failures)
        standing = self._standing(found, problem, texts)
        if standing is None or texts.index(standing.winner.candidate) in failed:
            return entry
        return standing

    def _ranked(
        self, call: KernelCall, nursery: CleanForkServer, failed: dict[int, str]
    ) -> CandidatesRanked | None:
        """A search, begun anew without the candidate at which a copy was lost; fills `failed`."""
        order = KernelBenchmarkOrder(
            source=call.source,
            grids=call.grids,
            tensors=call.tensors,
            constants=call.constants,
            device=self._request.target.kind,
            name=records.problem_digest(call.problem),
            settings=self._settings,
            skip=[],
        )
        taken = -1

        def patience() -> float:
            runs = taken >= 0 and not order.careful  # else it compiles what it takes up
            return RUN_SECONDS if runs else SILENT_SECONDS

        for _ in range(_LOSSES):
            taken = -1
            order = msgspec.structs.replace(order, skip=sorted(failed))
            try:
                for message in nursery.run(msgspec.msgpack.encode(order), patience):
                    match decoding.from_msgpack(message, type=user_kernel_benchmark.BenchmarkMessage):
                        case CandidateStarted(candidate):
                            taken = candidate
                        case CandidateFails(candidate, why):
                            failed[candidate] = why
                        case BenchmarkStopped(why):
                            log.warning("%s is not measured: %s", call.problem.text(), why)
                            return None
                        case CandidatesRanked() as ranked:
                            return ranked
            except ForkedProcessLost as lost:
                log.warning("%s: a process was lost at candidate %d: %s", call.problem.text(), taken, lost)
                if taken >= 0:
                    failed.setdefault(taken, f"ended the process that ran it: {lost}")
                else:
                    order = msgspec.structs.replace(order, careful=True)
        log.warning("%s is not measured: %d processes were lost", call.problem.text(), _LOSSES)
        return None


@contextlib.contextmanager
def fork_server_for(request: schema.GraphRequest) -> Iterator[CleanForkServer | None]:
    """What measures a request's kernel, if it tunes and the kernel has configurations to choose among and is the only
    one: of several sources in one process none is believed (service/compile/search/compile_queries.py), so
    measuring them well would be for nothing. To be entered before the process uses a GPU."""
    choices = any(len(kernel.configs) > 1 for kernel in request.kernels)
    sources = {tuning_kernels.source_digest(kernel) for kernel in request.kernels}
    if not choices or len(sources) != 1 or not tuning_pins.tunes(request):
        yield None
        return
    with CleanForkServer(user_kernel_benchmark.run_benchmark) as nursery:
        yield nursery


def _timing(candidate: str, told: ranking.SampleSummary) -> Timing:
    median, low, high = map(records.rounded, (told.median, told.low, told.high))
    return Timing(candidate, median, low, high, told.samples)


# --- calls in a graph -------------------------------------------------------------------------------------


def calls(gm: torch.fx.GraphModule, kernels: Sequence[schema.KernelSource]) -> Iterator[KernelCall]:
    """Those whose sizes, numbers and grids are all known; the kernels are those that `gm` was decoded with."""
    sources = {id(triton_kernels.build(kernel)): kernel for kernel in kernels if len(kernel.configs) > 1}
    for module in gm.modules():
        if not isinstance(module, torch.fx.GraphModule) or not sources:
            continue
        for node in list(module.graph.nodes):
            if node.op == "call_function" and "kernel_idx" in node.kwargs:
                kernel = kernel_side_table.user_kernel(node.kwargs["kernel_idx"])
                source = sources.get(id(kernel))
                call = None if source is None else _call(node, source, kernel.fn.arg_names)
                if call is not None:
                    yield call


def _call(node: torch.fx.Node, source: schema.KernelSource, parameters: Sequence[str]) -> KernelCall | None:
    given: Any = node.kwargs["kwargs"]
    constants = kernel_side_table.user_kernel_constants(int(str(node.kwargs["constant_args_idx"])))
    tensors: dict[str, Operand] = {}
    for name, argument in given.items():
        value = argument.meta.get("example_value") if isinstance(argument, torch.fx.Node) else None
        operand = _operand(value) if isinstance(value, torch.Tensor) else None
        if operand is None:
            return None
        tensors[name] = operand
    if max(len(tensors), len(constants)) > tuning_kernels.MAX_ARGUMENTS:
        return None
    grids: Any = node.kwargs["grid"]
    if not all(type(size) is int for grid in grids for size in grid) or not tensors:
        return None
    return KernelCall(
        node=node,
        source=source,
        grids=[(grid[0], grid[1], grid[2]) for grid in grids],
        tensors=[(name, tensors[name]) for name in parameters if name in tensors],
        constants=[
            (name, triton_kernels.constant_of(name, constants[name]))
            for name in parameters
            if name in constants
        ],
    )


def _operand(value: torch.Tensor) -> Operand | None:
    """None for sizes that are not known, and for memory that begins where kernels are compiled otherwise."""
    size, stride, offset = tuple(value.size()), tuple(value.stride()), value.storage_offset()
    if not all(type(number) is int for number in (*size, *stride, offset)):
        return None
    if offset * value.element_size() % 16:
        return None
    return Operand(str(value.dtype).removeprefix("torch."), size, stride)


def _keep_only(call: KernelCall, winner: int) -> None:
    source = msgspec.structs.replace(call.source, configs=[call.source.configs[winner]])
    call.node.kwargs = {
        **call.node.kwargs,
        "kernel_idx": kernel_side_table.register_user_kernel(triton_kernels.build(source)),
        "grid": [call.grids[winner]],
    }
    module = call.node.graph.owning_module
    if module is not None:
        module.recompile()
