"""A searcher on a GPU: products, convolutions and fp8 rebuilt from their texts; candidates that hang or break it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torchrelay.compiler.graph.toolchain import local_toolchain
from torchrelay.compiler.request.schema import Target
from torchrelay.compiler.search import ranking, search_worker
from torchrelay.compiler.tuning.queries import TuningTask

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "compile" / "search"))
from searching import Told, search
from test_searcher import described
from test_tuning import PROGRAMS, matrix, requested
from tuned import Worker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

FLEX = "bf16[2,8,512,64]"
TASKS = [
    described("bf16", "mm(bf16[512,256], bf16[256,384]) -> bf16[512,384]"),
    described("tf32", "mm(f32[512,256], f32[256,384]) -> f32[512,384]", precision="high"),
    described("ieee", "mm(f32[512,256], f32[256,384]) -> f32[512,384]", precision="highest"),
    described("ragged", "mm(bf16[1000,1003], bf16[1003,517]) -> bf16[1000,517]"),
    described("bias", "addmm(bf16[384], bf16[512,256], bf16[256,384]) -> bf16[512,384]"),
    described("bmm", "bmm(f16[8,128,64], f16[8,64,128]) -> f16[8,128,128]"),
    described(
        "conv", "convolution(f16[8,64,28,28], f16[64,64,3,3]) -> f16[8,64,28,28]", arg__padding="(1, 1)"
    ),
    described("int8", "int_mm(i8[64,32], i8[32,64]:1,32) -> i32[64,64]"),
    described("fp8", "scaled_mm(f8e4m3[512,256], f8e4m3[256,384]:1,256, f32[], f32[]) -> bf16[512,384]"),
    described("grouped", "grouped_mm(bf16[512,256], bf16[4,256,384]:98304,1,256, i32[4]) -> bf16[512,384]"),
    described("flex", f"flex_attention({FLEX}, {FLEX}, {FLEX}) -> {FLEX}", mask="causal"),
    described("window", f"flex_attention({FLEX}, {FLEX}, {FLEX}) -> {FLEX}", mask="window:128"),
    described("copy", "copy(bf16[1024,1024,64]) -> bf16[1024,1024,64]"),
]


def gpu() -> Target:
    """The GPU of this machine, found out without touching it in this process more than the tests do."""
    from torchrelay.compiler.graph.toolchain import local_target

    return local_target("cuda")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    told = search(TASKS, gpu(), local_toolchain(), tmp_path_factory.mktemp("store"), threads=0)
    print(told.log[-4000:])
    for name, found in told.found().items():
        print(name, f"{found.entry.seconds:.1f} s", found.entry.problem.text())
        for timing in found.timings[:3]:
            print("   ", timing)
        print("    failures:", len(found.failures), *[f.why[:100] for f in found.failures[:2]])
    print(told.unfit())
    return told


def test_every_task_is_searched(told: Told) -> None:
    assert told.status == 0, told.log[-4000:]
    assert told.unfit() == {}
    assert told.found().keys() == {task.id for task in TASKS}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_a_winner_is_right_and_no_slower_than_pytorchs_own(told: Told, task: TuningTask) -> None:
    found = told.found()[task.id]
    entry = found.entry
    assert entry.place.device == torch.cuda.get_device_name() and entry.clock
    assert set(told.tried(task.id)) >= {timing.candidate for timing in found.timings}
    if task.problem.op == "flex_attention":  # PyTorch's own is no candidate
        assert entry.candidates > 3 and entry.winner.candidate.startswith("triton_flex_attention")
        return
    assert entry.aten is not None and entry.default is not None
    assert entry.winner.milliseconds <= entry.aten.milliseconds * 1.05
    if task.id not in ("copy", "fp8", "grouped", "int8"):
        assert entry.candidates > 3 and entry.error is not None and entry.error < 0.05


def test_times_are_what_events_say_of_kernels_that_follow_each_other(told: Told) -> None:
    """A copy of 128 MiB takes what the device's memory takes: no launch or wait is in it."""
    entry = told.found()["copy"].entry
    moved = 2 * 2 * 1024 * 1024 * 64
    rate = moved / (entry.winner.milliseconds * 1e-3)
    assert 0.5e12 < rate < 10e12, rate
    assert entry.winner.high <= entry.winner.low * 1.2


@pytest.mark.parametrize(
    "fault, words", [("hangs", "did not come back"), ("breaks", "cannot be used any more")]
)
def test_a_candidate_that_hangs_or_breaks_the_gpu_ends_the_process_and_is_known(
    tmp_path: Path, fault: str, words: str
) -> None:
    short = ranking.RankingSettings(seconds=0.5)
    task = TASKS[0]
    told = search([task], gpu(), local_toolchain(), tmp_path, threads=0, settings=short, fault=fault)
    assert told.status == search_worker.BROKEN_DEVICE_EXIT, told.log[-2000:]
    assert words in told.log
    last = told.tried(task.id)[-1]
    assert last.startswith("triton_")
    templates = [name for name in _candidates(tmp_path / "again", task) if name.startswith("triton_")]
    again = TuningTask(id="b", problem=task.problem, exact=False, avoid=tuple(templates))
    spared = search([again], gpu(), local_toolchain(), tmp_path, threads=0, settings=short, fault=fault)
    assert spared.status == 0, spared.log[-2000:]
    assert spared.found()["b"].entry.winner.candidate.startswith("aten ")


def _candidates(store: Path, task: TuningTask) -> list[str]:
    store.mkdir()
    told = search(
        [task], gpu(), local_toolchain(), store, threads=0, settings=ranking.RankingSettings(seconds=0.1)
    )
    found = told.found()[task.id]
    return [t.candidate for t in found.timings] + [f.candidate for f in found.failures]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiles_problems_are_rebuilt_exactly(tmp_path: Path, name: str) -> None:
    program, sizes, dtype = PROGRAMS[name]
    with Worker(tmp_path / "store") as worker:
        request = requested(program, *(matrix(*size, dtype=dtype) for size in sizes))
        cold = worker.compile(request)
        problems = [entry.problem for entry in cold.found()]
        tasks = [TuningTask(id=str(i), problem=problem) for i, problem in enumerate(problems)]
        told = search(tasks, request.target, request.toolchain, tmp_path / "store", threads=0)
        assert told.status == 0 and told.unfit() == {}, (told.unfit(), told.log[-3000:])
        entries = [told.found()[task.id].entry for task in tasks]
        assert [(e.problem, e.place, e.candidates) for e in entries] == [
            (e.problem, e.place, e.candidates) for e in cold.found()
        ]
        warm = worker.compile(request, entries)
    assert warm.manifest is not None, warm.error
    assert (warm.manifest.searched, warm.manifest.recalled, warm.measured) == (0, len(entries), 0)
