"""What a search through the service finds and costs, beside PyTorch's own max-autotune.

    python benchmarks/autotune.py                          # all parts, on the GPU
    python benchmarks/autotune.py --part products,again
    python benchmarks/autotune.py --device cpu --part products,again

products: matrix products of well-known models, by the service's winners, by PyTorch's own max-autotune and by ATen,
timed by turns in one process on each GPU. search: what max-autotune adds to a training compile of a 12-layer GPT-2,
alone and through the service, on one GPU and on more. known: the same compile when all its problems are known, beside
mode default. again: the products searched once more from nothing, and the GPT-2's problems as two services found them.
job: a batch job of some operators, and its report, in OUT/report. Parts run in the order in which they are named, print
as they go, and are written to autotune.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import msgspec
import torch
from measured.winners_once import Pair, Work
from support import verdicts
from support.searches import search
from support.variants import MEASURED, ChildFailed, run_child
from support.winners import Tenant
from torchrelay.clients.jobfiles import tuning_lock
from torchrelay.compiler.api.tuning.jobs import SearchJobSpec
from torchrelay.compiler.graph import toolchain
from torchrelay.compiler.search import ranking
from torchrelay.compiler.tuning import records as tuning_records
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService, ServiceDidNotStart
from torchrelay.examples.harness.table import print_table

JOBS = {
    "cpu": """\
name: operators
operators:
  - {op: bmm, batch: 8, m: [64, 128], k: 64, n: 64, dtype: f32}
""",
    "cuda": """\
name: operators
operators:
  - {op: addmm, m: 4096, k: 768, n: [2304, 3072], dtype: bf16}
  - {op: mm, m: [1, 16, 2048], k: 4096, n: 4096, dtype: bf16, b: column}
  - {op: mm, m: 777, k: 1333, n: 555, dtype: bf16}
  - {op: mm, m: 768, k: 4096, n: 3072, dtype: f32, precision: high, a: column}
  - {op: bmm, batch: 512, m: 197, k: 64, n: 197, dtype: f16, b: column}
  - {op: scaled_mm, m: [16, 2048], k: 4096, n: 4096}
  - {op: convolution, batch: 32, in: 64, out: 64, size: [56, 56], kernel: [3, 3], padding: [1, 1], dtype: f16}
