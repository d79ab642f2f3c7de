"""A process that starts from an artifact: all that running it needs is imported, and lowering is not."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

TRAIN = """
    import json, sys, torch, torchrelay
    UNNEEDED = ["torch._inductor." + name for name in (
        "codegen.wrapper", "debug", "decomposition", "lowering", "scheduler",
    )]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 31), torch.nn.Tanh(), torch.nn.Linear(31, 4))
    step = torch.compile(model, backend="torchrelay", mode=sys.argv[1])
    step(torch.ones(4, 8)).square().mean().backward()
    run = torchrelay.report()
    print(json.dumps({
        "gradient": model[0].weight.grad.tolist(),
        "counts": [run.misses, run.hits, run.disk_hits],
        "imported": [name for name in UNNEEDED if name in sys.modules],
    }))
"""


def train(machine: FreshMachine, service: PrivateService, mode: str) -> dict[str, Any]:
    environment = machine.environment(**service.environment, TORCHRELAY_MODE="require")
    command = [sys.executable, "-c", textwrap.dedent(TRAIN), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_hit_and_a_disk_hit_train_in_a_fresh_process(
    mode: str, service: PrivateService, tmp_path: Path
) -> None:
    first = train(FreshMachine(tmp_path / "first"), service, mode)
    teammate = FreshMachine(tmp_path / "teammate", compiler=False)
    hit, disk_hit = train(teammate, service, mode), train(teammate, service, mode)
    assert [run["counts"] for run in (first, hit, disk_hit)] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert first["gradient"] == hit["gradient"] == disk_hit["gradient"]
    if mode == "default":
        assert not hit["imported"] and not disk_hit["imported"]


MEANWHILE = """
    import sys, threading, torch
    from pathlib import Path
    from torchrelay.compiler.torch_internals.loading import prebuilt_libraries, preload

    preload.preload_loader()
    assert "torch._inductor.graph" not in sys.modules
    x, compiled = torch.randn(8), []
    prebuilt_libraries.install_library_lookup()
    with prebuilt_libraries.loading_from({}, Path(sys.argv[1]), imports_lowering=False):
        thread = threading.Thread(target=lambda: compiled.append(torch.compile(torch.sin)(x)))
        thread.start()
        thread.join()
        from torch._inductor.graph import GraphLowering

        assert hasattr(GraphLowering, "run_node")
    torch.testing.assert_close(compiled[0], x.sin())
    torch.testing.assert_close(torch.compile(torch.cos)(x), x.cos())
"""


def test_a_local_compile_meanwhile_finds_inductors_own_lowering(tmp_path: Path) -> None:
    environment = FreshMachine(tmp_path).environment()
    command = [sys.executable, "-c", textwrap.dedent(MEANWHILE), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
