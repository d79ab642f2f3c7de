"""`make flow`: prints the way of a compile in order, as the first lines of its modules' docstrings say it.

Each step has a name. Modules that help a stage and are no step of their own follow the stage's steps.
Reads the sources with `ast` and imports none of them, so it needs no virtual environment.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("clients", "compiler", "service", "workers")
STEPS = (
    (1, "capture", "compiler/graph/capture.py"),
    (2, "request", "compiler/graph/encode.py"),
    (3, "key", "compiler/request/key.py"),
    (4, "send", "clients/gateway/compile_client.py"),
    (4, "route", "service/gateway/routes/graphs/compile.py"),
    (4, "authentication", "service/gateway/http/authentication.py"),
    (4, "limits", "service/admission/admit.py"),
    (5, "cache", "service/cache/artifact_cache.py"),
    (5, "single flight", "service/compile/single_flight.py"),
    (5, "queue", "service/compile/compile_queue.py"),
    (6, "intake", "service/compile/intake.py"),
    (6, "dispatch", "service/compile/flights.py"),
    (6, "pool", "workers/pool.py"),
    (6, "slot", "workers/slot/actor.py"),
    (6, "fork server", "workers/fork_server/server.py"),
    (6, "child", "workers/fork_server/child.py"),
    (7, "rebuild", "compiler/pipeline/rebuilt_graph.py"),
    (7, "equal layers", "compiler/pipeline/equal_layers.py"),
    (8, "compile", "compiler/pipeline/inductor.py"),
    (8, "compare", "compiler/pipeline/verification/verify.py"),
    (9, "sign", "service/signing/keyring.py"),
    (9, "publish", "service/cache/artifact_cache.py"),
    (9, "answer", "service/gateway/routes/graphs/artifacts.py"),
    (10, "fetch", "clients/artifacts/source.py"),
    (10, "verify", "compiler/artifact/signing.py"),
    (10, "load", "clients/artifacts/load.py"),
)
"""Stage, name and module. A module's docstring begins with each stage in which it has a step."""

_STAGES = re.compile(r"Stages? (\d+(?: (?:to|and) \d+)*)([^:]*): ")


class StageDoc(NamedTuple):
    """The first line of a module's docstring. `label`: its stages, such as `7 to 9`."""

    label: str
    text: str

    @property
    def stages(self) -> list[int]:
        numbers = [int(number) for number in re.findall(r"\d+", self.label)]
        return list(range(numbers[0], numbers[1] + 1)) if " to " in self.label else numbers


def stage_docs(root: Path) -> dict[str, StageDoc]:
    """Every module under `root` whose docstring begins with its stages, by path."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"), str(path))) or ""
            line = docstring.partition("\n")[0]
            if match := _STAGES.match(line):
                aspect = f" ({match[2].strip(', ')})" if match[2] else ""
                found[path.relative_to(root).as_posix()] = StageDoc(match[1], line[match.end() :] + aspect)
    return found


def main() -> None:
    docs = stage_docs(Path(__file__).resolve().parent.parent)
    wrong = [module for stage, _, module in STEPS if module not in docs or stage not in docs[module].stages]
    if wrong:
        sys.exit(f"docs/flow.py names a stage that the docstring does not: {', '.join(wrong)}")
    steps = {module for _, _, module in STEPS}
    rows = list(STEPS)
    rows += [(doc.stages[0], "", module) for module, doc in docs.items() if module not in steps]
    width = max(len(module) for module in docs)
    for stage, name, module in sorted(rows, key=lambda row: (row[0], not row[1])):
        print(f"{stage:>2}  {name:<14}  {module:<{width}}  {docs[module].text}")


if __name__ == "__main__":
    main()
