"""The second run of a script does not trace what the first one has traced, unless something is not what it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_commands import torchrelay
from torchrelay.clients.artifacts.programs.store import ProgramStore
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = """
import json, sys
import torch, torchrelay
import layers

def scaled(x):
    return x * layers.SCALE

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(6, 8), layers.Head(8)

    def forward(self, x):
        x = scaled(torch.relu(self.first(x)))
        if BREAKS:
            torch._dynamo.graph_break()
        return self.second(x).square().mean()

BREAKS = len(sys.argv) > 1
net = Net()
compiled = torch.compile(net, backend="torchrelay")
losses = []
for step in range(2):
    found = compiled(torch.linspace(-1, 1, 30).reshape(5, 6))
    found.backward()
    losses.append((found.item(), net.first.weight.grad.norm().item()))
    eager = Net()
    wanted = eager(torch.linspace(-1, 1, 30).reshape(5, 6))
    wanted.backward()
    torch.testing.assert_close(found, wanted)
    net.zero_grad()
run = torchrelay.report()
traced = run.seconds["trace"] > 0
counts = {"programs": run.programs, "checked": [run.programs_checked, run.programs_stale]}
print(json.dumps({**counts, "traced": traced, "fallbacks": run.fallbacks, "losses": losses}))
"""

LAYERS = """
import torch

SCALE = 1.4375

