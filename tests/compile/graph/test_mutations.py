"""No two programs for which Inductor generates different code have the same key; what reaches no code keeps the key.

`python tests/compile/parts/mutations.py` prints all changes as a table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import programs
import pytest
import torch
from generated_code import Seen
from mutations import KEEPS, MATTERS, SAME, Change, unchanged
from torchrelay.compiler.graph import ambient

CODE: dict[tuple[str, ...], tuple[str, ...]] = {}
"""The keys of a program's graphs -> the code of the first program here that had them."""


@pytest.fixture(autouse=True)
def _pytorchs_default_of_opt_einsum() -> None:
    """A compile in this process, of another test, leaves what its request had."""
    if torch.backends.opt_einsum.is_available():
        torch.backends.opt_einsum.set_flags(True, "auto")


def check_code(seen: Seen) -> None:
    if not seen.refused and all(seen.code):
        assert CODE.setdefault(seen.keys, seen.code) == seen.code, (
            "two programs with one key and different code"
        )


@pytest.mark.parametrize("name", MATTERS)
def test_what_can_change_code_changes_the_key_or_is_refused(name: str) -> None:
    change = MATTERS[name]
    before = unchanged(change.base)
    assert before.keys and not before.refused
    check_code(before)
    changed = change.see()
    assert changed.keys != before.keys
    assert not any("unexpected" in item for item in changed.keys)
    check_code(changed)
    after = Change(base=change.base, generate=False).see()
    assert after.keys == before.keys, "the change puts everything back"


@pytest.mark.parametrize("name", KEEPS)
def test_what_reaches_no_code_keeps_the_key(name: str) -> None:
    before, changed = unchanged(KEEPS[name].base), KEEPS[name].see()
    assert changed.keys == before.keys
    assert changed.code == before.code


@pytest.mark.parametrize(
    ("one", "other"), [(one, other) for _, one, other in SAME], ids=[row[0] for row in SAME]
)
def test_two_ways_to_say_the_same_have_one_key(one: Change, other: Change) -> None:
    first, second = one.see(), other.see()
    assert first == second
    assert first != unchanged(one.base)


@pytest.mark.parametrize("base", ["model", "softmax", "views"])
def test_the_first_size_of_a_dynamic_dimension_keeps_the_key(base: str) -> None:
    """As in PyTorch's own caches. Its code may differ, in threads for instance, and is right for all that its guards
    allow."""

    def keys(size: int) -> tuple[str, ...]:
        _, inputs = programs.PROGRAMS[base]
        sized = [torch.ones(size, *given.shape[1:], requires_grad=given.requires_grad) for given in inputs()]
        return Change(base=base, dynamic=True, inputs=lambda: sized, generate=False).see().keys

    first = keys(8)
    assert [len(item) for item in first] == [64]
    assert {keys(size) for size in (12, 2, 500)} == {first}


def test_there_are_enough_changes() -> None:
    assert len(MATTERS) >= 60
    assert len(KEEPS) + len(SAME) >= 20


@pytest.mark.parametrize(
    "name",
    [
        "SDPA, priority of kernels",
        "SDPA by math alone, reduced precision",
        "autocast's default dtype",
        "opt_einsum.enabled",
        "opt_einsum.strategy",
    ],
)
def test_a_worker_is_set_to_what_the_client_has(name: str) -> None:
    gm = torch.fx.symbolic_trace(programs.chain_of_products)
    before = ambient.read_ambient("cpu", [], gm)
    with MATTERS[name].around():
        client = ambient.read_ambient("cpu", [], gm)
    assert client != before
    try:
        with ambient.apply_ambient(client):
            worker = ambient.read_ambient("cpu", [], gm)
    finally:
        with ambient.apply_ambient(before):
            pass
    assert worker == client
    assert ambient.read_ambient("cpu", [], gm) == before


IN_A_PROCESS = """
import json, sys
sys.path.insert(0, {folder!r})
import mutations
seen = mutations.Change(base="softmax").see()
print(json.dumps([seen.keys, seen.code]))
"""


def seen_in_a_process(**environment: str) -> Seen:
    folder = str(Path(__file__).parents[1] / "parts")
    run = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS.format(folder=folder)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    keys, code = json.loads(run.stdout.splitlines()[-1])
    return Seen(tuple(keys), tuple(code))


@pytest.mark.parametrize("setting", ["ATEN_CPU_CAPABILITY=default", "TORCHINDUCTOR_VEC_ISA_OK=0"])
def test_vector_instructions_that_the_environment_takes_away_are_in_the_key_or_refused(setting: str) -> None:
    name, _, value = setting.partition("=")
    without = seen_in_a_process(**{name: value})
    assert without.keys != unchanged("softmax").keys
    check_code(without)
