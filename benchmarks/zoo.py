"""Every model of the zoo: remote, right, and how fast: in: names, out: JSON lines, a table, docs/zoo*.md, a picture.

    python benchmarks/zoo.py                                        # all phases, small on the CPU, real on a GPU
    python benchmarks/zoo.py --phase fill,time,first-step --batch 16 --parallel 8 --minutes 9
    python benchmarks/zoo.py --only transformers/T5Small,timm/nfnet_l0 --phase accuracy,time --again
    python benchmarks/zoo.py --page                                 # the page and the picture from what is recorded

Phases: `programs` starts small models without tracing on the CPU, and compiles nothing. `fill` compiles each model in
empty caches, by the service and by local Inductor, several at once. `accuracy` compares as upstream does, several at
once, and compiles what is not filled. `first-step` starts each again on a new machine (torchrelay's hit, the
team's programs, PyTorch's Mega-Cache), `time` measures steps by turns, and so does `cuda-graphs` in mode
reduce-overhead; of these, --parallel get ready at once, and are then measured one at a time. Caches and service live in
--state, so that phases can be run apart; on another machine, `fill` makes those that a later phase needs.
Each result is a line that is appended as soon as it is there; a model that has a line is passed over, unless --again.
Each model runs in a process of its own, which is ended above --memory or --timeout.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from pathlib import Path
from types import FrameType

import torch
from support import zoo_page
from support.zoo_jobs import PHASES, WITHOUT_SERVICE, Plan, Zoo
from support.zoo_records import Records
from torchrelay.examples.harness.private_service import PrivateService, ServiceDidNotStart
from zoo_models import registry
from zoo_models.entry import SUITES

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "benchmarks" / "recorded" / "zoo"


def main() -> int:
    args = parse_arguments()
    args.phase = args.phase or ",".join(PHASES[:-1] if args.device == "cpu" else PHASES[1:])
    clean = args.page or measure(args)
    zoo_page.write(args.recorded, ROOT / "docs" if args.recorded.resolve() == RECORDED else args.recorded)
    return 1 if args.check and not clean else 0


def measure(args: argparse.Namespace) -> bool:
    """Whether nothing fell back or failed."""
    small = args.size == "small" or (args.size == "auto" and args.device == "cpu")
    precision = args.precision or ("float32" if args.device == "cpu" else "amp")
    suites = (
        {name.partition("/")[0] for name in args.only.split(",")} if args.only else set(args.suite.split(","))
    )
    known = registry.models(tuple(suite for suite in SUITES if suite in suites))
    names = args.only.split(",") if args.only else list(known)
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{unknown[0]!r} is not in the zoo; the names are suite/name")
    if args.sample:
        part, parts = args.sample
        names = names[part::parts]
    records = Records(args.recorded / f"{args.device}-{'small' if small else 'real'}.jsonl")
    phases = tuple(args.phase.split(","))
    plan = Plan(
        phases=phases,
        batch=args.batch,
        device=args.device,
        small=small,
        precision=precision,
        parallel=args.parallel,
        minutes=args.minutes,
        timeout=args.timeout,
        memory=int(args.memory * 2**30),
        again=args.again,
        ways=tuple(args.ways.split(",")),
        rounds=args.rounds,
    )
    args.state.mkdir(parents=True, exist_ok=True)
    (args.state / "service").mkdir(exist_ok=True)
    slots = ("--cpu-slots", str(args.slots)) if args.slots else ()
    with contextlib.ExitStack() as stack:
        service = None
        if not set(phases) <= set(WITHOUT_SERVICE):
            service = stack.enter_context(PrivateService(args.state / "service", arguments=slots))
        Zoo(plan, {name: known[name] for name in names}, records, args.state.resolve(), service).run_all()
    return zoo_page.print_results(records, names)


def share(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    return int(part), int(parts)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", help="suite/name, separated by commas, in the order in which they run")
    parser.add_argument("--suite", default=",".join(SUITES))
    parser.add_argument("--sample", type=share, help="2/15: of every 15 models the third")
    parser.add_argument(
        "--phase", help=f"default: all of {','.join(PHASES)} but the last; on a GPU but the first"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=("auto", "small", "real"), default="auto")
    parser.add_argument("--precision", choices=("amp", "float32"), help="amp: autocast to bfloat16")
    parser.add_argument("--ways", default="eager,inductor,torchrelay", help="that are filled and timed")
    parser.add_argument(
        "--batch", type=int, default=0, help="models that go through all phases before others begin"
    )
    parser.add_argument("--parallel", type=int, default=1, help="models that compile at once")
    parser.add_argument("--slots", type=int, default=0, help="compiles at once in the service, on the CPU")
    parser.add_argument("--minutes", type=float, default=1e6, help="after these, end")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds, for each process")
    parser.add_argument("--memory", type=float, default=16.0, help="GiB of main memory, for each process")
    parser.add_argument("--rounds", type=int, default=20, help="of timed steps")
    parser.add_argument("--again", action="store_true", help="also what has been recorded")
    parser.add_argument("--state", type=Path, default=ROOT / "out" / "zoo", help="caches and service")
    parser.add_argument("--recorded", type=Path, default=RECORDED, help="where the lines are")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 when anything fell back, failed or is unverified"
    )
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page")
    return parser.parse_args()


def _end(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # SIGTERM unwinds like Ctrl-C: every `with` closes what it opened


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except ServiceDidNotStart as error:
        print(error, file=sys.stderr)
        sys.exit(1)
