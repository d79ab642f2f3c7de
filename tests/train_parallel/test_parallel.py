"""Parallel training through torch.compile and the service: gloo ranks under torchrun. Losses are one process's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchrelay.clients.training.distributed import data_parallel
from torchrelay.examples.harness.private_service import PrivateService

pytestmark = pytest.mark.timeout(1200)  # of which a loaded machine needs half for all cases together
SCRIPT = Path(__file__).with_name("ranks.py")
SAME = 1e-5
"""Of a loss around 1, in float32, between programs that add in another order."""
HALF = 5e-3
"""As above, where something is rounded to bfloat16 or float16 on the way."""

CASES = {
    "ddp": SAME,
    "unused": SAME,
    "own": SAME,
    "fp16": HALF,
    "bf16": HALF,
    "powersgd": 2e-2,
    "zero": SAME,
    "join_zero": SAME,
    "accumulate": SAME,
    "fsdp": SAME,
    "tensor": SAME,
}
"""To be had from three graphs. The tolerance is that to one process with the same global batch."""
SLOW_CASES = {
    "static": SAME,
    "split": SAME,
    "join": SAME,
    "reduce_overhead": SAME,
    "checkpoint": SAME,
    "autocast": HALF,
    "fsdp_half": HALF,
    "fsdp_accumulate": SAME,
    "sequence": SAME,
    "recompute": SAME,
}

PLACED = ("tensor", "sequence", "recompute", "two")

Told = list[dict[str, Any]]
"""Of each rank: case to what it told."""


def torchrun(
    script: Path, arguments: list[str], ranks: int, folder: Path, service: PrivateService, **variables: str
) -> str:
    """What the script's ranks printed."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")},
        **service.environment,
        "OMP_NUM_THREADS": "1",
        "XDG_STATE_HOME": str(folder / "state"),
        "TORCHRELAY_CACHE_DIR": str(folder / "cache"),
        "TORCHRELAY_PREFETCH": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        **variables,
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launcher, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def launch(cases: list[str], ranks: int, folder: Path, service: PrivateService) -> Told:
    folder.mkdir()
    torchrun(SCRIPT, [",".join(cases), str(folder)], ranks, folder, service)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def told(service: PrivateService, tmp_path_factory: pytest.TempPathFactory) -> Told:
    return launch([*CASES, "gathered"], 2, tmp_path_factory.mktemp("parallel") / "job", service)


@pytest.fixture(scope="module")
def slowly_told(service: PrivateService, tmp_path_factory: pytest.TempPathFactory) -> Told:
    return launch([*SLOW_CASES], 2, tmp_path_factory.mktemp("parallel") / "slow", service)


def check(told: Told, case: str, tolerance: float) -> None:
    first = told[0][case]
    assert first["relay"] == pytest.approx(first["alone"], abs=tolerance)
    # Compiled locally, the same code: a PowerSGD or a reduction may still be another one, so not to the last bit.
    assert first["relay"] == pytest.approx(first["local"], abs=SAME)
    assert first["relay"][-1] != first["relay"][0]
    for number, rank in enumerate(told):
        # What is spread over a mesh of two has a key for each of its places; the rest has one for all.
        like = told[number % 2][case] if case in PLACED else first
        assert rank[case]["keys"] == like["keys"] != []
        assert not [outcome for outcome in rank[case]["outcomes"] if outcome.startswith("fallback")]


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_one_process_with_the_same_global_batch(told: Told, case: str) -> None:
    check(told, case, CASES[case])


def test_the_same_model_is_compiled_once_whatever_reduces_its_gradients(told: Told) -> None:
    keys = {tuple(told[0][case]["keys"]) for case in CASES if case not in ("fsdp", "tensor")}
    assert len(keys) == 1


def test_a_hook_is_really_in_force(told: Told) -> None:
    """Rounded gradients end elsewhere than exact ones, and each hook elsewhere."""
    assert len({tuple(told[0][hook]["relay"]) for hook in ("ddp", "fp16", "bf16", "powersgd")}) == 4


def test_what_cannot_be_sent_falls_back_on_all_ranks_alike(told: Told) -> None:
    for rank in told:
        assert rank["gathered"]["outcomes"] == ["fallbackunsupported"]
        assert rank["gathered"]["relay"] == rank["gathered"]["local"]
        assert rank["gathered"]["warned"] == told[0]["gathered"]["warned"]
    assert "method Tensor.full_tensor is not in the table" in told[0]["gathered"]["warned"]


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES)
def test_more_of_the_same(slowly_told: Told, case: str) -> None:
    check(slowly_told, case, SLOW_CASES[case])


def test_each_place_of_a_mesh_has_a_key_of_its_own(told: Told) -> None:
    """What is compiled may differ between places: who splits a tensor takes another part of it at each."""
    first, second = (rank["tensor"]["keys"] for rank in told)
    assert len(first) == len(second) and not {*first} & {*second}


@pytest.mark.slow
def test_two_dimensions_share_what_each_place_of_the_second_compiles(
    service: PrivateService, tmp_path: Path
) -> None:
    told = launch(["two"], 4, tmp_path / "two", service)
    check(told, "two", SAME)
    assert len({tuple(rank["two"]["keys"]) for rank in told}) == 2


@pytest.mark.slow
def test_ddp_optimizers_pieces_are_compiled_each_for_itself(slowly_told: Told) -> None:
    assert len(slowly_told[0]["split"]["keys"]) > 2


def test_an_unknown_hook_is_refused_with_the_names_there_are() -> None:
    import torch

    with pytest.raises(ValueError, match="'fp8'; there are fp16, bf16, powersgd"):
        data_parallel.ddp(torch.nn.Linear(1, 1), hook="fp8")


def test_without_a_process_group_nothing_is_distributed() -> None:
    import torch

    model = torch.nn.Linear(1, 1)
    assert data_parallel.ddp(model, hook="bf16") is model
    optimizer = data_parallel.zero(model.parameters(), torch.optim.SGD, lr=0.5)
    assert type(optimizer) is torch.optim.SGD and optimizer.defaults["lr"] == 0.5
    with data_parallel.join(model, optimizer):
        model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.slow
def test_a_remote_modules_halves_are_both_compiled_by_the_service(
    service: PrivateService, tmp_path: Path
) -> None:
    script = SCRIPT.parent.parent.parent / "examples" / "remote_module.py"
    before = service.stats()["requests"]
    printed = torchrun(script, ["--steps", "40"], 2, tmp_path, service, TORCHRELAY_MODE="require")
    first, last = (float(text) for text in re.findall(r"loss (\S+) -> (\S+) in 40", printed)[0])
    assert last < first / 2
    assert service.stats()["requests"] == before + 2
