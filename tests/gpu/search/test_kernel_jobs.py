"""The worked examples on a GPU: right, searched well, known to later compiles, and run as jobs of a real service."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from torchrelay.clients.jobfiles import tune_file
from torchrelay.clients.jobfiles.imported_kernels import resolve_kernel
from torchrelay.compiler.api.tuning import kernels
from torchrelay.compiler.graph.toolchain import local_target, local_toolchain
from torchrelay.compiler.request import schema, triton_source
from torchrelay.compiler.tuning import queries
from torchrelay.compiler.tuning.records import Operand
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService
from torchrelay.examples.kernels import matmul, pointwise, reduction, softmax
from tuned import Outcome, Worker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "kernels"
NAMES = ["pointwise", "reduction", "softmax", "matmul"]


def random(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draw = torch.Generator("cuda").manual_seed(0)
    return torch.randn(*size, generator=draw, device="cuda").to(dtype)


CHECKS: dict[str, Callable[[torch.dtype], tuple[torch.Tensor, torch.Tensor]]] = {
    "pointwise": lambda dtype: (
        pointwise.bias_gelu(random(321, 700, dtype=dtype), random(700, dtype=dtype)),
        pointwise.reference(random(321, 700, dtype=dtype), random(700, dtype=dtype)),
    ),
    "reduction": lambda dtype: (
        reduction.square_sum(random(321, 5000, dtype=dtype)),
        reduction.reference(random(321, 5000, dtype=dtype)),
    ),
    "softmax": lambda dtype: (
        softmax.softmax(random(321, 1000, dtype=dtype), rows=4),
        softmax.reference(random(321, 1000, dtype=dtype)),
    ),
    "matmul": lambda dtype: (
        matmul.matmul(random(300, 1000, dtype=dtype), random(1000, 500, dtype=dtype)),
        matmul.reference(random(300, 1000, dtype=dtype), random(1000, 500, dtype=dtype)),
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_agree_with_pytorch(name: str, dtype: torch.dtype) -> None:
    have, want = CHECKS[name](dtype)
    off = (have.double() - want.double()).abs().max() / want.double().abs().max()
    print(name, dtype, float(off))
    assert off < (0.02 if dtype == torch.bfloat16 else 0.005)


# --- searches ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(tmp_path_factory.mktemp("worker") / "store") as running:
        yield running


def example(name: str) -> schema.GraphRequest:
    """The first item of an example's job."""
    item = tune_file.load(FOLDER / f"{name}.yaml").kernels[0]
    return kernels.request(resolve_kernel(item, FOLDER), local_toolchain(), local_target("cuda"))


def found(outcome: Outcome) -> queries.SearchResult:
    (told,) = (question for question in outcome.asked if isinstance(question, queries.SearchResult))
    return told


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_measured_once_and_then_known(name: str, worker: Worker) -> None:
    cold = worker.compile(example(name))
    assert cold.manifest is not None, cold.error
    assert cold.manifest.verification.status == "passed"
    assert (cold.manifest.searched, cold.manifest.recalled) == (1, 0)
    told = found(cold)
    entry = told.entry
    print(name, entry.seconds, "s", entry.winner, entry.runner_up, told.timings[-1], told.failures)
    assert entry.problem.op.startswith("triton.")
    assert entry.place.device == torch.cuda.get_device_name()
    assert entry.candidates == len(told.timings) + len(told.failures)
    assert len(told.timings) > entry.candidates / 2
    assert entry.winner.samples >= 10
    assert entry.winner.milliseconds <= told.timings[0].milliseconds * 1.05
    assert entry.winner.milliseconds < told.timings[-1].milliseconds
    warm = worker.compile(example(name), [entry])
    assert warm.manifest is not None, warm.error
    assert (warm.manifest.searched, warm.manifest.recalled) == (0, 1)
    assert warm.code == cold.code
    # a compile that does not tune takes it too
    plain = worker.compile(_untuned(example(name)), [entry])
    assert plain.manifest is not None, plain.error
    assert (plain.manifest.searched, plain.manifest.recalled) == (0, 1)
    assert [each.winner for each in plain.manifest.tuning] == [entry.winner.candidate]


def _untuned(request: schema.GraphRequest) -> schema.GraphRequest:
    return msgspec.structs.replace(request, mode="default")


