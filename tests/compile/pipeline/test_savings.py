"""What a compile is spared changes nothing of it; and what a server prepares, its jobs do not do again."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.codegen.cpp import stride_at_vec_range
from torch.utils._sympy.functions import FloorDiv, ModularIndexing
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.pipeline import inductor, rebuilt_graph
from torchrelay.compiler.request import codec, schema
from torchrelay.compiler.torch_internals.inductor import lowering_speed
from torchrelay.compiler.torch_internals.triton import caches

SYMBOLS = sympy.symbols("x0 x1 x2 tmp3", integer=True)
TERMS = st.tuples(st.integers(-(10**6), 10**6), st.sampled_from([*SYMBOLS, sympy.S.One]))


@settings(deadline=None)
@given(st.lists(TERMS, max_size=5), st.sampled_from(SYMBOLS), st.sampled_from([None, 8, 16]))
def test_the_stride_of_a_sum_is_inductors_own(
    terms: list[tuple[int, sympy.Expr]], var: sympy.Symbol, lanes: int | None
) -> None:
    index = sympy.Add(*(factor * symbol for factor, symbol in terms))
    found = lowering_speed.linear_stride(index, var)
    assert isinstance(found, sympy.Integer)
    assert found == stride_at_vec_range(index, var, lanes)


@pytest.mark.parametrize(
    "index",
    [
        FloorDiv(SYMBOLS[0], 16),
        32 * ModularIndexing(SYMBOLS[0], 1, 8) + SYMBOLS[1],
        SYMBOLS[0] * SYMBOLS[1],
        SYMBOLS[0] ** 2,
        SYMBOLS[0] / 2,
        SYMBOLS[0] * 0.5,
    ],
    ids=str,
)
def test_other_expressions_are_left_to_inductor(index: sympy.Expr) -> None:
    assert lowering_speed.linear_stride(index, SYMBOLS[0]) is None


def test_afterwards_pytorch_is_as_it_was() -> None:
    from torch._inductor.codegen import cpp
    from torch._inductor.codegen.common import KernelTemplate
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    owners = (KernelTemplate, cpp, AutotuneCache)
    before = [dict(vars(owner)) for owner in owners]
    with lowering_speed.faster_lowering(), caches.without_autotune_cache():
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before


JOB = """
    import json, os, pathlib, pickle, sys
    from torchrelay.compiler.pipeline import pipeline
    from torchrelay.compiler.request import codec
    from torchrelay.compiler.torch_internals.loading.preload import preload_compiler
    from torchrelay.compiler.torch_internals.triton import kernels as triton_kernels

    folder = pathlib.Path(sys.argv[1])
    request = codec.unpack_request((folder / "request").read_bytes())
    bundles = []
    fix_winners = triton_kernels.fix_winners
    triton_kernels.fix_winners = lambda bundle, triton: bundles.append(bundle) or fix_winners(bundle, triton)
    threads = lambda: len(os.listdir("/proc/self/task"))
    preload_compiler()
    before = threads()
    if sys.argv[2] == "warm":
        pipeline.preload()
        pipeline.compile_once(folder)
    known = set(sys.modules)
    started = threads() - before
    pipeline.compile_request(
        request, key="k", worker="w", workdir=folder, progress=lambda stage, detail: None
    )
    entry, _, _ = pickle.loads(bundles[0])
    print(json.dumps({
        "threads": started,
        "modules": sorted(
            name for name in set(sys.modules) - known
            if name.startswith(("torch.", "sympy.", "setuptools")) and "compile_tasks" not in name
        ),
        "code": [entry.compiled_fw.result.source_code, entry.compiled_bw.result.source_code],
        "graphs": [entry.aot_joint_graph_str, entry.compiled_fw.result.runnable_graph_str],
    }))
"""


def test_a_warm_server_starts_no_thread_and_its_job_imports_nothing_and_makes_the_same_code(
    tmp_path: Path,
) -> None:
    requests: list[schema.GraphRequest] = []
    torch.compiler.reset()
    torch.compile(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()),
        backend=lambda gm, examples: (
            requests.append(capture(gm, examples, mode="default", options={}).request) or gm.forward
        ),
    )(torch.randn(4, 8))
    found = {}
    for how in ("warm", "cold"):
        (folder := tmp_path / how).mkdir()
        (folder / "request").write_bytes(codec.pack_request(requests[0]))
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(JOB), str(folder), how],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        found[how] = json.loads(done.stdout.splitlines()[-1])
    assert found["warm"]["threads"] == 0
    assert found["warm"]["modules"] == []
    assert len(found["cold"]["modules"]) > 50  # so that the line above can fail
    assert found["warm"]["code"] == found["cold"]["code"]
    assert found["warm"]["graphs"] == ["", ""]  # nothing of the worker's environment is in an artifact


def test_two_compiles_in_one_folder_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.randn(4, 8, requires_grad=True)
    for program in (lambda x: (x.sin() * 2,), lambda x: (x.cos() + x.exp(), x * 3)):
        requests: list[schema.GraphRequest] = []

        def backend(
            gm: torch.fx.GraphModule,
            examples: list[torch.Tensor],
            requests: list[schema.GraphRequest] = requests,
        ) -> Callable[..., Any]:
            requests.append(capture(gm, examples, mode="default", options={}).request)
            return gm.forward

        torch.compiler.reset()
        expected = torch.compile(program, backend=backend)(x)
        compiled = inductor.compile_rebuilt(
            rebuilt_graph.rebuild(requests[0]), requests[0], threads=1, progress=lambda stage, detail: None
        )
        torch.testing.assert_close(tuple(compiled.run(x)), expected)


def test_what_a_graph_holds_is_pickled_once_and_under_no_fake_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one, memory of a GPU is copied to where there is none, and the process ends."""
    requests: list[schema.GraphRequest] = []
    held: list[torch.UntypedStorage] = []
    modes: list[int] = []
    pickled: Callable[..., Any] = torch.storage.TypedStorage.__reduce__

    def watched(storage: Any) -> Any:
        held.append(storage.untyped())
        modes.append(torch._C._len_torch_dispatch_stack())
        return pickled(storage)

    def backend(gm: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        requests.append(capture(gm, examples, mode="default", options={}).request)
        return gm.forward

    torch.compiler.reset()
    numbers = [0.5 * number for number in range(32)]  # up to 8 are written into the code
    torch.compile(lambda x: x * torch.tensor(numbers), backend=backend)(
        torch.randn(4, 32, requires_grad=True)
    )
    monkeypatch.setattr(torch.storage.TypedStorage, "__reduce__", watched)
    inductor.compile_rebuilt(
        rebuilt_graph.rebuild(requests[0]), requests[0], threads=1, progress=lambda stage, detail: None
    )
    assert held and len({storage.data_ptr() for storage in held}) == len(held)
    assert not any(modes)
