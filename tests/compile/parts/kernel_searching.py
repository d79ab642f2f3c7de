"""One process that searches among a kernel's configurations on the CPU, in Triton's interpreter; JSON out.

Run with TRITON_INTERPRET=1: what triton.jit makes depends on the environment of the import. Interpreted kernels take as
long as Python does, but every other part is the one that a GPU has.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torchrelay.compiler import decoding
from torchrelay.compiler.api.tuning import kernels
from torchrelay.compiler.errors import TuningUnknown
from torchrelay.compiler.graph.toolchain import local_target, local_toolchain
from torchrelay.compiler.pipeline import rebuilt_graph
from torchrelay.compiler.process.forked_process import CleanForkServer
from torchrelay.compiler.request import allowed_names, schema, triton_source
from torchrelay.compiler.search import ranking, user_kernel_benchmark
from torchrelay.compiler.search import user_kernels as search_user_kernels
from torchrelay.compiler.search.user_kernels import UserKernelSearch
from torchrelay.compiler.torch_internals.dynamo.kernel_side_table import user_kernel
from torchrelay.compiler.tuning import queries, records
from torchrelay.compiler.tuning.records import Operand, contiguous

SIZE = 1000
QUICK = ranking.RankingSettings(rounds=7, most=7, seconds=5.0)
TEXT = """\
def scale(x_ptr, out_ptr, n, BLOCK: tl.constexpr, WRONG: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, 2 * x + WRONG, mask=offsets < n)
"""


def request(
    *candidates: tuple[int, int], tunes: bool = True, covers: float = 1.0, size: int = SIZE, **changes: Any
) -> schema.GraphRequest:
    """candidates: (BLOCK, WRONG) of each; covers: the share of the tensor that grids reach."""
    configs = [
        schema.KernelConfig([("BLOCK", block), ("WRONG", wrong)], 4, 3, 1, None)
        for block, wrong in candidates
    ]
    text = triton_source.module_text([], [], {"scale": TEXT})
    operand = Operand("float32", (size,), contiguous((size,)))
    kernel = kernels.KernelSpec(
        source=schema.KernelSource("scale", text, configs),
        grids=[(int(-(-size * covers // block)), 1, 1) for block, _ in candidates],
        tensors=[("x_ptr", operand), ("out_ptr", operand)],
        constants=[("n", size)],
    )
    made = kernels.request(kernel, local_toolchain(), local_target("cpu"))
    return msgspec.structs.replace(made, mode=made.mode if tunes else "default", **changes)


def two_sources() -> schema.GraphRequest:
    """Two kernels; only what is asked of it is made."""
    made = request((64, 0), (256, 0))
    other = msgspec.structs.replace(made.kernels[0], source=f"{made.kernels[0].source}#")
    return msgspec.structs.replace(made, kernels=[*made.kernels, other])


def measures(request: schema.GraphRequest) -> bool:
    with search_user_kernels.fork_server_for(request) as fork_server:
        return fork_server is not None


def dynamic() -> schema.GraphRequest:
    """The same call where nobody knows the size yet."""
    fixed = request((64, 0), (256, 0))
    grids = [schema.TupleArg([schema.Sym(f"CeilDiv(s0, {block})"), 1, 1]) for block in (64, 256)]
    call = {
        "constant_args": schema.DictArg([]),
        "grid": schema.ListArg([*grids]),
        "kernel": schema.UserKernel(0),
        "kwargs": schema.DictArg(
            [("x_ptr", schema.Ref(1)), ("out_ptr", schema.Ref(2)), ("n", schema.Ref(0))]
        ),
    }
    nodes = [schema.Node("placeholder", "", []) for _ in range(3)]
    nodes.append(schema.Node("call_function", allowed_names.TRITON_CALL, [], sorted(call.items())))
    nodes.append(schema.Node("output", "", [schema.TupleArg([])]))
    tensor = schema.TensorInput(["s0"], [1], "float32", "cpu", requires_grad=False)
    return msgspec.structs.replace(
        fixed,
        graph=schema.Graph(nodes),
        inputs=[schema.SymIntInput("s0"), tensor, tensor],
        symbols=[schema.Symbol("s0", SIZE, 2, None)],
    )


class Team:
    """A tuning database."""

    def __init__(self) -> None:
        self.entries: list[records.TuningEntry] = []
        self.asked: list[str] = []
        self.found: list[queries.SearchResult] = []

    def __call__(self, question: queries.TuningQuery) -> queries.KnownEntries:
        self.asked.append(type(question).__name__)
        if isinstance(question, queries.SearchResult):
            self.found.append(question)
            self.entries.append(question.entry)
        return queries.KnownEntries(self.entries)


def searched(
    request: schema.GraphRequest,
    team: Team | None = None,
    work: Callable[..., None] | None = None,
    times: int = 1,
) -> dict[str, Any]:
    team = team or Team()
    with contextlib.ExitStack() as stack:
        fork_server = stack.enter_context(search_user_kernels.fork_server_for(request))
        if work is not None:
            fork_server = stack.enter_context(CleanForkServer(work))
        search = UserKernelSearch(
            request,
            ask=team,
            fork_server=fork_server,
            settings=QUICK,
            during=lambda problem: contextlib.nullcontext(),
            on_wait=lambda seconds: None,
        )
        for _ in range(times):  # as where a compile begins anew
            rebuilt = rebuilt_graph.rebuild(request)
            search.choose(rebuilt.gm)
    (node,) = (node for node in rebuilt.gm.graph.nodes if "kernel_idx" in node.kwargs)
    kernel = user_kernel(node.kwargs["kernel_idx"])
    found = team.found[-1] if team.found else None
    return {
        "searched": search.searched,
        "recalled": search.recalled,
        "asked": team.asked,
        "left": [config.kwargs for config in kernel.configs],
        "grids": [
            [size if type(size) is int else str(size) for size in grid] for grid in node.kwargs["grid"]
        ],
        "entry": None if found is None else msgspec.to_builtins(found.entry),
        "timings": [] if found is None else [timing.candidate for timing in found.timings],
        "failures": [] if found is None else [(each.candidate, each.why) for each in found.failures],
        "measurements": [each.winner for each in search.measurements()],
        "uses": [each.uses for each in search.measurements()],
    }


def crashing(order: bytes, tell: Callable[[bytes], None]) -> None:
    """As user_kernel_benchmark.run_benchmark, but the second candidate's process is killed in the middle of it."""

    def said(message: bytes) -> None:
        tell(message)
        if decoding.from_msgpack(
            message, type=user_kernel_benchmark.BenchmarkMessage
        ) == user_kernel_benchmark.CandidateStarted(1):
            os.kill(os.getpid(), signal.SIGKILL)

    user_kernel_benchmark.run_benchmark(order, said)


