"""Programs of entries of PyTorch's databases: recorded by one process, started without tracing by another.

A start looks at the records of the entry's other calls first, and of another entry's, then at its own. What starts so
must be what eager computes; and a call that has a record must not be traced. Graphs run as requests describe them.

python tests/compile/parts/database_starts.py FOLDER [DATABASE ...] goes on where a run in this folder has ended.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec
import program_child
import torch
from database_cases import DATABASES, Call, Case, seed
from database_variants import Around, copied, program_of, variants
from msgspec import Struct
from torch import nn
from torch.utils import _pytree
from torchrelay.clients.artifacts.programs.store import ProgramStore
from torchrelay.compiler import decoding
from torchrelay.compiler.artifact.programs.records import FrameProgram
from torchrelay.compiler.torch_internals.dynamo.programs import frames, operators

STARTED_FROM = ("operators", "modules")
LAZY = "modules/nn.Lazy"
"""Modules that tracing itself changes: it gives them their parameters, and another class."""
SAMPLES = 2
"""Calls of an entry that are recorded; the first one also with symbolic sizes, and with gradients."""
VARIANTS = 20
"""Other calls that are started from these records, for each recorded one that is the first of its kind."""
GROUPS = 6
SECONDS = 3000
"""For all entries of one process."""
COUNTS = ("recorded", "used", "variants", "variants_used")
_UNSET = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
)
"""Operators whose results have no values."""
Phase = Literal["record", "start"]
Way = Literal["eager", "traced"]


class Started(Struct):
    """What became of an entry. calls: how many there are; recorded: how many have a record of each function; used: how
    many started without tracing; without: which have no record, and why; vain: which were traced though they have one;
    stale: what started and is wrong."""

    name: str
    calls: int = 0
    recorded: int = 0
    used: int = 0
    variants: int = 0
    variants_used: int = 0
    without: list[str] = []
    vain: list[str] = []
    stale: list[str] = []
    differs: list[str] = []
    """Calls for which Dynamo gives something else than eager when it traces, too."""
    crashed: str = ""


class _Traces(BaseException):
    """A call would be traced: its result shows nothing."""


class Programs(program_child.Programs):
    """Programs of a folder for each call. others: folders that are looked at before, and nothing is kept there."""

    def __init__(self, folder: Path, state: Path, others: list[Path], *, stops: bool = False) -> None:
        super().__init__(folder, state)
        self._folders = [*others, folder] if others or stops else []
        self._state = state
        self._stops = stops

    def find(self, key: str) -> Iterator[FrameProgram]:
        for folder in self._folders:
            yield from _kept(folder, self._state, key)
        if self._stops and not self.started:
            raise _Traces


_files: dict[tuple[Path, str], list[FrameProgram]] = {}


def _kept(folder: Path, state: Path, key: str) -> list[FrameProgram]:
    if (folder, key) not in _files:
        _files[folder, key] = list(ProgramStore(folder, state).variants(key))
    return _files[folder, key]


class Recorded(Struct):
    """A call of an entry that is recorded. dynamic: what torch.compile is told of sizes."""

    label: str
    call: Call
    dynamic: bool | None = None


def recorded_calls(case: Case) -> Iterator[Recorded]:
    """The same ones in each process."""
    dtype = case.dtypes[0]
    for requires_grad, count in ((False, SAMPLES), (True, 1)):
        seed()
        with contextlib.suppress(Exception):  # of the database: no such sample
            for number, call in enumerate(itertools.islice(case.samples(dtype, requires_grad), count)):
                label = f"{number} requires_grad" if requires_grad else str(number)
                yield Recorded(label, call)
                if number == 0 and not requires_grad:
                    yield Recorded(f"{label} dynamic", call, True)


def record(case: Case, folder: Path, state: Path) -> Started:
    found = Started(case.name)
    for number, each in enumerate(recorded_calls(case)):
        found.calls += 1
        programs = Programs(folder / str(number), state, [])
        answer(each.call, programs, each.dynamic)
        if programs.recorded and not programs.reasons and not case.name.startswith(LAZY):
            found.recorded += 1
            (folder / str(number) / "whole").touch()
        elif programs.reasons:
            found.without.append(f"{each.label}: {programs.reasons[0]}")
    return found


def start(case: Case, folder: Path, state: Path, another: Path | None) -> Started:
    _files.clear()
    found = Started(case.name)
    calls = list(recorded_calls(case))
    folders = [folder / str(number) for number in range(len(calls))]
    strangers = [another / "0"] if another is not None else []
    for own, each in zip(folders, calls, strict=True):
        found.calls += 1
        programs = Programs(own, state, [*strangers, *(other for other in folders if other != own)])
        _compare(found, each.label, each.call, programs, each.dynamic)
        if programs.recorded and (own / "whole").exists():
            found.vain.append(f"{each.label}: {programs.reasons}")
        found.used += programs.started > 0 and not programs.recorded
    for each in [each for each in calls if each.label.startswith("0")]:
        every = list(variants(each.call))
        for label, call, around in random.Random(case.name).sample(
            every, min(VARIANTS, len(every)) // (2 if each.dynamic else 1)
        ):
            found.variants += 1
            programs = Programs(folder / "none", state, [*strangers, *folders], stops=True)
            _compare(found, f"{each.label}, {label}", call, programs, each.dynamic, around)
            found.variants_used += programs.started > 0
    return found


def _compare(
    found: Started,
    label: str,
    call: Call,
    programs: Programs,
    dynamic: bool | None,
    around: Around = contextlib.nullcontext,
) -> None:
    try:
        given = answer(call, programs, dynamic, around)
    except _Traces:
        return
    if not programs.started:
        return
    values = found.name.partition("/")[2].partition(".")[0] not in _UNSET
    wanted = answer(call, "eager", dynamic, around)
    if difference := differing(given, wanted, values):
        traced = answer(call, "traced", dynamic, around)
        if differing(given, traced, values):
            found.stale.append(
                f"{label}: {difference}; traced: {differing(traced, wanted, values) or 'as eager'}"
            )
        else:
            found.differs.append(f"{label}: {difference}")


class Answer(Struct):
    """What a call gives: its result, arguments and gradients after it; or the error that it raises."""

    values: Any
    error: str = ""


def answer(
    call: Call, how: Programs | Way, dynamic: bool | None, around: Around = contextlib.nullcontext
) -> Answer:
    """What a call gives: compiled with these programs, or traced, or eagerly."""
    with contextlib.suppress(Exception):  # what cannot be copied is used as it is
        call = copied(call)
    program = program_of(call.function)
    with contextlib.ExitStack() as undo:
        if how != "eager":
            torch.compiler.reset()
            program = torch.compile(program, backend=program_child.uncompiled, dynamic=dynamic)
        if isinstance(how, Programs):
            undo.callback(frames.install(how))
        try:
            with around():
                torch.default_generator.manual_seed(0)
                result = program(*call.args, **call.kwargs)
            return Answer(_with_gradients(call, result))
        except Exception as error:
            return Answer(None, f"{type(error).__name__}: {str(error)[:300]}")


def _with_gradients(call: Call, result: Any) -> Any:
    given = [each for each in _pytree.tree_leaves((call.args, call.kwargs)) if isinstance(each, torch.Tensor)]
    learned = list(call.function.parameters()) if isinstance(call.function, nn.Module) else []
    state = list(call.function.buffers()) if isinstance(call.function, nn.Module) else []
    leaves = [
        each
        for each in _pytree.tree_leaves(result)
        if isinstance(each, torch.Tensor)
        and each.requires_grad
        and each.is_floating_point()
        and each.layout is torch.strided
    ]
    memories = {
        each.untyped_storage()._cdata: n for n, each in enumerate(given) if each.layout is torch.strided
    }
    shared = [
        memories.get(each.untyped_storage()._cdata)
        if isinstance(each, torch.Tensor) and each.layout is torch.strided
        else None
        for each in _pytree.tree_leaves(result)
    ]
    if leaves:
        torch.autograd.backward([each.sum() for each in leaves])
    return result, given, state, shared, [each.grad for each in (*given, *learned) if each.is_leaf]


def differing(one: Answer, other: Answer, values: bool) -> str:
    """How two answers differ, in words, or ''."""
    if one.error or other.error:
        return "" if one.error and other.error else f"raises {one.error!r}, {other.error!r}"
    (ones, spec), (others, other_spec) = _pytree.tree_flatten(one.values), _pytree.tree_flatten(other.values)
    if spec != other_spec:
        return f"{spec} is {other_spec}"
    for a, b in zip(ones, others, strict=True):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if difference := _tensors_differ(a, b, values):
                return difference
        elif type(a) is not type(b) or repr(a) != repr(b):
            return f"{a!r} is {b!r}"
    return ""


def _tensors_differ(a: torch.Tensor, b: torch.Tensor, values: bool) -> str:
    for what in ("dtype", "shape", "device", "layout", "requires_grad"):
        if getattr(a, what) != getattr(b, what):
            return f"{what} {getattr(a, what)} is {getattr(b, what)}"
    if a.layout is torch.strided and a.stride() != b.stride():
        return f"strides {a.stride()} are {b.stride()}"
    if not values or a.device.type == "meta" or a.is_quantized:
        return ""
    try:
        torch.testing.assert_close(a.detach(), b.detach(), equal_nan=True, rtol=0, atol=0)
    except AssertionError as error:
        return str(error).replace("\n", " ")[:200]
    return ""


def child(phase: str, root: Path, out: Path, names: list[str]) -> None:
    """Appends a line for each entry that begins, and one when it has ended."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    private: Any = operators
    private._check_kernels = functools.cache(private._check_kernels)  # nobody registers a kernel here
    wanted = {name.partition("/")[0] for name in names}
    cases = {case.name: case for database in wanted for case in DATABASES[database]()}
    another: Path | None = None
    with out.open("ab", buffering=0) as file:
        for name in names:
            folder = root / "records" / _file_name(name)
            file.write(msgspec.json.encode(Started(name, crashed="it has not ended")) + b"\n")
            if phase == "record":
                found = record(cases[name], folder, root)
            else:
                found = start(cases[name], folder, root, another)
            another = folder
            file.write(msgspec.json.encode(found) + b"\n")


