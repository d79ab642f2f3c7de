"""What a search through the service finds and costs, beside PyTorch's own max-autotune.

    python benchmarks/autotune.py                          # all parts, on the GPU
    python benchmarks/autotune.py --part products,again
    python benchmarks/autotune.py --device cpu --part products,again

products: matrix products of well-known models, by the service's winners, by PyTorch's own max-autotune and by ATen,
timed by turns in one process. again: the same products searched once more by a fresh service. search: what
max-autotune adds to a training compile of a 12-layer GPT-2, alone and through the service, on one GPU and on more.
known: the same compile when all its problems are known, beside mode default. job: a batch job of some operators, and
its report, in OUT/report. Each part prints as it goes, has a limit
of its own, and is written to autotune.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import verdicts
from searches import search
from torchrelay.compiler import measure, tuning, tuning_lock
from torchrelay.examples.machines import FreshMachine
from torchrelay.examples.private_service import PrivateService, ServiceDidNotStart
from torchrelay.examples.table import print_table
from variants import HERE, ChildFailed
from winners import entries

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
_AROUND = 25.0
"""Seconds that a service takes to start and to stop."""
_JOB = 90.0
GEOMETRIC_MEAN, WORST, EQUAL = 0.97, 1.02, 0.95


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Benchmark:
    """The parts, and what they found."""

    def __init__(self, args: argparse.Namespace, root: Path) -> None:
        self.args = args
        self.root = root
        self.found: dict[str, Any] = {}
        self.verdicts: list[verdicts.Verdict] = []
        self._first: list[tuning.Entry] = []
        self._second: list[tuning.Entry] | None = None
        self._job_done = False
        self._until = time.monotonic() + args.seconds

    def products(self) -> None:
        limit = min(self.args.products_seconds, self._until - time.monotonic() - _AROUND)
        records, self._first = self._searched("first", compare=True, seconds=limit)
        (self.args.out / "autotune.lock").write_text(tuning_lock.write(self._first))
        if self.args.before is not None:
            records += json.loads(self.args.before.read_text())["products"]
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
        limit = self.args.again_seconds
        if not self._first:
            _, self._first = self._searched("first", compare=False, seconds=limit)
        if self._second is None:
            _, self._second = self._searched("second", compare=False, seconds=limit)
        second = self._second
        result = agreement(self._first, second)
        self.found["again"] = result
        for text in result["others"]:
            print(f"  {text}")
        share = result["equal"] / max(result["problems"], 1)
        of = f"of {result['problems']} winners of two searches from nothing"
        self._bar(result["problems"] > 0 and share >= EQUAL, f"{share:.3f} (>= {EQUAL})  {of} are equal")
        apart = result["apart"]
        self._bar(apart == 0, f"{apart} (0)  {of} differ by more than the tie band")

    def search(self) -> None:
        parts = {"search", "known"} & set(self.args.part)
        self.found["search"] = search(self.root / "search", self.args, say, self._bar, parts=parts)

    def job(self) -> None:
        """A batch job from its file to its report, as a user runs it."""
        if self._job_done:
            return
        self._job_done = True
        if self._until - time.monotonic() < _JOB:
            raise ChildFailed("no time is left")
        place, out = self.root / "job", self.args.out / "report"
        place.mkdir()
        (place / "job.yaml").write_text(JOBS[self.args.device])
        with self._service(place) as service:
            machine = FreshMachine(place / "client")
            for arguments in (["job.yaml"], ["report", "operators", "--output", str(out.absolute())]):
                command = [sys.executable, "-m", "torchrelay.clients.cli", "tune", *arguments]
                begin = time.monotonic()
                done = subprocess.run(
                    command,
                    env=machine.environment(**service.environment),
                    cwd=place,
                    check=False,
                    timeout=self.args.child_timeout,
                )
                say(f"tune {arguments[0]}: {time.monotonic() - begin:.1f} s, status {done.returncode}")
                if done.returncode:
                    raise ChildFailed(f"tune {arguments[0]} ended with status {done.returncode}")

    def _searched(
        self, name: str, *, compare: bool, seconds: float
    ) -> tuple[list[dict[str, Any]], list[tuning.Entry]]:
        """A fresh service and a fresh process that has products searched (and compared); its lines, and the winners."""
        args, place = self.args, self.root / name
        begin = time.monotonic()
        place.mkdir()
        lines = place / "records"
        flags = ["--compare" if compare else "--no-compare"]
        with self._service(place) as service:
            beside: threading.Thread | None = None
            if args.apart and compare:
                flags.append("--no-search")
                beside = threading.Thread(target=self._beside, args=(place, service, seconds))
                beside.start()
            self._run(service, lines, seconds, *flags)
            if beside is not None:
                beside.join()
            found = entries(service)
        say(f"{name}: {len(found)} problems are known after {time.monotonic() - begin:.0f} s")
        text = lines.read_text() if lines.exists() else ""
        return [json.loads(line) for line in text.splitlines()], found

    def _beside(self, place: Path, service: PrivateService, seconds: float) -> None:
        """Have the service search, on the second GPU, while PyTorch's own max-autotune does on the first; and then
        another service, and a job, if they are asked for."""
        self._run(service, place / "beside", seconds, "--no-compare")
        if "again" in self.args.part:
            self._second = []  # not a third time, whatever happens
            limit = min(self.args.again_seconds, self._until - time.monotonic() - _AROUND)
            _, self._second = self._searched("second", compare=False, seconds=limit)
        if "job" in self.args.part:
            self.job()

    def _service(self, place: Path) -> PrivateService:
        return PrivateService(place / "service", environment=_visible(1) if self.args.apart else {})

    def _run(self, service: PrivateService, lines: Path, seconds: float, *flags: str) -> None:
        """products_once.py, until its end or a while past `seconds`."""
        command, environment = self._child(service, lines, seconds, *flags)
        if self.args.apart:
            environment |= _visible(0 if "--compare" in flags else 1)
        said = Path(f"{lines}.said")
        with said.open("wb") as said_to, contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, env=environment, check=False, timeout=seconds + 30, stderr=said_to)
            if done.returncode:
                say(f"products_once.py ended with status {done.returncode}")
                print(said.read_text(errors="replace")[-3000:], service.log_tail(), sep="\n", flush=True)

    def _child(
        self, service: PrivateService, lines: Path, seconds: float, *flags: str
    ) -> tuple[list[str], dict[str, str]]:
        args = self.args
        command = [sys.executable, str(HERE / "products_once.py"), "--device", args.device]
        command += ["--records", str(lines), "--seconds", str(seconds), "--rounds", str(args.rounds)]
        command += ["--skip", str(args.skip), "--most", str(args.most), *flags]
        if args.lock:
            command += ["--lock", f"{lines}.lock"]
        machine = FreshMachine(lines.with_name(f"{lines.name}-client"))
        return command, machine.environment(**service.environment, TORCHRELAY_MODE="require")

    def _bar(self, met: bool, text: str) -> None:
        self.verdicts.append((met, text))
        say(f"{'pass' if met else 'FAIL'}  {text}")


def _visible(index: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": str(index)}


def agreement(first: Sequence[tuning.Entry], second: Sequence[tuning.Entry]) -> dict[str, Any]:
    """Of the problems that both searched: how many have equal winners, and of the others how many lie further apart
    than the tie band, by the search that timed both as its first two, else by the two searches' medians."""
    others = {tuning.order(entry): entry for entry in second}
    pairs = [(entry, others[tuning.order(entry)]) for entry in first if tuning.order(entry) in others]
    told, apart = [], 0
    for one, other in pairs:
        if one.winner.candidate == other.winner.candidate:
            continue
        share = difference(one, other)
        apart += share > measure.DEFAULTS.band
        told.append(
            f"{one.problem.text()}: {one.winner.candidate} {one.winner.milliseconds} ms, "
            f"then {other.winner.candidate} {other.winner.milliseconds} ms: {share:+.1%}"
        )
    return {"problems": len(pairs), "equal": len(pairs) - len(told), "apart": apart, "others": told}