""",
}
_SEARCH_SHARE = 0.45
"""Of the time for products: at most so much to search them."""
_AGAIN, _JOB = 45.0, 45.0
"""Seconds that are kept for the parts after products."""
_LEAST = 30.0
GEOMETRIC_MEAN, WORST, EQUAL = 0.97, 1.02, 0.95


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Benchmark:
    """The parts, and what they found."""

    def __init__(
        self, args: argparse.Namespace, about: dict[str, str], root: Path, stack: contextlib.ExitStack
    ) -> None:
        self.args = args
        self.about = about
        self.root = root
        self.found: dict[str, Any] = {}
        self.verdicts: list[verdicts.Verdict] = []
        self._stack = stack
        self._service: PrivateService | None = None
        self._first: list[tuning_records.TuningEntry] = []
        self._elsewhere: tuple[list[tuning_records.TuningEntry], list[tuning_records.TuningEntry]] | None = (
            None
        )
        """A GPT-2's winners, by two services."""
        self._until = time.monotonic() + args.seconds

    @property
    def service(self) -> PrivateService:
        """With all GPUs; started when it is first needed."""
        if self._service is None:
            self._service = self._stack.enter_context(PrivateService(self.root / "service"))
        return self._service

    def _left(self, *kept_for: str) -> float:
        """Seconds, without those that the parts named need."""
        needed = {"again": _AGAIN, "job": _JOB}
        kept = sum(needed[part] for part in kept_for if part in self.args.part)
        return self._until - time.monotonic() - kept

    def products(self) -> None:
        tenant = self._tenant("first")
        limit = min(self.args.products_seconds, self._left("again", "job"))
        begin = time.monotonic()
        records = self._once(tenant, "--search", seconds=limit * _SEARCH_SHARE)
        self._first = tenant.entries()
        say(f"{len(self._first)} problems are known after {time.monotonic() - begin:.1f} s")
        records += self._once(tenant, "--compare", seconds=limit - (time.monotonic() - begin))
        (self.args.out / "autotune.lock").write_text(tuning_lock.write(self._first))
        if self.args.before is not None:
            earlier = json.loads(self.args.before.read_text())["products"]
            records += [record for record in earlier if "to_inductor" in record]
        compared = [record for record in records if "to_inductor" in record]
        failed = [record["product"] for record in records if "product" in record and record not in compared]
        self.found["products"] = records
        ratios = {record["product"]: record["to_inductor"]["ratio"] for record in compared}
        if not ratios:
            raise ChildFailed("no product was compared")
        mean = statistics.geometric_mean(ratios.values())
        aten = statistics.geometric_mean(record["to_aten"]["ratio"] for record in compared)
        worst = max(ratios, key=lambda name: ratios[name])
        columns = ["product", "torchrelay ms", "Inductor ms", "ATen ms", "of Inductor's", "of ATen's"]
        print_table(f"{len(ratios)} products, by turns", columns, [_row(r) for r in compared])
        print(f"geometric mean of ATen's times: {aten:.3f}; failed: {', '.join(failed) or 'none'}")
        self.found["summary"] = {"geometric_mean": mean, "worst": ratios[worst], "of_aten": aten}
        of = f"{len(ratios)} products, times of max-autotune's"
        self._bar(mean <= GEOMETRIC_MEAN, f"{mean:.3f} (<= {GEOMETRIC_MEAN})  geometric mean of {of}")
        self._bar(ratios[worst] <= WORST, f"{ratios[worst]:.3f} (<= {WORST})  the worst of {of}: {worst}")
        if self.args.device == "cuda" and len(records) >= 40:
            self._bar(len(ratios) >= 40, f"{len(ratios)} (>= 40)  products compared")

    def again(self) -> None:
        pairs = [self._elsewhere] if self._elsewhere is not None else []
        if self._left("job") > _LEAST or not pairs:
            for name in ("second",) if self._first else ("first", "second"):
                tenant = self._tenant(name)
                begin = time.monotonic()
                self._once(tenant, "--search", seconds=min(self.args.again_seconds, self._left("job")))
                second = tenant.entries()
                say(f"{len(second)} problems are known after {time.monotonic() - begin:.1f} s")
                self._first = self._first or second
            pairs.append((self._first, second))
        first, second = ([entry for pair in pairs for entry in pair[side]] for side in (0, 1))
        result = agreement(first, second, self._held)
        self.found["again"] = result
        for text in result["others"]:
            print(f"  {text}")
        share = result["equal"] / max(result["problems"], 1)
        of = f"of {result['problems']} winners of two searches from nothing"
        self._bar(result["problems"] > 0 and share >= EQUAL, f"{share:.3f} (>= {EQUAL})  {of} are equal")
        apart = result["apart"]
        self._bar(apart == 0, f"{apart} (0)  {of} differ by more than the tie band")

    def _held(self, pairs: list[Pair]) -> list[list[float | None]]:
        """By winners_once.py, on the first GPU."""
        device: Literal["cpu", "cuda"] = self.args.device
        made, aim = toolchain.local_toolchain(), toolchain.local_target(device)
        order = SearchJobSpec(made, aim, torch.get_num_threads() if device == "cpu" else 0)
        place = Path(tempfile.mkdtemp(dir=self.root))
        (place / "pairs.json").write_bytes(msgspec.json.encode(Work(order, pairs)))
        command = [sys.executable, str(MEASURED / "winners_once.py"), str(place / "pairs.json")]
        environment = FreshMachine(place / "machine").environment(PYTORCH_NVML_BASED_CUDA_CHECK="1")
        found: Any = run_child(command, environment, self.args.child_timeout)
        return cast(list[list[float | None]], found)

    def search(self) -> None:
        parts = {"search", "known"} & set(self.args.part)
        result = search(
            self.root / "search", self.args, say, self._bar, parts=parts, stack=self._stack, keep=self._keep
        )
        self._service = result.service
        if len(result.winners) > 1:
            self._elsewhere = result.winners[0], result.winners[1]

    def _keep(self, found: dict[str, Any]) -> None:
        self.found["search"] = found
        self.write()

    def write(self) -> None:
        """What is known so far."""
        text = json.dumps({**self.about, **self.found, "bars": self.verdicts}, indent=1)
        (self.args.out / "autotune.json").write_text(text + "\n")
        (self.args.out / "autotune.md").write_text(_written(self.about, self))

    def job(self) -> None:
        """A batch job from its file to its report, as a user runs it."""
        place, out = self.root / "job", self.args.out / "report"
        place.mkdir()
        (place / "job.yaml").write_text(JOBS[self.args.device])
        environment = FreshMachine(place / "client").environment(**self._tenant("job").environment)
        for arguments in (["job.yaml"], ["report", "operators", "--output", str(out.absolute())]):
            command = [sys.executable, "-m", "torchrelay.clients.cli", "tune", *arguments]
            begin = time.monotonic()
            done = subprocess.run(
                command, env=environment, cwd=place, check=False, timeout=self.args.child_timeout
            )
            say(f"tune {arguments[0]}: {time.monotonic() - begin:.1f} s, status {done.returncode}")
            if done.returncode:
                print(self.service.log_tail(), flush=True)
                raise ChildFailed(f"tune {arguments[0]} ended with status {done.returncode}")

    def _tenant(self, name: str) -> Tenant:
        """Nothing is known there, and no kernel built."""
        return Tenant(self.service, name)

    def _once(self, tenant: Tenant, flag: str, *, seconds: float) -> list[dict[str, Any]]:
        """products_once.py, on each GPU where it compares; its records."""
        args = self.args
        gpus = torch.cuda.device_count() if args.device == "cuda" else 0
        shares = max(gpus, 1) if flag == "--compare" else 1
        running: list[tuple[subprocess.Popen[bytes], Path]] = []
        for share in range(shares):
            place = Path(tempfile.mkdtemp(dir=self.root))
            command = [sys.executable, str(MEASURED / "products_once.py"), "--device", args.device, flag]
            command += ["--records", str(place / "records"), "--seconds", str(seconds)]
            command += ["--rounds", str(args.rounds), "--skip", str(args.skip), "--most", str(args.most)]
            command += ["--share", str(share), "--shares", str(shares)]
            if args.before is not None and flag == "--compare":
                command += ["--before", str(args.before.absolute())]
            if args.lock:
                command += ["--lock", str(place / "tuning.lock")]
            environment = FreshMachine(place / "client").environment(**tenant.environment)
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = str(share)
            with (place / "said").open("wb") as said:
                running.append((subprocess.Popen(command, env=environment, stderr=said), place))
        records = []
        until = time.monotonic() + seconds + 20
        for child, place in running:
            try:
                child.wait(max(until - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.returncode:
                say(f"products_once.py ended with status {child.returncode}")
                print(
                    (place / "said").read_text(errors="replace")[-3000:], self.service.log_tail(), flush=True
                )
            lines = place / "records"
            records += [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        return records

    def _bar(self, met: bool, text: str) -> None:
        self.verdicts.append((met, text))
        say(f"{'pass' if met else 'FAIL'}  {text}")


def _written(about: dict[str, str], benchmark: Benchmark) -> str:
    """The figures for a document."""
    lines = [f"{about['device']}, torch {about['torch']}, {about['date'][:10]}", ""]
    lines += [f"- {'pass' if met else 'FAIL'} {text}" for met, text in benchmark.verdicts]
    compared = [r for r in benchmark.found.get("products", []) if "to_inductor" in r]
    if compared:
        lines += ["", "| product | ms | of max-autotune's (95%) | of ATen's |", "|---|---|---|---|"]
    for record in sorted(compared, key=lambda r: r["to_inductor"]["ratio"]):
        own, aten = record["to_inductor"], record["to_aten"]
        lines.append(
            f"| {record['product']} | {record['milliseconds']['torchrelay']:.4f} "
            f"| {own['ratio']:.3f} ({own['low']:.3f} to {own['high']:.3f}) | {aten['ratio']:.3f} |"
        )
    runs = benchmark.found.get("search", {}).get("runs", {})
    if runs:
        lines += [
            "",
            "| a GPT-2's first step | s | on the worker | searched, known, benchmarks |",
            "|---|---|---|---|",
        ]
    for name, run in runs.items():
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in run["stages"].items())
        counts = f"{run['searched']}, {run['recalled']}, {run['benchmarks']}"
        lines.append(f"| {name} | {run['first_step']:.2f} | {stages} | {counts} |")
    return "\n".join(lines) + "\n"


Held = Callable[[list[Pair]], Sequence[Sequence[float | None]]]
"""Two candidates of a problem each, measured by turns: milliseconds; None for one that does not work."""


def agreement(
    first: Sequence[tuning_records.TuningEntry], second: Sequence[tuning_records.TuningEntry], held: Held
) -> dict[str, Any]:
    """Of the problems that both searched: how many have equal winners, and of the others how many lie further apart
    than the tie band, where both are measured by turns."""
    others = {tuning_records.entry_sort_key(entry): entry for entry in second}
    both = [
        (entry, others[tuning_records.entry_sort_key(entry)])
        for entry in first
        if tuning_records.entry_sort_key(entry) in others
    ]
    pairs = [
        Pair(one.problem, one.winner.candidate, other.winner.candidate)
        for one, other in both
        if one.winner.candidate != other.winner.candidate
    ]
    told, apart = [], 0
    for pair, times in zip(pairs, held(pairs) if pairs else [], strict=True):
        working = [each for each in times if each is not None]
        share = max(working) / min(working) - 1 if len(working) == 2 else math.inf
        apart += share > ranking.DEFAULTS.band
        told.append(
            f"{pair.problem.text()}: {pair.one}, then {pair.other}: {times[0]} and {times[1]} ms by turns, {share:+.1%}"
        )
    return {"problems": len(both), "equal": len(both) - len(told), "apart": apart, "others": told}


def _row(record: dict[str, Any]) -> list[str]:
    times = [f"{record['milliseconds'][name]:.4f}" for name in ("torchrelay", "inductor", "aten")]
    shares = (record["to_inductor"], record["to_aten"])
    told = [f"{share['ratio']:.3f} ({share['low']:.3f} to {share['high']:.3f})" for share in shares]
    return [record["product"], *times, *told]


PARTS: dict[str, Callable[[Benchmark], None]] = {
    "products": Benchmark.products,
    "again": Benchmark.again,
    "search": Benchmark.search,
    "known": Benchmark.search,
    "job": Benchmark.job,
}


def main() -> int:
    args = parse_arguments()
    about = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="relay-", ignore_cleanup_errors=True) as folder,
        contextlib.ExitStack() as stack,
    ):
        benchmark = Benchmark(args, about, Path(folder), stack)
        for name in args.part:
            if name == "known" and "search" in args.part:
                continue  # one service for both
            begin = time.monotonic()
            try:
                PARTS[name](benchmark)
            except Exception as error:  # the other parts stand for themselves
                if not isinstance(error, ChildFailed | ServiceDidNotStart):
                    traceback.print_exc()
                failures.append(f"{name}: {error}")
                say(f"{name} FAILED: {error}")
            say(f"{name} took {time.monotonic() - begin:.0f} s")
            benchmark.write()
    status = verdicts.conclude(benchmark.verdicts, check=args.check)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    print(f"written: {args.out / 'autotune.json'}")
    return 1 if failures else status


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)

    def parts(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in PARTS]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(PARTS)}")
        return chosen

    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--part", type=parts, default=list(PARTS)[:-1], help=", ".join(PARTS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--seconds", type=float, default=1e6, help="in all; products are what is left out")
    parser.add_argument("--products-seconds", type=float, default=420.0)
    parser.add_argument("--again-seconds", type=float, default=240.0)
    parser.add_argument("--child-timeout", type=float, default=300.0, help="seconds, for each GPT-2")
    parser.add_argument("--skip", type=int, default=0, help="products")
    parser.add_argument("--most", type=int, default=1000, help="products")
    parser.add_argument(
        "--before", type=Path, help="an autotune.json whose products count too, and are not compared"
    )
    parser.add_argument(
        "--upstream",
        type=float,
        nargs=2,
        metavar="SECONDS",
        help="PyTorch's own first steps, with max-autotune and mode default, if they were measured before",
    )
    parser.add_argument("--rounds", type=int, default=150, help="samples of each way")
    parser.add_argument("--repeats", type=int, default=3, help="of what is compared with mode default")
    parser.add_argument(
        "--gpus", type=int, default=0, help="at most so many; 0: 1, 2, 4 ... of those there are"
    )
    parser.add_argument(
        "--lock", action="store_true", help="give each compile a loose lock that pins nothing"
    )
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
