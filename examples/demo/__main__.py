"""The demo: real training scripts, locally, through the service, and as a teammate with no compiler.

    torchrelay demo          (or: python -m torchrelay.examples.demo)

Starts a private service, runs every example three ways in fresh processes, prints one table, saves the
same as out/demo.png, and ends with status 1 if a promise did not hold.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torchrelay.examples.demo.figure import draw
from torchrelay.examples.demo.runs import (
    EXAMPLES,
    FIRST,
    LOCAL,
    STAGES,
    TEAMMATE,
    Example,
    Run,
    RunFailed,
    check,
    child_folder,
    run_example,
)
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService, ServiceDidNotStart
from torchrelay.examples.harness.table import print_table

TOLERANCE = 1e-5
"""Largest relative difference of a step's loss from local compilation's (float32 rounds at 6e-8)."""

COLUMNS = (
    "",
    "first step s",
    "step ms",
    "final loss",
    "hits",
    "misses",
    *(f"{s} s" for s in STAGES),
    "rest s",
)


class _Narrator:
    """Prints progress, with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._last = ""

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)

    def line(self, text: str) -> None:
        print(f"             {text}", flush=True)

    def wait(self, seconds: float, text: str) -> None:
        if text != self._last:
            self.say(text)
            self._last = text


def run_three_ways(
    example: Example, root: Path, service: PrivateService, narrator: _Narrator, tolerance: float
) -> tuple[list[Run], bool]:
    """The example's three runs, and whether all promises were kept."""
    runs: list[Run] = []
    remote = {**service.environment, "TORCHRELAY_MODE": "require"}
    teammate_machine = FreshMachine(child_folder(root, example, TEAMMATE), compiler=False)
    for who, machine, client in (
        (LOCAL, FreshMachine(child_folder(root, example, LOCAL)), {}),
        (FIRST, FreshMachine(child_folder(root, example, FIRST)), remote),
        (TEAMMATE, teammate_machine, remote),
    ):
        narrator.say(f"{example.title}: {who}")
        try:
            runs.append(run_example(example, who, machine, client, on_line=narrator.line))
        except RunFailed as error:
            raise RunFailed(f"{error}; the service's log ends with:\n{service.log_tail()}") from None
    held = True
    local, first, teammate = runs
    compilers = teammate_machine.compilers()
    for passed, text in check(local, first, teammate, tolerance=tolerance, compilers=compilers):
        narrator.line(f"{'ok  ' if passed else 'FAIL'}  {text}")
        held &= passed
    return runs, held


def table_row(run: Run) -> list[str]:
    stages = [f"{run.stages[stage]:.2f}" for stage in STAGES] if run.stages else ["-"] * len(STAGES)
    remote = bool(run.stages)
    return [
        f"{run.example}: {run.who}",
        f"{run.first_step:.2f}",
        f"{run.step_milliseconds:.1f}",
        f"{run.losses[-1]:.6f}",
        str(run.hits) if remote else "-",
        str(run.misses) if remote else "-",
        *stages,
        f"{run.rest:.2f}" if remote else "-",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="torchrelay demo", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for demo.png")
    parser.add_argument("--only", choices=[e.module.rpartition(".")[2] for e in EXAMPLES], help="one example")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="relative, on every step's loss")
    args = parser.parse_args(arguments)
    chosen = [e for e in EXAMPLES if args.only is None or e.module.endswith(args.only)]

    narrator = _Narrator()
    runs: list[Run] = []
    held = True
    with tempfile.TemporaryDirectory(prefix="relay-demo-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        with PrivateService(root / "s", on_wait=narrator.wait) as service:
            narrator.say(f"service ready at {service.url}")
            for example in chosen:
                its_runs, its_promises = run_three_ways(example, root, service, narrator, args.tolerance)
                runs += its_runs
                held &= its_promises
            narrator.say("stopping the service")

    rows = [table_row(run) for run in runs]
    print_table("Time to the first training step, and where it went", COLUMNS, rows)
    picture = args.out / "demo.png"
    draw(runs, COLUMNS, rows, picture)
    print(f"picture: {picture}")
    print("everything held" if held else "something did not hold; see FAIL above")
    return 0 if held else 1


def _end(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # SIGTERM unwinds like Ctrl-C: every `with` closes what it opened


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (RunFailed, ServiceDidNotStart) as error:
        print(error, file=sys.stderr)
        sys.exit(1)