def run(root: Path, names: list[str], phase: Phase) -> list[Started]:
    """All these entries, in as many processes as it takes: where an entry ends one, another goes on after it."""
    root.mkdir(parents=True, exist_ok=True)
    out = root / f"{phase}-{_file_name(names[0])}.jsonl"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1" if phase == "record" else "2"}
    tried: set[str] = set()
    found = _read(out)
    while left := [
        name for name in names if name not in found or (found[name].crashed and name not in tried)
    ]:
        command = [sys.executable, __file__, "child", phase, str(root), str(out), *left]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        found = _read(out)
        crashed = {name for name in left if name in found and found[name].crashed} - tried
        if ended.returncode and not crashed:
            raise RuntimeError(ended.stderr[-4000:])
        tried |= crashed
    return [found[name] for name in names]


def _file_name(name: str) -> str:
    return name.replace("/", "_").replace(" ", "_")


def _read(out: Path) -> dict[str, Started]:
    """By entry, the last line of each."""
    lines = out.read_bytes().splitlines() if out.exists() else []
    return {each.name: each for each in (decoding.from_json(line, type=Started) for line in lines)}


def all_names(databases: Iterable[str]) -> list[str]:
    return [case.name for database in databases for case in DATABASES[database]()]


def main(root: Path, databases: list[str]) -> int:
    names = all_names(databases)

    def both(group: list[str]) -> list[Started]:
        return [*run(root, group, "record"), *run(root, group, "start")]

    total: Counter[str] = Counter()
    with ThreadPoolExecutor(2) as pool:
        for each in itertools.chain(*pool.map(both, (names[first::GROUPS] for first in range(GROUPS)))):
            total.update({name: getattr(each, name) for name in COUNTS})
            for kind in ("crashed", "stale", "vain", "differs", "without"):
                if what := getattr(each, kind):
                    print(kind, each.name, what, sep=" | ", flush=True)
    print(len(names), "entries", dict(total))
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "child":
        child(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    else:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(STARTED_FROM)))