def silently_crashing(order: bytes, tell: Callable[[bytes], None]) -> None:
    """As user_kernel_benchmark.run_benchmark, but from its second run on, the second candidate's process is killed."""
    careful = decoding.from_msgpack(order, type=user_kernel_benchmark.KernelBenchmarkOrder).careful
    told: list[user_kernel_benchmark.BenchmarkMessage] = []

    def said(message: bytes) -> None:
        tell(message)
        told.append(decoding.from_msgpack(message, type=user_kernel_benchmark.BenchmarkMessage))
        fatal = (
            told.count(user_kernel_benchmark.CandidateStarted(1)) == 2
            if careful
            else told[1:].count(user_kernel_benchmark.CandidateStarted(-1)) == 1
        )
        if (
            fatal
            and 1 not in decoding.from_msgpack(order, type=user_kernel_benchmark.KernelBenchmarkOrder).skip
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    user_kernel_benchmark.run_benchmark(order, said)


def always_lost(order: bytes, tell: Callable[[bytes], None]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def several() -> dict[str, Any]:
    return searched(
        request((16, 0), (128, 0), (1024, 0))
    )  # 63 programs, 8 and 1: the interpreter takes as long


def known() -> dict[str, Any]:
    team = Team()
    first = searched(request((64, 0), (256, 0), (1024, 0)), team)
    again = searched(request((64, 0), (256, 0), (1024, 0)), team)
    plain = searched(request((64, 0), (256, 0), (1024, 0), tunes=False), team)
    return {"first": first, "again": again, "plain": plain}


def strangers() -> dict[str, Any]:
    """Other candidates, sizes or sources are other problems."""
    team = Team()
    searched(request((64, 0), (256, 0)), team)
    return {
        "configs": searched(request((64, 0), (512, 0)), team)["searched"],
        "size": searched(request((64, 0), (256, 0), size=SIZE + 1), team)["searched"],
        "same": searched(request((256, 0), (64, 0)), team)["searched"],
    }


def lock() -> dict[str, Any]:
    team = Team()
    asked = request((64, 0), (256, 0))
    entry = searched(asked, team)["entry"]
    loser = next(
        timing for timing in team.found[0].timings if timing.candidate != entry["winner"]["candidate"]
    )
    pinned = msgspec.structs.replace(team.entries[0], winner=loser)
    locked = msgspec.structs.replace(asked, tuning_lock=schema.TuningLock(True, [pinned]))
    taken = searched(locked, Team())
    try:
        searched(msgspec.structs.replace(asked, tuning_lock=schema.TuningLock(True, [])), Team())
        error = ""
    except TuningUnknown as unknown:
        error = unknown.message
    return {"pinned": loser.candidate, "taken": taken, "error": error}


RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "several": several,
    "known": known,
    "strangers": strangers,
    "lock": lock,
    "two sources": lambda: {"measures": measures(two_sources()), "one": measures(request((64, 0), (256, 0)))},
    "dynamic": lambda: searched(dynamic()),
    "twice": lambda: searched(request((64, 0), (256, 0)), times=2),
    "twice lost": lambda: searched(request((64, 0), (256, 0)), work=always_lost, times=2),
    "default": lambda: searched(request((64, 0), (256, 0), tunes=False)),
    "wrong": lambda: searched(request((64, 0), (256, 1), (128, 0))),
    "short": lambda: searched(request((64, 0), (999, 0), (128, 0))),
    "uneven": lambda: searched(request((512, 0), (64, 0), covers=0.3)),
    "crash": lambda: searched(request((64, 0), (256, 0), (128, 0)), work=crashing),
    "late": lambda: searched(request((64, 0), (256, 0), (128, 0)), work=silently_crashing),
    "lost": lambda: searched(request((64, 0), (256, 0)), work=always_lost),
    "none": lambda: searched(request((3, 0), (5, 0))),
}

if __name__ == "__main__":
    logging.basicConfig()
    torch.set_num_threads(1)
    print(json.dumps({name: RUNS[name]() for name in sys.argv[1:] or RUNS}))
