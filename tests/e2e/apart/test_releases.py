"""Parts of this release and of the one before it at work together, by docker-compose.yml's command lines.

Like test_up_apart.py, whose parts it uses, this file is the test and the program in the network namespace.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

sys.path += [str(Path(__file__).parent), *(str(parts) for parts in Path(__file__).parents[2].glob("*/parts"))]
import previous_release
from test_train_apart import STEPS, prepare_training, steps_of, train
from test_up_apart import Apart, listens, loopback_up, run_alone

CLIENT = """
import json, torch, torchrelay
torch.manual_seed(0)
model, x = torch.nn.Linear(8, 4), torch.randn(2, 8)
model(x).square().sum().backward()
expected = model.weight.grad.clone()
model.weight.grad = None
torch.compile(model, backend="torchrelay")(x).square().sum().backward()
assert torch.allclose(model.weight.grad, expected, atol=1e-6)
torch.optim.SGD(model.parameters(), lr=0.1).step()
report = torchrelay.report()
print(json.dumps([torchrelay.__file__, report.hits, report.misses, sum(report.fallbacks.values())]))
"""
PARTS = ("signer", "gateway", "dispatcher", "worker-cpu", "client")
CASES = {
    "old_clients_and_dispatchers": {"client", "dispatcher"},
    "old_gateways_workers_and_signers": {"gateway", "worker-cpu", "signer"},
    "an_upgrade_under_a_training_job": {
        "gateway",
        "worker-cpu",
        "worker-train",
        "dispatcher",
        "signer",
        "client",
    },
}
"""Which parts are of the release before. In the first two, parts that talk to each other are of different releases."""


class Mixed(Apart):
    """Parts of two releases."""

    def __init__(self, home: Path, old: set[str]) -> None:
        super().__init__(home)
        self.old = old
        self.before = previous_release.unpack(home / "before")
        self.client_path = str(self.before) if "client" in old else ""
        for name in old - {"client"}:
            part = self.compose[name]
            part["environment"]["PYTHONPATH"] = str(self.before)

    def start_cluster(self) -> None:
        self.serve_redis_on_loopback()
        self.start("redis", [])
        self.start("ray-head", [], f"--temp-dir={self.temp_dir}")
        self.wait(lambda: listens(self.ray_port) and listens(self.redis_port), "redis and Ray listening")
        service = self.start_service()
        self.start("worker-cpu", service)
        if "worker-train" in self.old:
            self.start("worker-train", service)
        self.wait(lambda: self.get("/readyz")[0] == 200, "a warm worker")

    def is_old(self, name: str) -> bool:
        """Whether a part, or the fork server of a worker's slot, runs the code of before."""
        family = [self.processes[name], *self.processes[name].children(recursive=True)]
        module = "torchrelay.workers.fork_server.server" if name == "worker-cpu" else "torchrelay.service"
        server = next(each for each in family if module in each.cmdline())
        return str(self.before) in server.environ().get("PYTHONPATH", "").split(os.pathsep)

    def compile(self, cache: str) -> tuple[bool, list[int]]:
        """Whether the client is an old one, and its hits, misses and fallbacks."""
        ran = subprocess.run(
            [sys.executable, "-c", CLIENT],
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("TORCHRELAY_")},
                "XDG_CONFIG_HOME": str(self.home / "config"),
                "XDG_CACHE_HOME": str(self.home / cache),
                "TORCHRELAY_MODE": "require",
                "PYTHONPATH": self.client_path,
            },
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 0, ran.stderr + self.logs()
        file, *counts = json.loads(ran.stdout)
        return file.startswith(str(self.before)), counts


def misses_and_hits(parts: Mixed, old: set[str]) -> None:
    """A training step that misses, and one that hits."""
    parts.start_cluster()
    assert {name for name in PARTS[:-1] if parts.is_old(name)} == old - {"client"}
    assert parts.compile("cache-1") == ("client" in old, [0, 1, 0])
    assert parts.compile("cache-2") == ("client" in old, [1, 0, 0])


def upgrade_under_a_job(parts: Mixed, old: set[str]) -> None:
    """All but the workers is replaced while a job runs: its driver and ranks are of the release before, to the end."""
    steps = prepare_training(parts)
    script = parts.home / "script" / "slow.py"
    waits = 'while step == 4 and not os.path.exists(sys.argv[1] + "-upgraded"): time.sleep(0.1)'
    script.write_text("import os\n" + script.read_text().replace("time.sleep(0.5)", waits))
    parts.start_cluster()
    options = ["--workers", "2", "--cpus", "0.5", "--no-capture", "--detach"]
    name = train(parts, "slow.py", *options, "--", str(steps), python_path=parts.client_path).strip()
    parts.wait(lambda: steps_of(steps) == 5, "five steps", 180)
    for role in ("dispatcher", "gateway", "signer"):
        parts.stop(role)
        del parts.compose[role]["environment"]["PYTHONPATH"]
    parts.start_service()
    parts.wait(lambda: parts.get("/readyz")[0] == 200, "a warm worker of the new dispatcher")
    assert steps_of(steps) == 5
    Path(f"{steps}-upgraded").touch()
    assert [role for role in PARTS[:-1] if parts.is_old(role)] == ["worker-cpu"]
    parts.wait(lambda: json.loads(train(parts, "show", name, "--json"))["state"] == "done", "the end", 180)
    job = json.loads(train(parts, "show", name, "--json"))
    assert job.get("restarts", 0) == 0
    assert steps_of(steps) == STEPS
    for rank in ("0", "1"):
        told = [line for line in train(parts, "logs", name, "--rank", rank).splitlines() if "step " in line]
        assert len(told) == STEPS, told
    old.clear()
    parts.client_path = ""
    assert parts.compile("cache") == (False, [0, 1, 0])  # on the worker of before


@pytest.mark.slow
@pytest.mark.skipif(not previous_release.in_history(), reason="the release before is not in this clone")
@pytest.mark.parametrize("case", CASES)
def test_two_neighbouring_releases_work_together(case: str, tmp_path: Path) -> None:
    run_alone(__file__, tmp_path, case)


def main(home: Path, network: str, case: str) -> None:
    if network == "alone":
        loopback_up()
    parts = Mixed(home, CASES[case])
    try:
        run = upgrade_under_a_job if "upgrade" in case else misses_and_hits
        run(parts, set(CASES[case]))
    except (psutil.Error, subprocess.TimeoutExpired) as error:
        raise AssertionError(parts.logs()) from error
    finally:
        parts.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
