"""Programs by the product of tables: what is read, where it is kept, where it is read, and how it changes.

A row is the text of a program with its change (`«2.0→3.0»`). Each is recorded by one process, and started by others:
after its change, and after changes that do not matter. Results are compared with eager in the same process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from program_kinds import ASKED, ASKING, HOLDERS, KINDS, PLACES, TARGETS
from program_states import (
    ARGUMENTS,
    MODULE,
    MODULES,
    PAIRS,
    POSITIONS,
    SAME,
    SETTINGS,
    SETTINGS_NEED,
    TENSORS,
    TENSORS_NEED,
)

CHILD = Path(__file__).parent / "program_child.py"
_CHANGE = re.compile("«(.*?)→(.*?)»", re.DOTALL)
_VALUE = re.compile(r"\b[VT]\b")
_OTHER = re.compile(r"OTHER\n(.*?)\nMAIN\n", re.DOTALL)
HEAD = """import abc, collections, contextlib, contextvars, dataclasses, datetime, enum, fractions, functools
import cmath, logging, math, operator, os, pathlib, re, sys, types, typing, uuid, warnings, weakref

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F


def inputs():
    return [(torch.linspace(0.2, 1.2, 4),)]


"""
UNRELATED = """# A comment that is added.
ADDED = [1, 2, 3]


def added(x):
    return x - 7


class Added:
    by = 5


