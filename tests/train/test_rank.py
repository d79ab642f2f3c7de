"""A rank runs a script as Python does; what the job asked is set before it begins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torchrelay.compiler.api.training.events import FirstStep, RankCompiles
from torchrelay.compiler.api.training.jobs import TrainSpec
from torchrelay.compiler.api.training.rank_environment import STOPPED_CODE
from train_parts import HERE, SECONDS, finish, signal, start
from waiting import wait_until

PLAIN = HERE / "plain.py"


@pytest.mark.parametrize("ending", ["well", "raise", "exit", "die", "interrupt"])
def test_output_traceback_and_exit_code_are_python_s_own(ending: str) -> None:
    (rank,) = start(PLAIN, [ending, "--more"])
    alone = subprocess.run(
        [sys.executable, str(PLAIN), ending, "--more"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert rank.wait() == alone.returncode
    assert rank.out == alone.stdout and "child" in rank.out
    semaphores = r"/mp-\w+"  # Python 3.13 names those that a killed process has left
    assert re.sub(semaphores, "", rank.error) == re.sub(semaphores, "", alone.stderr)


def test_a_script_named_from_its_folder_knows_its_whole_path(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("VALUE = 3")
    (tmp_path / "mine.py").write_text(
        """
import inspect, os, sys
import part
print(__file__, sys.argv, sys.path[0], sorted(globals()), (lambda: 0).__code__.co_filename)
os.chdir("/")
def fails():
    raise ValueError(part.VALUE)
print(inspect.getsource(fails))
fails()
"""
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}

    def run(*command: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, *command, "mine.py", "-x"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
        )
        return done.returncode, done.stdout, done.stderr

    assert run("-m", "torchrelay.clients.training.rank.main", "--") == run()


def test_a_function_of_the_working_directory_is_an_entry_point(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys\ndef begin():\n    print('begun', sys.argv)\n    return 3\n"
        "def fails():\n    raise ValueError('as asked')\n"
        "class Kept:\n    @staticmethod\n    def begin():\n        print('kept')\n"
    )
    command = [sys.executable, "-m", "torchrelay.clients.training.rank.main", "--function"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}

    def run(entry: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, entry, "--", "-x"], cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=180
        )

    done = run("mine:begin")
    assert (done.returncode, done.stdout) == (0, "begun ['mine:begin', '-x']\n"), done.stderr
    assert run("mine:Kept.begin").stdout == "kept\n"
    failed = run("mine:fails")
    assert failed.returncode == 1
    assert (
        failed.stderr.startswith("Traceback (most recent call last):\n  File ")
        and failed.stderr.count("File") == 1
    )
    assert "mine.py" in failed.stderr and failed.stderr.endswith("ValueError: as asked\n")
    missing = run("mine:nothing")
    assert missing.returncode == 1 and "mine has no function 'nothing'" in missing.stderr


def test_what_the_job_asks_is_there_before_the_script_begins(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        """
import torch
from torchrelay import train
print(torch.get_float32_matmul_precision())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model)
with train.autocast():
    out = compiled(torch.randn(3, 4))
print(out.dtype)
out.float().sum().backward()
optimizer.step()
"""
    )
    # No gateway: the graph is compiled here, and counted as that, which shows whose back end it went through.
    environment = {"TORCHRELAY_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    (half,) = start(script, spec=TrainSpec(name="a", precision="bf16"), environment=environment)
    (plain,) = start(
        script, spec=TrainSpec(name="a", precision="tf32", compile="off"), environment=environment
    )
    finish([half, plain])
    assert half.out.split() == ["highest", "torch.bfloat16"]
    assert plain.out.split() == ["high", "torch.float32"]
    assert [each.fallbacks for each in half.told(RankCompiles)] == [1]
    assert plain.told(RankCompiles) == []
    assert len(half.told(FirstStep)) == len(plain.told(FirstStep)) == 1


def test_who_names_pytorch_s_default_back_end_has_torchrelay_too(tmp_path: Path) -> None:
    """Hugging Face's Trainer does so. Another back end is the script's own."""
    script = tmp_path / "names.py"
    script.write_text(
        """
import torch
@torch.compile(backend="inductor", dynamic=False)
def product(x, y):
    return x @ y
class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()
model = Model(4, 2)
model.compile(backend="inductor")
torch.compile(lambda x: x.sin(), backend="eager")(product(torch.ones(2, 2), model(torch.ones(4, 4)).T))
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight])
optimizer.step()
"""
    )
    environment = {"TORCHRELAY_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    specs = [TrainSpec(name="a"), TrainSpec(name="a", tune=True), TrainSpec(name="a", compile="off")]
    ranks = [start(script, spec=spec, environment=environment)[0] for spec in specs]
    finish(ranks)
    # No gateway: what went through torchrelay is compiled here, and counted as that.
    assert [[each.fallbacks for each in rank.told(RankCompiles)] for rank in ranks] == [[2], [2], []]


def test_a_missing_script_is_named() -> None:
    (rank,) = start(Path("nowhere.py"))
    assert rank.wait() == 1
    assert re.search("nowhere.py is not a file", rank.error)


def test_a_process_group_that_the_script_leaves_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(
        """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
real = dist.destroy_process_group
dist.destroy_process_group = lambda: (real(), print("ended", flush=True))
dist.all_reduce(torch.ones(1))
"""
    )
    ranks = start(script, ranks=2)
    finish(ranks)
    assert [rank.out for rank in ranks] == ["ended\n"] * 2


def test_what_gloo_still_holds_when_the_script_is_over_does_not_abort_the_rank(tmp_path: Path) -> None:
    script = tmp_path / "drops.py"
    script.write_text(
        """
import builtins, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
dist.init_process_group("gloo")
builtins.known = dist.new_group(backend="gloo")  # to the end of Python, as by a model that cannot be freed
tensors = [torch.ones(1) for _ in range(100_000)]
last = tensors[-1]
dist.all_reduce_coalesced(tensors, group=builtins.known, async_op=True)
del tensors
while last.item() != 2:
    pass
dist.destroy_process_group()  # while gloo's thread lets go of the others
"""
    )
    ranks = start(script, ranks=2)
    finish(ranks)
    assert [rank.error for rank in ranks] == ["", ""]


def test_sigterm_ends_a_script_that_never_asks_and_is_a_question_to_one_that_does(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        """
import sys, time
from pathlib import Path
from torchrelay import train
asks = sys.argv[1] == "asks"
if asks:
    assert not train.should_stop()
Path(sys.argv[2]).touch()
while not (asks and train.should_stop()):
    time.sleep(0.01)
print("saved")
"""
    )
    ranks = []
    for asks in ("asks", "never"):
        ranks += start(script, [asks, str(tmp_path / asks)])
    for rank, asks in zip(ranks, ("asks", "never"), strict=True):
        wait_until((tmp_path / asks).exists, SECONDS)
        rank.process.send_signal(signal.SIGTERM)
    finish(ranks, STOPPED_CODE, -signal.SIGTERM)
    assert [rank.out for rank in ranks] == ["saved\n", ""]
