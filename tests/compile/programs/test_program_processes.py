"""A record and what differs from process to process: the order of sets, hashes, environment variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrelay.compiler.torch_internals.dynamo.programs import guards

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
CHILD = Path(__file__).parents[1] / "parts" / "program_child.py"
# ruff: noqa: E501 (a row is a program)

HEAD = """
import enum
import os

import torch
from torch import nn


def inputs():
    return [(torch.linspace(0.2, 1.2, 8),)]


"""
UNROLLED = "    for n in {}:\n        x = getattr(torch, n)(x)\n    return x\n"
NAMES = '{"sin", "cos", "tanh", "exp", "sigmoid"}'
ORDERS = {
    "a global set of texts": f"NAMES = {NAMES}\n\n\ndef program(x):\n" + UNROLLED.format("NAMES"),
    "a global frozenset of texts": f"NAMES = frozenset({NAMES})\n\n\ndef program(x):\n"
    + UNROLLED.format("NAMES"),
    "a set of texts in the code": "def program(x):\n" + UNROLLED.format(NAMES),
    "a set that is made in the function": "NAMES = ['sin', 'cos', 'tanh', 'exp', 'sigmoid', 'tan']\n\n\ndef program(x):\n"
    + UNROLLED.format("set(NAMES) - {'tan'}"),
    "a set in an attribute": f"class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.names = {NAMES}\n\n"
    "    def forward(self, x):\n        for n in self.names:\n            x = getattr(torch, n)(x)\n        return x\n\n\nprogram = M()\n",
    "a set of a class": f"class A:\n    names = {NAMES}\n\n\ndef program(x):\n" + UNROLLED.format("A.names"),
    "a set that is a default": f"def helper(x, names=frozenset({NAMES})):\n"
    + UNROLLED.format("names")
    + "\n\ndef program(x):\n    return helper(x)\n",
    "a list of a set": f"NAMES = {NAMES}\n\n\ndef program(x):\n" + UNROLLED.format("list(NAMES)"),
    "a list with a set": f"NAMES = {NAMES}\n\n\ndef program(x):\n    found = ['tan']\n    found += NAMES\n"
    + UNROLLED.format("[*found, *NAMES]"),
    "keys of a set": f"NAMES = {NAMES}\n\n\ndef program(x):\n" + UNROLLED.format("dict.fromkeys(NAMES)"),
    "a set that is taken apart": f"NAMES = {NAMES}\n\n\ndef program(x):\n    names = set(NAMES)\n    while names:\n        x = getattr(torch, names.pop())(x)\n    return x\n",
    "a union of sets": "ONE, OTHER = {'sin', 'cos', 'tanh'}, {'exp', 'sigmoid'}\n\n\ndef program(x):\n"
    + UNROLLED.format("ONE | OTHER"),
    "a set of members of an enum": "class Kind(enum.Enum):\n    SIN = 'sin'\n    COS = 'cos'\n    TANH = 'tanh'\n    EXP = 'exp'\n\n\nKINDS = set(Kind)\n\n\n"
    "def program(x):\n    for kind in KINDS:\n        x = getattr(torch, kind.value)(x)\n    return x\n",
    "a set of a list, with another set": f"NAMES = {NAMES}\n\n\ndef program(x):\n    names = set(['tan'])\n    names |= NAMES - {{'exp'}}\n"
    + UNROLLED.format("names"),
    "a set of a list that is taken apart": "LIST = ['sin', 'cos', 'tanh', 'exp', 'sigmoid']\n\n\ndef program(x):\n    names = set(LIST)\n    while names:\n        x = getattr(torch, names.pop())(x)\n    return x\n",
    "a difference of keys": "NAMES = ['sin', 'cos', 'tanh', 'exp', 'sigmoid', 'tan']\n\n\ndef program(x):\n"
    + UNROLLED.format("dict.fromkeys(NAMES).keys() - {'tan': 1}.keys()"),
    "the text of a set of a list": "LIST = ['sin', 'cos', 'tanh', 'exp', 'sigmoid']\n\n\ndef program(x):\n    return x * str(set(LIST)).index('sin')\n",
    "the text of a set": f"NAMES = {NAMES}\n\n\ndef program(x):\n    return x * str(NAMES).index('sin')\n",
}
HASHES = {
    "hash of a text": "def program(x):\n    return x * (hash('abc') % 1000 + 1)\n",
    "hash of a tuple": "def program(x):\n    return x * (hash(('abc', 1)) % 1000 + 1)\n",
    "hash by its method": "def program(x):\n    return x * ('abc'.__hash__() % 1000 + 1)\n",
    "hash of an object of its own": "class A:\n    def __hash__(self):\n        return hash('abc')\n\n\nbox = A()\n\n\ndef program(x):\n    return x * (hash(box) % 1000 + 1)\n",
}
NET = (
    "torch.manual_seed(0)\nnet = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))\n"
    "weights = {name: value.detach() * 2 for name, value in net.named_parameters()}\n\n\n"
)
PLAIN = {
    "membership in a set of texts": f"NAMES = {NAMES}\n\n\ndef program(x):\n    return x * 2 if 'sin' in NAMES and 'tan' not in NAMES else x * 3\n",
    "membership in a set in the code": "KIND = 'sin'\n\n\ndef program(x):\n    return x * 2 if KIND in {'sin', 'cos'} else x * 3\n",
    "hash of a number": "def program(x):\n    return x * (hash(7) % 1000 + 1)\n",
    "a set of numbers": "NUMBERS = {3, 5, 8}\n\n\ndef program(x):\n    for n in NUMBERS:\n        x = x * n + 1\n    return x\n",
    "a set of a list": "LIST = ['sin', 'cos', 'tanh', 'sin', 'exp']\n\n\ndef program(x):\n    found = {n: getattr(torch, n)(x) for n in set(LIST)}\n    return x + sum(found[n] * len(n) for n in LIST)\n",
    "length of a set of texts": f"NAMES = {NAMES}\n\n\ndef program(x):\n    return x * len(NAMES)\n",
    "truth of a set of texts": f"NAMES = {NAMES}\n\n\ndef program(x):\n    return x * (2 if NAMES else 3) * (5 if not NAMES else 7)\n",
    "membership in a set that may be missing": f"KINDS = {{1: frozenset({NAMES})}}\n\n\ndef program(x):\n    found, none = KINDS.get(1), KINDS.get(2)\n    return x * (2 if found and 'sin' in found else 3) * (2 if none and 'sin' in none else 3)\n",
    "a module for each sample": f"{NET}def program(x):\n    return torch.vmap(net)(x.view(2, 4)).flatten()\n",
    "gradients of each sample": f"{NET}def loss(weights, x):\n    return torch.func.functional_call(net, weights, (x,)).square().sum()\n\n\n"
    "def program(x):\n    each = torch.vmap(torch.func.grad(loss), (None, 0))(weights, x.view(2, 4))\n    return torch.cat([each[name].flatten() for name in weights])\n",
    "a functional call with tied weights": f"{NET}net[2].weight = net[0].weight\nnet[2].bias = net[0].bias\ndel weights['2.weight'], weights['2.bias']\n\n\n"
    "def program(x):\n    return torch.func.functional_call(net, weights, (x.view(2, 4),)).flatten()\n",
}
BROKEN = {
    *(f"hash of {value}" for value in ("a text", "a tuple", "an object of its own", "a number")),
    "gradients of each sample",
    "a functional call with tied weights",
}
"""Dynamo does not trace them as a whole before PyTorch 2.13: only that their results are right is tested there."""

ENVIRONMENT = {
    "environment": "def program(x):\n    return x * float(os.environ.get('CHANGED_PROGRAM', '3'))\n",
    "nothing": "def program(x):\n    return x * 7\n",
}
Starts = dict[str, dict[str, Any]]


def start(folder: Path, programs: dict[str, str], **environment: str) -> Starts:
    """All programs in a new process, with the records of those before it."""
    modules = {name: f"changed_program_{number}" for number, name in enumerate(programs)}
    for name, module in modules.items():
        (folder / f"{module}.py").write_text(HEAD + programs[name])
    (folder / "names").write_text("\n".join(modules.values()))
    command = [sys.executable, str(CHILD), str(folder), str(folder), str(folder / "names")]
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: found[module] for name, module in modules.items()}


def is_right(found: dict[str, Any]) -> bool:
    return all(compiled == pytest.approx(eager, rel=1e-5) for compiled, eager in found["results"])


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Starts, Starts]:
    """A process, and one with another hash seed. Dynamo itself takes some sets in an order that Python does not."""
    folder, programs = tmp_path_factory.mktemp("seeds"), {**ORDERS, **HASHES, **PLAIN}
    return start(folder, programs, PYTHONHASHSEED="1"), start(folder, programs, PYTHONHASHSEED="2")


def compared(name: str, seeds: tuple[Starts, Starts]) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = (each[name] for each in seeds)
    if name in BROKEN and TORCH < (2, 13):
        assert is_right(second)
        pytest.skip("PyTorch does not trace it as a whole")
    return first, second


@pytest.mark.parametrize("name", [*ORDERS, *HASHES])
def test_a_process_with_another_hash_seed_traces_what_depends_on_it(
    name: str, seeds: tuple[Starts, Starts]
) -> None:
    first, second = compared(name, seeds)
    assert second["started"] == 0, first


@pytest.mark.parametrize("name", PLAIN)
def test_a_process_with_another_hash_seed_does_not_trace_what_does_not(
    name: str, seeds: tuple[Starts, Starts]
) -> None:
    first, second = compared(name, seeds)
    assert second["started"] == 1, (first["reasons"], second["reasons"])
    assert is_right(second)


def test_a_process_with_another_environment_traces_what_asks_for_it(tmp_path: Path) -> None:
    absent, present = start(tmp_path, ENVIRONMENT), start(tmp_path, ENVIRONMENT, CHANGED_PROGRAM="5")
    assert [each["started"] for each in absent.values()] == [0, 0]
    assert [each["started"] for each in present.values()] == [0, 1], present
    assert is_right(present["environment"])


def test_a_process_with_more_threads_traces_what_has_kernels_on_a_cpu(tmp_path: Path) -> None:
    before = start(tmp_path, {"nothing": ENVIRONMENT["nothing"]})["nothing"]
    after = start(tmp_path, {"nothing": ENVIRONMENT["nothing"]}, OMP_NUM_THREADS="2")["nothing"]
    assert (before["started"], after["started"]) == (0, 0)
    assert any("the number of threads" in reason for reason in after["reasons"]), after
    again = [start(tmp_path, {"nothing": ENVIRONMENT["nothing"]}, OMP_NUM_THREADS=each) for each in "12"]
    assert [each["nothing"]["started"] for each in again] == [1, 1]


def test_the_number_of_threads_is_no_condition_of_a_trace() -> None:
    """Graphs with all tensors on a GPU start on a machine with other processors."""
    before = torch.get_num_threads()
    states = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            states.append(guards.EXPECTED["GRAD_MODE"](None, {}))
    finally:
        torch.set_num_threads(before)
    assert states[0] == states[1]
    with torch.no_grad():
        assert guards.EXPECTED["GRAD_MODE"](None, {}) != states[0]