"""


def values() -> Iterator[tuple[str, str]]:
    """Each kind of value in some holders, and at some of the places."""
    places, holders = list(PLACES), list(HOLDERS)
    for number, kind in enumerate(KINDS):
        for step in range(5):
            holder = holders[(number * 5 + step * 7) % len(holders)]
            yield value(kind, holder, places[(number * 3 + step * 5) % len(places)])


def value(kind: str, holder: str, place: str) -> tuple[str, str]:
    made, kept = KINDS[kind], HOLDERS[holder]
    body = PLACES[place].replace("READ", read_of(kept.value.replace("MADE", made.made), made.read))
    define = made.define + kept.define.replace("MADE", made.made)
    return f"{kind}, {holder}, in {place}", with_other(define, body)


def with_other(define: str, body: str) -> str:
    """The text of a module with these definitions; between `OTHER` and `MAIN` that of one that it imports."""
    other = _OTHER.search(body)
    if other is None:
        return f"{define}\n\n{body}"
    return f"OTHER\n{define}\n\n{other[1]}\nMAIN\n{body[other.end() :]}"


def lookups() -> Iterator[tuple[str, str]]:
    """What is absent and then present, and the other way round."""
    places = list(PLACES)
    for number, (target, (kind, define, expression, adds)) in enumerate(TARGETS.items()):
        for step, (way, (read, wants)) in enumerate(ASKED.items()):
            if wants not in kind or (
                kind == "global key" and way in ("length", "text")
            ):  # Dynamo adds its own
                continue
            for direction, change in (("there", f"«→{adds}»"), ("not there", f"«{adds}→»")):
                place = places[(number * 3 + step * 5 + (direction == "there")) % len(places)]
                if kind == "global key" and place == "a forward hook":
                    continue  # there Dynamo breaks the graph at globals(), with a guard on all its keys
                body = PLACES[place].replace("READ", read.replace("TARGET", expression))
                text = with_other(f"{ASKING}{define}{change}\n", body)
                yield f"{target}, {way}, {direction}, in {place}", text


def tensors() -> Iterator[tuple[str, str]]:
    places, holders = list(PLACES), list(HOLDERS)
    for number, (kind, (made, read)) in enumerate(TENSORS.items()):
        for step in range(4):
            holder = holders[(number * 5 + step * 7) % len(holders)]
            place = places[(number * 7 + step * 3) % len(places)]
            kept = HOLDERS[holder]
            asked = read_of(kept.value.replace("MADE", made), read)
            define = TENSORS_NEED + kept.define.replace("MADE", made)
            yield f"{kind}, {holder}, in {place}", with_other(define, PLACES[place].replace("READ", asked))
        for way, (argument, parameter, expression) in ARGUMENTS.items():
            text = (
                f"{TENSORS_NEED}def inputs():\n    return [{argument.replace('TENSOR', made)}]\n\n\n"
                f"def program({parameter}):\n    return torch.ones(2) * ({read_of(expression, read)})\n"
            )
            yield f"{kind}, {way}", text


def read_of(expression: str, read: str) -> str:
    """What is read of a value V or a tensor T, with the expression in its place."""
    return _VALUE.sub(lambda _: expression, read)


def modules() -> Iterator[tuple[str, str]]:
    positions = list(POSITIONS)
    for number, (change, text) in enumerate(MODULES.items()):
        for step in range(4):
            position = positions[(number + step * 2) % len(positions)]
            yield f"{change}, {position}", f"{MODULE}«→{text}»\n{POSITIONS[position]}"


def settings() -> Iterator[tuple[str, str]]:
    places = list(PLACES)
    for number, (setting, (around, read)) in enumerate(SETTINGS.items()):
        for step in range(5):
            place = places[(number * 3 + step * 5) % len(places)]
            body = PLACES[place].replace("READ", f"2 if {read} else 3")
            needs = f"{SETTINGS_NEED}surroundings = «contextlib.nullcontext→{around}»\n\n\n"
            yield f"{setting}, in {place}", needs + with_other("", body)


def identities() -> Iterator[tuple[str, str]]:
    places = list(PLACES)
    for number, (kind, (made, needs)) in enumerate(SAME.items()):
        for step, (pair, (define, one, other)) in enumerate(PAIRS.items()):
            place = places[(number * 5 + step * 3) % len(places)]
            body = PLACES[place].replace("READ", f"2 if {one} is {other} else 3")
            yield f"{kind}, {pair}, in {place}", with_other(needs + define.replace("MADE", made), body)


TABLES: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "values": values,
    "lookups": lookups,
    "tensors": tensors,
    "modules": modules,
    "settings": settings,
    "identities": identities,
}


def rows() -> dict[str, str]:
    return {f"{table}: {name}": row for table, make in TABLES.items() for name, row in make()}


Starts = dict[str, dict[str, Any]]


def start(
    rows: dict[str, str], folder: Path, records: Path, *, changed: bool, unrelated: bool, seed: str
) -> Starts:
    """All rows in a new process, with the records of those before it. changed: after their change. unrelated: after
    changes that do not matter."""
    folder.mkdir()
    modules = {name: f"changed_program_{number}" for number, name in enumerate(rows)}
    for number, (name, module) in enumerate(modules.items()):
        # Dynamo takes functions for one that are equal and begin at the same line of two files.
        lines = "\n" * (number % 199)
        write(
            folder,
            module,
            rows[name].replace("OTHER\n", f"OTHER\n{lines}"),
            changed=changed,
            unrelated=unrelated,
        )
    order = list(modules.values())
    (folder / "names").write_text("\n".join(reversed(order) if unrelated else order))
    command = [sys.executable, str(CHILD), str(folder), str(records), str(folder / "names")]
    more = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": seed}
    more |= {"UNRELATED_VARIABLE": "1"} if unrelated else {}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | more, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answered = json.loads(done.stdout.splitlines()[-1])
    return {name: answered[module] for name, module in modules.items()}


def write(folder: Path, module: str, text: str, *, changed: bool, unrelated: bool) -> None:
    text = _CHANGE.sub(lambda each: each[2 if changed else 1], text)
    other = _OTHER.search(text)
    more = ""
    if other is not None:
        text, more = text[: other.start()] + text[other.end() :], f"import {module}_other as other\n\n\n"
        (folder / f"{module}_other.py").write_text(_file(other[1], unrelated=unrelated))
    (folder / f"{module}.py").write_text(_file(more + text, unrelated=unrelated))


def _file(text: str, *, unrelated: bool) -> str:
    if not unrelated:
        return HEAD + text
    return UNRELATED + HEAD + text.replace("\ndef ", "\n# A comment.\ndef ") + "\n\n" + UNRELATED