@pytest.mark.parametrize("name", ["pointwise", "softmax"])
def test_two_searches_from_nothing_agree(name: str, worker: Worker) -> None:
    one, other = (found(worker.compile(example(name))) for _ in range(2))
    print(name, one.entry.winner, other.entry.winner)
    if one.entry.winner.candidate != other.entry.winner.candidate:
        times = {timing.candidate: timing.milliseconds for timing in other.timings}
        assert times[one.entry.winner.candidate] <= other.entry.winner.milliseconds * 1.03


# --- candidates that misbehave -----------------------------------------------------------------------------

FAULTY = """\
def faulty(x_ptr, out_ptr, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    if FAULT == 1:
        turns = 0
        while tl.load(x_ptr, volatile=True) < 1e30:
            turns += 1
        x += turns
    if FAULT == 2:
        tl.store(out_ptr + (n.to(tl.int64) << 40), 1.0)
    if FAULT == 3:
        x += 1
    tl.store(out_ptr + offsets, 2 * x, mask=offsets < n)
"""


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (1, "ended the process that ran it"),
        (2, "illegal memory access"),
        (3, "off what the first configuration does"),
    ],
    ids=["hangs", "writes elsewhere", "is wrong"],
)
def test_a_candidate_that_misbehaves_is_out_and_the_search_goes_on(
    fault: int, why: str, worker: Worker
) -> None:
    text = triton_source.module_text([], [], {"faulty": triton_source.function_text(FAULTY)})
    configs = [
        schema.KernelConfig([("BLOCK", block), ("FAULT", f)], 4, 1, 1, None)
        for block, f in ((256, 0), (512, fault), (1024, 0))
    ]
    operand = Operand("float32", (1 << 20,), (1,))
    kernel = kernels.KernelSpec(
        source=schema.KernelSource("faulty", text, configs),
        grids=[((1 << 20) // block, 1, 1) for block in (256, 512, 1024)],
        tensors=[("x_ptr", operand), ("out_ptr", operand)],
        constants=[("n", 1 << 20)],
    )
    request = kernels.request(kernel, local_toolchain(), local_target("cuda"))
    outcome = worker.compile(request, fault="kernels may run for 10 s")
    assert outcome.manifest is not None, outcome.error
    told = found(outcome)
    (failure,) = told.failures
    print(failure)
    assert failure.candidate.startswith(f"BLOCK=512 FAULT={fault}")
    assert why in failure.why
    assert len(told.timings) == 2


# --- the whole way -----------------------------------------------------------------------------------------

LATER = """
import json, torch, torchrelay, msgspec
from torchrelay.examples.kernels import matmul
a, b = (torch.randn(1024, 1024, device="cuda").bfloat16(), torch.randn(1024, 4096, device="cuda").bfloat16())
compiled = torch.compile(lambda a, b: matmul.matmul(a, b) + 1, backend="torchrelay")
have, want = compiled(a, b), matmul.reference(a, b) + 1
off = float((have.double() - want.double()).abs().max() / want.double().abs().max())
report = msgspec.to_builtins(torchrelay.report())
print(json.dumps({"off": off, "fallbacks": report["fallbacks"], "misses": report["misses"]}))
"""


def test_a_job_is_searched_by_the_service_and_a_later_compile_takes_its_winner(tmp_path: Path) -> None:
    machine = FreshMachine(tmp_path / "machine")
    with PrivateService(tmp_path / "s") as service:

        def child(*command: str) -> str:
            environment = machine.environment(**service.environment, TORCHRELAY_MODE="require")
            done = subprocess.run(
                [sys.executable, *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=500,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr + service.log_tail()
            print(done.stdout)
            return done.stdout

        cli = ("-m", "torchrelay.clients.cli", "tune")
        child(*cli, str(FOLDER / "matmul.yaml"))
        job = json.loads(child(*cli, "show", "matmul", "--json"))
        items = [item for item in job["progress"] if item["line"]]
        assert [item["state"] for item in items] == ["done"] * len(items)
        before = service.stats()
        record = json.loads(child("-c", LATER).splitlines()[-1])
        assert record["fallbacks"] == {} and record["misses"] == 1
        assert record["off"] < 0.02
        after = service.stats()
        assert after["problems_recalled"] - before["problems_recalled"] == 1
        assert after["problems_searched"] == before["problems_searched"]