class Head(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(width, width)

    def forward(self, x):
        return x + torch.nn.functional.softplus(self.inner(x))
"""


class Machine:
    """Where a user runs the script again and again."""

    stderr = ""
    """Of the last run."""

    def __init__(self, service: PrivateService, folder: Path, **variables: str) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            **service.environment,
            "TORCHRELAY_CACHE_DIR": str(folder / "cache"),
            "XDG_STATE_HOME": str(folder / "state"),
            "TORCHRELAY_PROGRAMS": "1",
            **variables,
        }

    @property
    def programs(self) -> list[Path]:
        """Those that were traced here."""
        return sorted((self.folder / "cache" / "programs").glob("*/*"))

    def train(
        self, *arguments: str, at: str = "code", script: str = SCRIPT, layers: str = LAYERS, **variables: str
    ) -> dict[str, Any]:
        code = self.folder / at
        code.mkdir(parents=True, exist_ok=True)
        (code / "train.py").write_text(script)
        (code / "layers.py").write_text(layers)
        done = subprocess.run(
            [sys.executable, str(code / "train.py"), *arguments],
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        self.stderr = done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def explain(self) -> str:
        command = [sys.executable, "-m", "torchrelay.clients.cli", "explain"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def machine(service: PrivateService, tmp_path: Path) -> Machine:
    return Machine(service, tmp_path)


def test_the_next_process_traces_nothing_and_computes_the_same(machine: Machine) -> None:
    first = machine.train()
    assert (first["programs"], first["traced"], first["fallbacks"]) == (0, True, {})
    second = machine.train()
    assert second == {**first, "programs": 1, "traced": False}
    assert machine.train(TORCHRELAY_PROGRAMS="0") == first
    moved = machine.train(
        at="another",
        script="# a comment\n\n" + SCRIPT,
        layers='"""A docstring."""\n' + LAYERS + "\nOTHER = 1\n",
    )
    assert moved == second


def test_a_start_that_checks_finds_a_program_that_is_stale_although_its_conditions_hold(
    machine: Machine,
) -> None:
    first = machine.train()
    checked = machine.train(TORCHRELAY_PROGRAMS_CHECK="1")
    assert (checked["programs"], checked["traced"], checked["checked"]) == (0, True, [1, 0])
    forget_what_is_asked(machine, "SCALE")
    changed = LAYERS.replace("1.4375", "2.4375")
    unseen = SCRIPT.replace("torch.testing.assert_close(found, wanted)", "pass")
    stale = machine.train(script=unseen, layers=changed)
    assert (stale["programs"], stale["losses"]) == (1, first["losses"]), "the program is not stale"

    found = machine.train(layers=changed, TORCHRELAY_PROGRAMS_CHECK="1")
    assert (found["programs"], found["traced"], found["checked"]) == (0, True, [1, 1])
    assert found["losses"] != first["losses"]
    assert "StaleProgramWarning" in machine.stderr and "__main__.Net.forward" in machine.stderr
    assert "Programs compared with a new trace: 1; 1 were stale and are dropped" in machine.explain()
    again = machine.train(layers=changed)
    assert (again["programs"], again["losses"]) == (1, found["losses"])


def forget_what_is_asked(machine: Machine, name: str) -> None:
    """Programs without what they say of one variable, as if tracing had asked for it without a word."""
    store = ProgramStore(machine.folder / "cache", machine.folder / "state" / "torchrelay")
    for path in machine.programs:
        (program,) = store.variants(path.parent.name)
        place = next(at for at, each in enumerate(program.sources) if each.values.get("member") == name)
        guards = [each for each in program.guards if each.source != place]
        assert len(guards) < len(program.guards)
        path.unlink()
        store.add(path.parent.name, msgspec.structs.replace(program, guards=guards, traced=[]))


def test_what_the_artifacts_have_in_python_is_compiled_where_it_is_traced_alone(machine: Machine) -> None:
    hook = """
seen = []

def look(event, given):
    if event == "compile" and "torchrelay-loaded" in str(given[1]):
        seen.append(given[1])

sys.addaudithook(look)
"""
    script = SCRIPT.replace("import layers\n", f"import layers\n{hook}", 1)
    script = script.replace('"losses": losses', '"losses": losses, "compiled": len(seen)')
    first, second = (machine.train(script=script) for _ in range(2))
    assert (first["programs"], second["programs"]) == (0, 1)
    assert first["compiled"] >= 2 and second["compiled"] == 0
    assert first["losses"] == second["losses"]


def test_another_machine_starts_with_the_teams_program_if_it_accepts_them(
    service: PrivateService, tmp_path: Path
) -> None:
    first, second, alone = (Machine(service, tmp_path / name) for name in ("first", "second", "alone"))
    script = SCRIPT.replace("scaled", "scaled_for_all")  # no other test's program
    traced = first.train(script=script, TORCHRELAY_PROGRAMS="team")
    assert (traced["programs"], traced["traced"]) == (0, True)
    started = {**traced, "programs": 1, "traced": False}
    assert alone.train(script=script) == traced
    assert second.train(script=script, TORCHRELAY_PROGRAMS="team") == started
    away = {"TORCHRELAY_URL": "http://127.0.0.1:1", "TORCHRELAY_TOKEN": "none"}
    from_disk = second.train(script=script, TORCHRELAY_PROGRAMS="team", **away)
    assert (from_disk, second.programs) == (started, [])
    changed = LAYERS.replace("x + torch", "x - torch")
    other = second.train(script=script, layers=changed, TORCHRELAY_PROGRAMS="team")
    assert (other["programs"], other["traced"]) == (0, True)
    third = Machine(service, tmp_path / "third")
    assert third.train(script=script, layers=changed, TORCHRELAY_PROGRAMS="team")["programs"] == 1
    assert third.train(script=script, TORCHRELAY_PROGRAMS="team") == started


@pytest.mark.slow
def test_a_taken_program_is_not_used_after_its_key_was_revoked(tmp_path: Path) -> None:
    with PrivateService(tmp_path / "s") as service:
        assert torchrelay(service, "keys", "rotate").returncode == 0  # clients know the first key too
        signer = json.loads(torchrelay(service, "keys", "ls", "--json").stdout)["current"]
        first, second = (Machine(service, tmp_path / name, TORCHRELAY_PROGRAMS="team") for name in ("1", "2"))
        traced = first.train()
        started = {**traced, "programs": 1, "traced": False}
        assert second.train() == started
        assert torchrelay(service, "keys", "revoke", signer).returncode == 0
        second.train("breaks")  # asks the service for it, and so learns of the revocation
        assert second.train() == traced
        assert Machine(service, tmp_path / "3", TORCHRELAY_PROGRAMS="team").train() == started


def test_what_has_changed_is_traced_again(machine: Machine) -> None:
    first = machine.train()
    for changed in (
        {"layers": LAYERS.replace("1.4375", "1.5")},
        {"layers": LAYERS.replace("x + torch", "x - torch")},
        {"script": SCRIPT.replace("torch.relu", "torch.sigmoid")},
        {"script": SCRIPT.replace("x * layers.SCALE", "x + layers.SCALE")},
    ):
        found = machine.train(**changed)
        assert (found["programs"], found["traced"]) == (0, True)
        assert found["losses"] != first["losses"]
    assert machine.train() == {**first, "programs": 1, "traced": False}


def test_functions_after_a_graph_break_start_without_tracing_too(machine: Machine) -> None:
    first = machine.train("breaks")
    assert (first["programs"], first["traced"]) == (0, True)
    assert machine.train("breaks") == {**first, "programs": 2, "traced": False}


def test_explain_says_why_functions_are_traced(machine: Machine) -> None:
    machine.train()
    assert "__main__.Net.forward: traced; it had no record" in explained(machine)
    changed = LAYERS.replace("x + torch", "x - torch")
    assert machine.train(layers=changed)["programs"] == 0
    assert "layers.Head.forward is not what was traced" in explained(machine)
    assert machine.train(layers=changed)["programs"] == 1
    assert "started without tracing: 1; traced: 0\n  __main__.Net.forward: started" in explained(machine)
    assert machine.train(layers=changed, RANK="0", WORLD_SIZE="1")["programs"] == 1
    assert machine.train(layers=changed, RANK="1", WORLD_SIZE="2")["programs"] == 0, (
        "a rank has its own records"
    )


def explained(machine: Machine) -> str:
    command = [sys.executable, "-m", "torchrelay.clients.cli", "explain"]
    done = subprocess.run(command, env=machine.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_trace_shows_where_the_time_of_a_start_goes(machine: Machine, tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "trace.json"
    machine.train(TORCHRELAY_TRACE=str(file), TORCHRELAY_PREFETCH="0")
    traced = spans(file)
    assert inside(traced, "graph") >= {"encode", "key", "wait", "fetch", "verify", "load"}
    assert all(len(span["args"]["trace_id"]) == 32 for span in traced if span["name"] == "fetch")
    assert inside(traced, "function") >= {"lookup", "trace", "encode", "load"}
    machine.train(TORCHRELAY_TRACE=str(file))
    started = spans(file)
    assert inside(started, "function") >= {"lookup", "digests", "guards", "verify", "load", "install"}
    assert {"trace", "encode"}.isdisjoint(span["name"] for span in started)
    for found in (traced, started):
        names = [span["name"] for span in found]
        assert names[0] == "before torchrelay"
        assert "__main__.Net.forward" in names
        assert any(name.startswith("import torch") for name in names)
        assert any(name.startswith("first call of graph ") for name in names)


def test_a_run_that_fails_leaves_its_trace_and_a_trace_that_fails_leaves_the_run(
    machine: Machine, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    with pytest.raises(AssertionError, match="the training fails"):
        machine.train(
            script=SCRIPT + "\nraise SystemExit('the training fails')\n", TORCHRELAY_TRACE=str(file)
        )
    assert "__main__.Net.forward" in [span["name"] for span in spans(file)]
    assert machine.train(TORCHRELAY_TRACE=str(tmp_path))["fallbacks"] == {}


def spans(file: Path) -> list[dict[str, Any]]:
    """The trace's spans in order, each with the kinds of those it lies in. Spans of a thread lie in one another or
    apart."""
    found = [event for event in json.loads(file.read_bytes())["traceEvents"] if event["ph"] == "X"]
    for thread in {span["tid"] for span in found}:
        around: list[dict[str, Any]] = []
        for span in (span for span in found if span["tid"] == thread):
            while around and around[-1]["ts"] + around[-1]["dur"] <= span["ts"]:
                around.pop()
            for outer in around:
                assert span["ts"] + span["dur"] <= outer["ts"] + outer["dur"], (span, outer)
            span["in"] = [outer["cat"] for outer in around]
            around.append(span)
    return found


def inside(found: list[dict[str, Any]], kind: str) -> set[str]:
    return {span["name"] for span in found if span["cat"] == "stage" and kind in span["in"]}


def test_functions_with_symbolic_sizes_start_without_tracing_for_the_sizes_that_they_allow(
    machine: Machine,
) -> None:
    """The script itself compares with eager."""
    script = (
        SCRIPT.replace("for step in range(2):", "for step in map(int, sys.argv[1].split(',')):")
        .replace(
            "torch.linspace(-1, 1, 30).reshape(5, 6)", "torch.linspace(-1, 1, 6 * step).reshape(step, 6)"
        )
        .replace("BREAKS = len(sys.argv) > 1", "BREAKS = False")
    )
    first = machine.train("5,7,9", script=script)
    assert (first["programs"], first["traced"], first["fallbacks"]) == (0, True, {})
    assert machine.train("5,7,9", script=script) == {**first, "programs": 2, "traced": False}
    other = machine.train("11,4", script=script)
    assert (other["programs"], other["traced"]) == (1, False)
    assert machine.train("1", script=script)["traced"]


def test_a_record_that_is_damaged_forged_or_without_artifact_is_not_used(
    machine: Machine, tmp_path: Path
) -> None:
    first = machine.train()
    (program,) = machine.programs
    kept = program.read_bytes()
    program.write_bytes(kept[:40] + bytes([kept[40] ^ 1]) + kept[41:])
    assert machine.train() == first
    assert "its records cannot be read: the file was not written with this user's key" in explained(machine)
    program.write_bytes(kept)
    (tmp_path / "state" / "torchrelay" / "programs.key").write_bytes(bytes(32))
    assert machine.train() == first
    assert machine.train()["programs"] == 1
    for artifact in (tmp_path / "cache" / "artifacts").rglob("*"):
        if artifact.is_file():
            artifact.unlink()
    alone = machine.train(TORCHRELAY_URL="http://127.0.0.1:1", TORCHRELAY_TOKEN="none")
    assert alone == {**first, "fallbacks": {"gateway_unreachable": 1}, "losses": alone["losses"]}


STEPS = """
import json, sys
import torch, torchrelay

def train(compiles):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    groups = [{"params": [*net[0].parameters()], "lr": 0.125}, {"params": [*net[2].parameters()]}]
    optimizer = torch.optim.AdamW(groups, lr=float(sys.argv[1]))
    step = torch.compile(optimizer.step, backend="torchrelay") if compiles else optimizer.step
    for _ in range(4):
        net(torch.linspace(-1, 1, 30).reshape(5, 6)).square().mean().backward()
        step()
        optimizer.zero_grad()
    return [value.tolist() for each in net.parameters() for value in (each, *optimizer.state[each].values())]

found = train(True)
torch.testing.assert_close(found, train(False), rtol=1e-2, atol=1e-4)
run = torchrelay.report()
said = {"stale": run.programs_stale, "fallbacks": run.fallbacks, "found": found}
print(json.dumps({"traced": run.seconds["trace"] > 0, **said}))
"""


def test_a_step_of_an_optimizer_starts_without_tracing_until_the_optimizer_is_another(
    machine: Machine,
) -> None:
    first = machine.train("0.25", script=STEPS)
    assert (first["traced"], first["fallbacks"]) == (True, {})
    assert machine.train("0.25", script=STEPS, PYTHONHASHSEED="7") == {**first, "traced": False}
    assert machine.train("0.25", script=STEPS, TORCHRELAY_PROGRAMS_CHECK="1") == first
    changed = machine.train("0.5", script=STEPS)
    assert changed["traced"] and changed == machine.train("0.5", script=STEPS, TORCHRELAY_PROGRAMS="0")
    assert machine.train("0.5", script=STEPS) == {**changed, "traced": False}
