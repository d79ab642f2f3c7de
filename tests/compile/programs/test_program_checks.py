"""A start that checks its records traces, whatever they say, and compares: a record that is stale although its own
conditions hold is found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from program_calls import INPUTS, SETTINGS
from program_changes import Change
from program_modules import EFFECTS, MODULES
from program_objects import CLASSES
from program_registered import REGISTERED
from program_sizes import SIZES
from program_starts import Recorded, Start, from_records, without_compiler
from torchrelay.compiler import decoding
from torchrelay.compiler.artifact.programs.records import FrameProgram
from torchrelay.compiler.torch_internals.dynamo.programs import comparison

SCALED = (
    "import torch\n\nSCALE = 2.0\n\n\ndef inputs():\n    return [(torch.ones(3),)]\n\n\ndef program(x):\n"
)
SCALED += "    return x * SCALE\n"


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Start]:
    return lambda programs, text, **more: from_records(programs, tmp_path / "program.py", text, **more)


def blind(programs: Recorded, name: str) -> None:
    """As records would be if Dynamo had no guard on a global variable, and nothing else asked for it."""
    for kept in programs._kept.values():
        kept[:] = [
            msgspec.msgpack.encode(_without(decoding.from_msgpack(each, type=FrameProgram), name))
            for each in kept
        ]


def _without(program: FrameProgram, name: str) -> FrameProgram:
    position = next(at for at, each in enumerate(program.sources) if name in each.values.values())
    guards = [each for each in program.guards if each.source != position]
    assert len(guards) < len(program.guards)
    return msgspec.structs.replace(program, guards=guards)


@pytest.mark.parametrize(
    "change",
    [
        SIZES["another size, the other branch"],
        SIZES["int and a branch"],
        EFFECTS["graph break with a closure, callee edited"],
        EFFECTS["graph break under a context manager"],
        EFFECTS["graph break in a comprehension, callee edited"],
        MODULES["second forward hook"],
        MODULES["weights tied"],
        REGISTERED["the class with a registered one"],
        SETTINGS["read: autocast"],
        INPUTS["two dtypes in another order"],
        CLASSES["frozen dataclass"],
        CLASSES["namedtuple returned, field's default"],
    ],
)
def test_a_new_trace_of_the_same_program_makes_its_records_again(change: Change, start: Any) -> None:
    programs, text = Recorded(), change.before()
    first = start(programs, text)
    kept = {key: list(each) for key, each in programs._kept.items() if each}
    programs.checking = True
    second = start(programs, text)
    assert programs.checks_now == [""] * sum(map(len, kept.values())) != []
    assert (second.results, second.graphs) == (first.results, first.graphs)
    assert (programs.made_now, programs.used_now) == (0, 0)
    assert {key: each for key, each in programs._kept.items() if each} == kept


def test_a_record_that_has_become_stale_unseen_is_found_and_gives_no_result(
    start: Any, tmp_path: Path
) -> None:
    programs, changed = Recorded(), SCALED.replace("2.0", "3.0")
    start(programs, SCALED)
    blind(programs, "SCALE")
    wanted = without_compiler(tmp_path / "program.py", changed).results
    assert start(programs, changed).results != wanted, "the record is not stale"
    programs.checking = True
    assert start(programs, changed).results == wanted
    (difference,) = programs.checks_now
    assert "graphs (" in difference and "CONSTANT_MATCH on G['SCALE']" in difference
    programs.checking = False
    after = start(programs, changed)
    assert (after.how, after.results) == ("used", wanted)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("x * 2, 'a'", "x * 2, 'b'", "constants ('a' in the function"),
        ("x * 2, x * 3", "x * 3, x * 2", "graphs ("),
        ("[x * 2, 1]", "(x * 2, 1)", "bytecode (the function"),
        ("x * 2, SCALE", "x * 2, len(TABLE)", "guards (BUILTIN_MATCH on G['__builtins_dict___1']['len']"),
        ("x * 2", "x * 2 if not hasattr(torch, 'extra_name') else x", "questions (G['torch']"),
    ],
)
def test_what_differs_is_named(before: str, after: str, named: str, start: Any) -> None:
    records = []
    for text in (before, after):
        programs = Recorded()
        start(programs, SCALED.replace("x * SCALE", text).replace("SCALE =", "TABLE = {}\nSCALE =", 1))
        ((kept,),) = programs._kept.values()
        records.append(decoding.from_msgpack(kept, type=FrameProgram))
    assert named in str(comparison.differing(*records))


def test_a_record_of_other_symbolic_sizes_is_not_compared(start: Any) -> None:
    """What Dynamo makes symbolic depends on the sizes that this process has seen: both are right."""
    text = Change(
        text="def inputs():\n    return [(torch.ones(n),) for n in ALL]\n\n\n"
        "def program(x):\n    return x * x.shape[0]\n"
    ).before()
    programs = Recorded()
    for sizes in ("[3]", "[5]"):
        start(programs, text.replace("ALL", sizes))
    programs.checking = True
    found = start(programs, text.replace("ALL", "[3, 5]"))
    assert programs.checks_now == [""]
    assert found.graphs == 2


def test_a_record_of_a_number_that_varies_is_not_stale(start: Any) -> None:
    text = "import torch\n\n\ndef inputs():\n    return [(torch.ones(3), 1), (torch.ones(3), 2)]\n\n\n"
    text += "def program(x, n):\n    return x + n\n"
    programs = Recorded()
    start(programs, text)
    programs.checking = True
    assert start(programs, text).graphs == 1
    assert programs.checks_now == [""]


def test_a_function_that_is_not_compiled_any_more_has_a_stale_record(start: Any) -> None:
    text = SCALED.replace("return x * SCALE", "return x * SCALE if SCALE > 2 else 5")
    programs = Recorded()
    start(programs, text.replace("2.0", "3.0"))
    blind(programs, "SCALE")
    programs.checking = True
    assert start(programs, text).results[0] == "5"
    assert len(programs.checks_now) == 1 and programs.checks_now[0] != ""


FILTERED = """
import torch

