"""A search's inputs lie in several places of a GPU's memory by turns; what is computed there does not change."""

from __future__ import annotations

import pytest
import torch
from torchrelay.compiler.search import benchmark, lower_problem
from torchrelay.compiler.tuning.candidates import Candidates
from torchrelay.compiler.tuning.queries import TuningTask
from torchrelay.compiler.tuning.records import parse_problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SHAPES = {
    "mm": "mm(bf16[512,256], bf16[256,384]:1,256) -> bf16[512,384]",
    "addmm": "addmm(bf16[384], bf16[512,256], bf16[256,384]) -> bf16[512,384]",
    "fp8": "scaled_mm(f8e4m3[512,256], f8e4m3[256,384]:1,256, f32[], f32[]) -> bf16[512,384]",
}


def addresses(selection: Candidates) -> list[int]:
    arguments = selection._arguments  # type: ignore[attr-defined]
    tensors = [
        *arguments.triton.input_tensors,
        *arguments.extern.input_tensors,
        arguments.triton.output_tensor,
    ]
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("name", SHAPES)
def test_candidates_find_the_same_numbers_in_each_place(name: str) -> None:
    task = TuningTask(id=name, problem=parse_problem(SHAPES[name]), exact=False)
    with lower_problem.in_force(task):
        selection = lower_problem.lower_problem(task, "cuda")
        selection.begin_building().wait()
        selection.prepare(seed=3)
        try:
            runner, _ = benchmark.candidate_runner(selection, 0)
            with runner as running:
                here = addresses(selection)
                before = selection.run(0, lambda once: once()).clone()
                every = [
                    candidate for candidate in range(len(selection.candidates)) if starts(running, candidate)
                ]
                seen = []
                for _ in range(benchmark.BufferRotation.MAX + 1):
                    taken = running.take(every)
                    assert all(milliseconds is not None and milliseconds > 0 for milliseconds in taken)
                    seen.append(addresses(selection))
                    assert torch.equal(selection.run(0, lambda once: once()), before)
                assert seen[0] == seen[-1] == here
                assert len({tuple(each) for each in seen}) == benchmark.BufferRotation.MAX
                shared = [here.index(address) for address in here]
                assert all([each.index(address) for address in each] == shared for each in seen)
        finally:
            selection.close()


def starts(running: benchmark.GpuRunner, candidate: int) -> bool:
    try:
        running.start(candidate)
    except benchmark.CandidateFailed:
        return False
    return True
