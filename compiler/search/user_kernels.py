"""Stage 8: chooses the configuration of each call of a user-written Triton kernel in a graph.

A call whose problem has a known winner gets it, and no other configuration is compiled. If the request tunes, unknown
problems are measured in forks of the process (user_kernel_benchmark.py) and reported; a winner counts for its own
source only (docs/decisions/0021-tuning-user-written-kernels.md). Otherwise Inductor measures them when the graph first
runs.
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
from ..graph import triton_kernels
from ..process.forked_process import CleanForkServer, ForkedProcessLost
from ..request import schema, tuning_pins
from ..torch_internals.dynamo import kernel_side_table
from ..torch_internals.dynamo.operators import all_nodes
from ..tuning import queries
from ..tuning.records import Operand, Problem, TuningEntry
from . import ranking, user_kernel_benchmark
from .compare_candidates import FAILED_LATER, search_result
from .known_winners import KnownWinners, measurement
from .user_kernel_benchmark import (
    BenchmarkStopped,
    CandidateFails,
    CandidatesRanked,
    CandidateStarted,
    KernelBenchmarkOrder,
)

log = logging.getLogger(__name__)

COMPILE_SECONDS = 120.0
RUN_SECONDS = 30.0
"""How long a benchmark may send nothing while it compiles, and during a candidate's first run; then it hangs."""
_MAX_LOST = 8
"""Forks in one search: after that the device is the cause."""


class KernelCall(Struct, frozen=True):
    """A call of a kernel with several configurations, whose arguments' sizes are known."""

    node: torch.fx.Node
    kernel: tuning_kernels.KernelSpec


class UserKernelSearch:
    """Chooses configurations for one compile. searched, recalled: problems measured by it, and known before.

    ask: sends queries to the namespace's database. fork_server: of `fork_server_for`; None: nothing is measured.
    during(problem): entered around the work on one problem. on_wait: gets the seconds of that work in which others had
    the device.
    """

    def __init__(
        self,
        request: schema.GraphRequest,
        *,
        ask: queries.SendQuery | None,
        fork_server: CleanForkServer | None,
        settings: ranking.RankingSettings,
        during: Callable[[str], AbstractContextManager[None]],
        on_wait: Callable[[float], None],
    ) -> None:
        self.searched = 0
        self.recalled = 0
        self._request = request
        self._device = request.target.kind
        self._known = KnownWinners(request, ask)
        self._fork_server = fork_server
        self._settings = settings
        self._during = during
        self._on_wait = on_wait
        self._entries: dict[Problem, TuningEntry | None] = {}
        self._uses: dict[Problem, int] = {}

    def choose(self, gm: torch.fx.GraphModule) -> None:
        """Leave each call in the graph with its winner; a graph that is rebuilt gets the same ones. Raises
        TuningUnknown."""
        self._uses.clear()
        for call in calls(gm, self._request.kernels):
            problem = tuning_kernels.problem(call.kernel)
            texts = [tuning_kernels.config_text(config) for config in call.kernel.source.configs]
            if problem not in self._entries:
                with self._during(problem.text()):
                    self._entries[problem] = self._entry(call.kernel, problem, texts)
            entry = self._entries[problem]
            if entry is not None:
                self._uses[problem] = self._uses.get(problem, 0) + 1
                _use_only(call, texts.index(entry.winner.candidate))

    def _entry(
        self, kernel: tuning_kernels.KernelSpec, problem: Problem, texts: list[str]
    ) -> TuningEntry | None:
        """None: Inductor chooses."""
        entry = self._known.among(problem, self._device, texts)
        if entry is not None:
            self.recalled += 1
        elif self._fork_server is not None:
            entry = self._measured(kernel, problem, texts, self._fork_server)
            self.searched += entry is not None
        return entry

    def measurements(self) -> list[manifest.Measurement]:
        """Each problem with its winner, for the manifest."""
        return [
            measurement(entry, entry.winner, self._uses[problem])
            for problem, entry in self._entries.items()
            if entry is not None
        ]

    def _measured(
        self,
        kernel: tuning_kernels.KernelSpec,
        problem: Problem,
        texts: list[str],
        fork_server: CleanForkServer,
    ) -> TuningEntry | None:
        """Measure and report. None: the kernel cannot be measured, or no configuration works."""
        started = time.monotonic()
        failed: dict[int, str] = {}
        ranked = self._ranked(kernel, problem, fork_server, failed)
        for candidate, why in sorted(failed.items()):
            log.warning("%s: %s %s", problem.text(), texts[candidate], why)
        if ranked is None:
            return None
        self._on_wait(ranked.waited)
        if ranked.ranking.winner is None:
            log.warning("%s: no configuration works here; Inductor will say whether one does", problem.text())
            return None
        result = search_result(
            problem,
            self._known.environment(self._device),
            texts,
            ranked.ranking,
            failed,
            clock=ranked.clock,
            started=started + ranked.waited,
        )
        return self._known.report(result, self._device, texts)

    def _ranked(
        self,
        kernel: tuning_kernels.KernelSpec,
        problem: Problem,
        fork_server: CleanForkServer,
        failed: dict[int, str],
    ) -> CandidatesRanked | None:
        """Measure in a fork; if it is lost, again in a new one without the candidate at which it was lost. Adds to
        `failed`."""
        order = KernelBenchmarkOrder(kernel, self._device, self._settings)
        started = -1

        def timeout() -> float:
            runs = started >= 0 and not order.careful  # a careful benchmark compiles what it starts
            return RUN_SECONDS if runs else COMPILE_SECONDS

        for _ in range(_MAX_LOST):
            started = -1
            order = msgspec.structs.replace(order, skip=sorted(failed))
            try:
                for message in fork_server.run(msgspec.msgpack.encode(order), timeout):
                    match decoding.from_msgpack(message, type=user_kernel_benchmark.BenchmarkMessage):
                        case CandidateStarted(candidate):
                            started = candidate
                        case CandidateFails(candidate, why):
                            failed[candidate] = why
                        case BenchmarkStopped(why):
                            log.warning("%s is not measured: %s", problem.text(), why)
                            return None
                        case CandidatesRanked(ranking=ranking) as ranked:
                            failed |= dict.fromkeys(ranking.failed, FAILED_LATER)
                            return ranked
            except ForkedProcessLost as lost:
                log.warning("%s: a process was lost at candidate %d: %s", problem.text(), started, lost)
                if started >= 0:
                    failed.setdefault(started, f"ended the process that ran it: {lost}")
                else:
                    order = msgspec.structs.replace(order, careful=True)
        log.warning("%s is not measured: %d processes were lost", problem.text(), _MAX_LOST)
        return None