SCALE = 2.0


def guard_filter(entries):
    return ["SCALE" not in each.name for each in entries]


def inputs():
    global SCALE
    yield (torch.ones(3),)
    SCALE = 5.0
    yield (torch.ones(3),)


def program(x):
    return x * SCALE
"""


def test_a_start_from_a_record_has_the_users_filter_of_guards(start: Any) -> None:
    """Without it, the guard that was dropped is there again, and the second call is traced."""
    programs = Recorded()
    first, second = (start(programs, FILTERED) for _ in range(2))
    assert (first.how, first.graphs, second.how, second.graphs) == ("traced", 1, "used", 0)
    assert first.results == second.results
    other = start(programs, FILTERED.replace('"SCALE" not in each.name', "True"))
    assert (other.how, other.graphs) == ("traced", 2)


def test_a_function_whose_filter_cannot_be_compared_has_no_record(start: Any) -> None:
    text = FILTERED.replace(
        "def inputs",
        "guard_filter = type('Filter', (), {'__call__': staticmethod(guard_filter)})()\n\n\ndef inputs",
        1,
    )
    programs = Recorded()
    assert [start(programs, text).how for _ in range(2)] == ["traced", "traced"]
    assert "its records have no key" in programs.reasons[0]


def test_settings_of_dynamo_by_the_environment_are_in_the_key() -> None:
    code = (
        "from torchrelay.clients.artifacts.programs import process_programs as p; print(p._dynamo_entries())"
    )
    environments = {**os.environ}, {**os.environ, "TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS": "1"}
    one, other = (
        subprocess.run(
            [sys.executable, "-c", code], env=each, capture_output=True, text=True, check=True
        ).stdout
        for each in environments
    )
    assert "capture_scalar_outputs=False" in one
    assert other == one.replace("capture_scalar_outputs=False", "capture_scalar_outputs=True")
