"""Several graphs at once for one GPU: they are lowered side by side, and measured and verified in turn."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stamping_engine
import torch
from pool_parts import RAY_TOKEN
from torchrelay.compiler.artifact import container
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.request import codec, schema
from torchrelay.workers.pool import PoolSettings, WorkerPool
from waiting import until

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

GRAPHS = 4

Stages = list[tuple[str, float]]
"""Each stage that began, and when."""


def requested(width: int) -> schema.GraphRequest:
    """A training step of a small model; each width is another graph."""
    requests: list[schema.GraphRequest] = []

    def backend(gm: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        requests.append(capture(gm, examples, mode="default", options={}).request)
        return gm.forward

    layers = [(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width)) for _ in range(6)]
    model = torch.nn.Sequential(*itertools.chain(*layers)).cuda()
    torch.compiler.reset()
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(64, width, device="cuda"))
    return requests[0]


async def compiled_at_once(requests: list[schema.GraphRequest]) -> list[tuple[bytes, Stages]]:
    pool = WorkerPool(
        PoolSettings(cpu_slots=0, gpu_slots=GRAPHS, engine="stamping_engine", ray_token=RAY_TOKEN)
    )
    await pool.start()
    first = requests[0]

    async def one(request: schema.GraphRequest, number: int) -> tuple[bytes, Stages]:
        stages: Stages = []

        def progress(stage: str, detail: str) -> None:
            with contextlib.suppress(ValueError):  # from the fork server, before there is a child
                stages.append((stage, float(detail)))

        data = await pool.compile(
            codec.encode_request(request),
            key=f"{number:064x}",
            toolchain=request.toolchain,
            target=request.target,
            deadline_seconds=500,
            on_progress=progress,
        )
        return data, stages

    try:
        await until(lambda: (pool.room(first.toolchain, first.target) or 0) >= GRAPHS, seconds=300)
        return await asyncio.gather(*(one(request, number) for number, request in enumerate(requests)))
    finally:
        await pool.close()


def spans(stages: Stages, names: tuple[str, ...]) -> list[tuple[float, float]]:
    return [(begun, ended) for (name, begun), (_, ended) in itertools.pairwise(stages) if name in names]


def test_graphs_of_one_gpu_are_lowered_side_by_side_and_verified_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = str(Path(stamping_engine.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([parts, os.environ.get("PYTHONPATH", "")]))
    if torch.cuda.device_count() > 1:
        pytest.skip("slots are shared by all GPUs; this is about one")
    done = asyncio.run(compiled_at_once([requested(64 * (number + 2)) for number in range(GRAPHS)]))
    for data, stages in done:
        print(stages)
        manifest = container.read_manifest(data)
        assert manifest.verification.status == "passed", manifest.verification
        assert "queued" not in dict(manifest.stages)
    lowering = [
        (span[0][0], span[-1][1]) for _, stages in done if (span := spans(stages, ("aot", "inductor")))
    ]
    assert len(lowering) == GRAPHS
    assert max(begun for begun, _ in lowering) < min(ended for _, ended in lowering)
    turns = sorted(span for _, stages in done for span in spans(stages, ("verify",)))
    assert len(turns) >= GRAPHS
    for (_, ended), (begun, _) in itertools.pairwise(turns):
        assert ended <= begun
