"""What an artifact's Triton kernels say of how they were tuned: a client tunes nothing."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

from torchrelay.compiler.torch_internals.triton import kernels as triton_kernels


class Config:
    """triton.Config, as far as it matters here: a pickle keeps what it knows, and no `found_by_coordesc`."""

    def __init__(self, **kwargs: int) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, 4, 2

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.kwargs, self.num_warps, self.num_stages = (
            state["kwargs"],
            state["num_warps"],
            state["num_stages"],
        )


def kernel(*configs: Config) -> SimpleNamespace:
    results = [SimpleNamespace(config=config) for config in configs]
    meta = {"coordinate_descent_tuning": True, "dynamic_scale_rblock": True}
    return SimpleNamespace(compile_results=results, inductor_meta=meta, launchers=results)


def test_where_a_descent_ended_is_what_a_client_runs_without_another_one() -> None:
    stored = kernel(Config(XBLOCK=64))
    ended = Config(XBLOCK=256)
    ended.found_by_coordesc = True  # type: ignore[attr-defined]
    late = [SimpleNamespace(config=Config(XBLOCK=128)), SimpleNamespace(config=Config(XBLOCK=256))]
    triton_kernels.keep_winner(stored, kernel(ended), late)
    loaded = pickle.loads(pickle.dumps(stored))
    assert [result.config.kwargs for result in loaded.compile_results] == [{"XBLOCK": 256}]
    assert not triton_kernels.descends(loaded, loaded.compile_results[0].config)


def test_a_kernel_that_has_yet_to_descend_is_undecided() -> None:
    kernels = triton_kernels.TritonKernels()
    kernels.live["one"] = running = kernel(Config(XBLOCK=64))
    assert kernels.undecided()
    running.launchers[0].config.found_by_coordesc = True
    assert not kernels.undecided()
