"""Seconds to the first training step and step time, torchrelay beside PyTorch's own ways.

    python benchmarks/first_step.py                          # CPU, or the GPU's models where there is one
    python benchmarks/first_step.py --models resnet50 --variants local-warm,relay-hit --rounds 3

Every variant runs in a fresh process, all variants of a round one after another, with a fresh service in
each round, so that its first compile is a first compile. Writes first_step.json and first_step.png. Exits with 1 when a
process failed; with --check also when a bar was not met.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import torch
from measured.workloads import NEEDS, WORKLOADS
from support import summary, verdicts
from support.local_redis import RedisDidNotStart, redis_server
from support.variants import (
    MEASURED,
    VARIANTS,
    ChildFailed,
    Surroundings,
    VariantSkipped,
    run_child,
    with_prerequisites,
)
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService, ServiceDidNotStart
from torchrelay.examples.harness.table import print_table


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def main() -> int:
    args = parse_arguments()
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    default_models = ["gpt2-4x256"] if device == "cpu" else ["gpt2-12x768", "resnet50", "llama-16x1024"]
    models = [model for model in args.models or default_models if is_installed(model)]
    chosen = with_prerequisites(args.variants)
    records: list[summary.Record] = []
    steady: list[summary.Record] = []
    failures: list[str] = []

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="relay-", ignore_cleanup_errors=True))
        root = Path(folder)
        redis_port = start_redis(stack, root) if "redis" in chosen else None
        for number in range(args.rounds):
            wants_service = any(name.startswith("relay") for name in chosen)
            last_round = number == args.rounds - 1
            with contextlib.ExitStack() as around:
                service = None
                if wants_service or (args.steady and last_round):
                    say("starting a service")
                    service = around.enter_context(PrivateService(root / f"s{number}"))
                for model in models:
                    (place := root / f"{number}-{model}").mkdir()
                    at = Surroundings(
                        model=model,
                        device=device,
                        steps=args.steps,
                        timeout=args.child_timeout,
                        root=place,
                        service=service,
                        redis_port=redis_port,
                        round_trip=args.round_trip / 1e3,
                        bytes_per_second=args.megabytes_per_second * 1e6,
                    )
                    run_round(at, chosen, args.repeats, number, records, failures)
                    if args.steady and last_round and service is not None:
                        run_steady(at, service, steady, failures)

    conclusions = summary.bars(records, steady, models, device)
    report(records, steady, conclusions, models, device, args.out)
    status = verdicts.conclude([bar.verdict for bar in conclusions], check=args.check)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else status


def run_round(
    at: Surroundings,
    chosen: list[str],
    repeats: int,
    number: int,
    records: list[summary.Record],
    failures: list[str],
) -> None:
    """Every variant once, then the warm ones in the same order until each has run `repeats` times."""
    again = [name for name in chosen if VARIANTS[name].warm] * (repeats - 1)
    for name in [*chosen, *again]:
        variant = VARIANTS[name]
        if variant.after is not None and not done(records, at.model, variant.after, number):
            say(f"{at.model}: {variant.label}: skipped, because {variant.after} did not finish")
            continue
        try:
            record = variant.run(at)
        except VariantSkipped as reason:
            say(f"{at.model}: {variant.label}: skipped: {reason}")
        except ChildFailed as error:
            failures.append(f"{at.model}: {name}: {error}")
            say(f"{at.model}: {variant.label}: FAILED: {error}")
        else:
            records.append(record | {"variant": name, "round": number})
            say(f"{at.model}: {variant.label}: {record['first_step']:.2f} s")


def run_steady(
    at: Surroundings, service: PrivateService, steady: list[summary.Record], failures: list[str]
) -> None:
    """Once traced, which records programs, and once from them."""
    machine = FreshMachine(at.root / "steady")
    client = {**service.environment, "TORCHRELAY_MODE": "require", "TORCHRELAY_PROGRAMS": "1"}
    client["TORCHRELAY_PROGRAMS_CHECK"] = "0"  # which start traces after all is drawn at random
    command = [sys.executable, str(MEASURED / "steady.py"), "--model", at.model, "--device", at.device]
    for start in ("traced", "its programs"):
        try:
            record = run_child(command, machine.environment(**client), at.timeout)
            if bool(record["programs"]) != (start == "its programs"):
                raise ChildFailed(
                    f"{record['programs']} functions started without tracing; {record['traced']}"
                )
        except ChildFailed as error:
            failures.append(f"{at.model}: steady, {start}: {error}")
            say(f"{at.model}: paired step time, {start}: FAILED: {error}")
            return
        steady.append(record | {"start": start})
        say(
            f"{at.model}: paired, {start}: step time {record['ratio']:.4f}, guards {record['guard_ratio']:.3f}"
        )


def done(records: list[summary.Record], model: str, variant: str, number: int) -> bool:
    return any((r["model"], r["variant"], r["round"]) == (model, variant, number) for r in records)


def report(
    records: list[summary.Record],
    steady: list[summary.Record],
    conclusions: list[summary.Bar],
    models: list[str],
    device: str,
    out: Path,
) -> None:
    for model in models:
        if table := summary.rows(records, model):
            rounds = len({r["round"] for r in records})
            print_table(f"{model} on {device}: medians of {rounds} round(s)", summary.COLUMNS, table)
            parts = summary.stage_rows(records, model)
            print_table(f"{model}: where the first step's seconds go", ("", *summary.STAGES), parts)
    for record in steady:
        for what, unit in (("milliseconds", "ms a step"), ("guard_microseconds", "us a call's guards")):
            times = ", ".join(f"{backend} {time:.2f} {unit}" for backend, time in record[what].items())
            print(f"{record['model']}: paired, {record['start']}: {times}")
    out.mkdir(parents=True, exist_ok=True)
    about = {
        "device": torch.cuda.get_device_name() if device != "cpu" else platform.processor() or "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    text = json.dumps(summary.as_json(records, steady, conclusions, **about), indent=1)
    (out / "first_step.json").write_text(text + "\n")
    summary.draw(records, models, device, out / "first_step.png")
    print(f"written: {out / 'first_step.json'}, {out / 'first_step.png'}")


def start_redis(stack: contextlib.ExitStack, root: Path) -> int | None:
    try:
        return stack.enter_context(redis_server(root))
    except RedisDidNotStart as error:
        say(f"Inductor's Redis caches: {error}")
        return None


def is_installed(model: str) -> bool:
    if importlib.util.find_spec(NEEDS[model]) is None:
        say(f"{model}: skipped, {NEEDS[model]} is not installed")
        return False
    return True


def names(known: list[str], text: str) -> list[str]:
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return chosen


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", type=lambda text: names(list(WORKLOADS), text), help=", ".join(WORKLOADS))
    parser.add_argument(
        "--variants",
        type=lambda text: names(list(VARIANTS), text),
        default=list(VARIANTS),
        help=", ".join(VARIANTS),
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each warm variant in a round")
    parser.add_argument("--steps", type=int, default=50, help="steps after the first, in each process")
    parser.add_argument(
        "--steady",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="step time and guards of local and torchrelay, paired in one process",
    )
    parser.add_argument(
        "--round-trip",
        type=float,
        default=0.0,
        help="milliseconds between torchrelay's clients and the service",
    )
    parser.add_argument(
        "--megabytes-per-second", type=float, default=12.5, help="on the way, if there is one"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--child-timeout", type=float, default=600.0, help="seconds, for each process")
    parser.add_argument("--out", type=Path, default=Path("out"))
    verdicts.add_check(parser)
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