def difference(one: tuning.Entry, other: tuning.Entry) -> float:
    """How much slower the slower winner of two is, as a share."""
    for entry, its in ((one, other), (other, one)):
        second = entry.runner_up
        if second is not None and second.candidate == its.winner.candidate:
            return abs(second.milliseconds / entry.winner.milliseconds - 1)
    return abs(other.winner.milliseconds / one.winner.milliseconds - 1)


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
    with tempfile.TemporaryDirectory(prefix="relay-", ignore_cleanup_errors=True) as folder:
        benchmark = Benchmark(args, Path(folder))
        for name in args.part:
            if name in ("search", "known") and "search" in benchmark.found:
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
            text = json.dumps({**about, **benchmark.found, "bars": benchmark.verdicts}, indent=1)
            (args.out / "autotune.json").write_text(text + "\n")
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
    parser.add_argument("--before", type=Path, help="an autotune.json whose products count too")
    parser.add_argument(
        "--apart",
        action="store_true",
        help="the service searches on a second GPU, beside PyTorch on the first",
    )
    parser.add_argument(
        "--upstream",
        type=float,
        nargs=2,
        metavar="SECONDS",
        help="PyTorch's own first steps, with max-autotune and mode default, if they were measured before",
    )
    parser.add_argument("--rounds", type=int, default=200, help="samples of each way")
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