@contextlib.contextmanager
def fork_server_for(request: schema.GraphRequest) -> Iterator[CleanForkServer | None]:
    """What measures a request's kernel; to be entered before the process uses a GPU. None if the request does not tune,
    if there is nothing to choose, or if it has several sources: the service accepts no reports of such a compile
    (service/compile/search/compile_queries.py)."""
    choices = any(len(kernel.configs) > 1 for kernel in request.kernels)
    sources = {tuning_kernels.source_digest(kernel) for kernel in request.kernels}
    if not choices or len(sources) != 1 or not tuning_pins.tunes(request):
        yield None
        return
    with CleanForkServer(user_kernel_benchmark.run_benchmark) as fork_server:
        yield fork_server


# --- calls in a graph -------------------------------------------------------------------------------------


def calls(gm: torch.fx.GraphModule, kernels: Sequence[schema.KernelSource]) -> Iterator[KernelCall]:
    """Those whose sizes, numbers and grids are known. kernels: those that `gm` was decoded with."""
    sources = {id(triton_kernels.build(kernel)): kernel for kernel in kernels if len(kernel.configs) > 1}
    if not sources:
        return
    for node in list(all_nodes(gm)):
        if node.op == "call_function" and "kernel_idx" in node.kwargs:
            kernel = kernel_side_table.user_kernel(int(str(node.kwargs["kernel_idx"])))
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
    kernel = tuning_kernels.KernelSpec(
        source=source,
        grids=[(grid[0], grid[1], grid[2]) for grid in grids],
        tensors=[(name, tensors[name]) for name in parameters if name in tensors],
        constants=[
            (name, triton_kernels.constant_of(name, constants[name]))
            for name in parameters
            if name in constants
        ],
    )
    return KernelCall(node, kernel)


def _operand(value: torch.Tensor) -> Operand | None:
    """None for unknown sizes, and for memory whose alignment changes how kernels are compiled."""
    size, stride, offset = tuple(value.size()), tuple(value.stride()), value.storage_offset()
    if not all(type(number) is int for number in (*size, *stride, offset)):
        return None
    if offset * value.element_size() % 16:
        return None
    return Operand(str(value.dtype).removeprefix("torch."), size, stride)


def _use_only(call: KernelCall, winner: int) -> None:
    source = msgspec.structs.replace(call.kernel.source, configs=[call.kernel.source.configs[winner]])
    call.node.kwargs = {
        **call.node.kwargs,
        "kernel_idx": kernel_side_table.register_user_kernel(triton_kernels.build(source)),
        "grid": [call.kernel.grids[winner]],
    }
    module = call.node.graph.owning_module
    if module is not None:
        module.recompile()
