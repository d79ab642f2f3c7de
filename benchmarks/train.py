"""Training through the service beside torchrun: losses, time to the first step, step time, a profile's report.

    python benchmarks/train.py                          # 2 and 4 ranks over gloo, on the CPU
    python benchmarks/train.py --device cuda            # GPT-2 on the GPUs of this host, over nccl
    python benchmarks/train.py --part ranks --ranks 2 --strategy ddp

ranks: for each number of ranks and each strategy the same script, unchanged, three ways: one process with the same
global batch; torchrun on a machine with empty caches, with local torch.compile; a job of `torchrelay train`, whose
graphs are compiled before its ranks are placed. Time to the first step is from the start of the last rank's process
to the end of the last rank's first optimizer step. steps: two copies of the model in one job, one compiled locally and
one through the service, take turns in blocks. profile: a job with --profile, and its report, in OUT/profile. Parts run
in the order in which they are named, print as they go, and are written to train.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
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
from typing import Any

import torch
from support import verdicts
from support.variants import MEASURED, ChildFailed
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService, ServiceDidNotStart
from torchrelay.examples.harness.table import print_table

SCRIPT = MEASURED / "train_ranks.py"
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-3}
"""Of each step's loss, relative: sums are taken in another order; on a GPU TF32 rounds them."""
FIRST = {"cpu": 1.0, "cuda": 0.5}
STEP = 1.02
MODEL = {"cpu": "small", "cuda": "gpt2"}
BATCH = {"cpu": 16, "cuda": 16}


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Benchmark:
    """The parts, and what they found."""

    def __init__(self, args: argparse.Namespace, root: Path, stack: contextlib.ExitStack) -> None:
        self.args = args
        self.root = root
        self.found: dict[str, Any] = {}
        self.verdicts: list[verdicts.Verdict] = []
        self._stack = stack
        self._service: PrivateService | None = None
        self._machine: FreshMachine | None = None

    @property
    def service(self) -> PrivateService:
        if self._service is None:
            self._service = self._stack.enter_context(PrivateService(self.root / "service"))
        return self._service

    # --- parts -----------------------------------------------------------------------------------------------

    def ranks(self) -> None:
        rows: list[dict[str, Any]] = []
        self.found["ranks"] = rows
        alone = self._alone()
        say(f"one process: first step after {_first(alone):.1f} s")
        for ranks in self.args.ranks:
            for strategy in self.args.strategy:
                if strategy == "2d" and ranks % 2:
                    continue
                name = f"{strategy} x{ranks}"
                cold = self._torchrun(name, strategy, ranks)
                say(f"{name}: torchrun, cold: first step after {_first(cold):.2f} s")
                told, relay = self._job(name, strategy, ranks)
                row = _row(name, alone, cold, relay, told)
                rows.append(row)
                say(f"{name}: a job: first step after {row['relay_first']:.2f} s; {told['compiles']}")
                say("  seconds since a rank's start: " + json.dumps(row["marks"]))
                self._judge(row)
        columns = ["", "loss: to one", "to torchrun", "first: cold s", "job s", "ratio"]
        columns += ["captured", "compiled", "misses", "fallbacks", "step: cold ms", "job ms"]
        print_table("the same script, three ways", columns, [_cells(row) for row in rows])

    def steps(self) -> None:
        ranks = min(self.args.ranks)
        self.found["steps"] = {}
        for strategy in self.args.strategy:
            if strategy == "2d" and ranks % 2:
                continue
            name = f"paired {strategy} x{ranks}"
            more = ["--paired", str(self.args.blocks), "--block-steps", str(self.args.block_steps)]
            _, records = self._job(
                name, strategy, ranks, *more, settings={"compile": "off", "capture": False}
            )
            ratios = [statistics.median(record["ratios"]) for record in records]
            record = {"ratio": max(ratios), "ranks": ratios, "milliseconds": records[0]["milliseconds"]}
            self.found["steps"][strategy] = record
            of = f"step time / local torch.compile's, {strategy} on {ranks} ranks, the worst rank's median"
            self._bar(record["ratio"] <= STEP, f"{record['ratio']:.3f} (<= {STEP})  {of}")

    def profile(self) -> None:
        ranks = min(self.args.ranks)
        steps = {"steps": "3:6", "ranks": list(range(ranks))}
        told, _ = self._job(f"profiled x{ranks}", "ddp", ranks, settings={"profile": steps})
        out = (self.args.out / "profile").absolute()
        shutil.rmtree(out, ignore_errors=True)
        self._relay("report", told["id"], "--output", str(out))
        pages = [path for path in out.rglob("*.html") if path.stat().st_size > 10_000]
        traces = self._relay("files", told["id"])
        count = traces.count(".trace.json")
        self.found["profile"] = {"pages": [str(page) for page in pages], "traces": count}
        self._bar(
            len(pages) == 1 and count == ranks, f"{count} ({ranks})  ranks' traces, and a report in {out}"
        )

    def _judge(self, row: dict[str, Any]) -> None:
        allowed, first = TOLERANCE[self.args.device], FIRST[self.args.device]
        name = row["name"]
        worst = max(row["loss_alone"], row["loss_torchrun"])
        self._bar(
            worst <= allowed,
            f"{worst:.1e} (<= {allowed:g})  losses of {name}, beside one process and torchrun",
        )
        ratio = row["relay_first"] / row["cold_first"]
        self._bar(ratio <= first, f"{ratio:.3f} (<= {first})  first step of {name}: a job / cold torchrun")
        compiles = row["compiles"]
        late = compiles.get("misses", 0)
        self._bar(
            late == 0 < compiles.get("captured", 0), f"{late} (0)  compiles after the start of {name}'s ranks"
        )

    def _bar(self, met: bool, text: str) -> None:
        self.verdicts.append((met, text))
        say(f"{'pass' if met else 'FAIL'}  {text}")

    # --- ways ------------------------------------------------------------------------------------------------

    def _flags(self, strategy: str, record: Path, *more: str) -> list[str]:
        record.mkdir(parents=True)
        args = self.args
        flags = ["--strategy", strategy, "--model", args.model, "--device", args.device]
        flags += ["--batch", str(args.batch), "--steps", str(args.steps), "--record", str(record)]
        return [*flags, *more]

    def _alone(self) -> list[dict[str, Any]]:
        place = self.root / "alone"
        command = [sys.executable, str(SCRIPT), *self._flags("single", place / "record")]
        self._run(command, FreshMachine(place / "machine").environment(OMP_NUM_THREADS="1"))
        return _records(place / "record", 1)

    def _torchrun(self, name: str, strategy: str, ranks: int) -> list[dict[str, Any]]:
        place = self.root / f"torchrun {name}".replace(" ", "-")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        command += [str(SCRIPT), *self._flags(strategy, place / "record")]
        self._run(command, FreshMachine(place / "machine").environment(OMP_NUM_THREADS="1"))
        return _records(place / "record", ranks)

    def _job(
        self, name: str, strategy: str, ranks: int, *more: str, settings: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The job as the service tells of it, and what its ranks wrote."""
        place = self.root / f"job {name}".replace(" ", "-")
        arguments = self._flags(strategy, place / "record", *more)
        directory = place / "directory"
        directory.mkdir()
        shutil.copy(SCRIPT, directory)
        called = name.replace(" ", "-")
        job: dict[str, Any] = {
            "name": called,
            "script": SCRIPT.name,
            "arguments": arguments,
            "directory": "directory",
            "device": self.args.device,
            "workers": ranks,
            "retries": 0,
            # of processors that compiles and ranks share here
            "cpus": 1
            if self.args.device == "cuda"
            else round(min(1.0, (os.cpu_count() or 1) / ranks / 2), 2),
            **(settings or {}),
        }
        (place / "job.yaml").write_text(json.dumps(job, indent=1))  # YAML holds JSON
        try:
            self._relay("job.yaml", folder=place)
        except ChildFailed:
            print(self.service.log_tail(), flush=True)
            raise
        return json.loads(self._relay("show", called, "--json")), _records(place / "record", ranks)

    def _relay(self, *arguments: str, folder: Path | None = None) -> str:
        """`torchrelay train ...`, as a user runs it; what it printed."""
        if self._machine is None:
            self._machine = FreshMachine(self.root / "client")
        environment = self._machine.environment(**self.service.environment)
        command = [sys.executable, "-m", "torchrelay.clients.cli", "train", *arguments]
        return self._run(command, environment, folder)

    def _run(self, command: list[str], environment: dict[str, str], folder: Path | None = None) -> str:
        """Its stdout. Raises ChildFailed with the end of what it said."""
        child = subprocess.Popen(
            command,
            env=environment,
            cwd=folder or self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = child.communicate(timeout=self.args.child_timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # torchrun's ranks too
            said, _ = child.communicate()
            raise ChildFailed(
                f"{command[1:4]} took over {self.args.child_timeout:.0f} s:\n{said[-3000:]}"
            ) from None
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            raise
        if child.returncode:
            raise ChildFailed(f"{command[1:4]} ended with status {child.returncode}:\n{said[-3000:]}")
        return said


def _records(folder: Path, ranks: int) -> list[dict[str, Any]]:
    files = sorted(folder.glob("rank-*.json"))
    if len(files) != ranks:
        raise ChildFailed(f"{len(files)} of {ranks} ranks left a record")
    return [json.loads(file.read_text()) for file in files]


def _first(records: Sequence[dict[str, Any]]) -> float:
    """Seconds from when all ranks' processes are there to the end of the last one's first step."""
    return max(r["first_step_at"] for r in records) - max(r["began"] for r in records)


def _apart(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> float:
    """The largest difference of two runs' losses at any step, relative."""
    pairs = zip(one[0]["losses"], other[0]["losses"], strict=True)
    return max(abs(a - b) / max(abs(a), 1e-6) for a, b in pairs)


def _row(
    name: str,
    alone: Sequence[dict[str, Any]],
    cold: Sequence[dict[str, Any]],
    relay: Sequence[dict[str, Any]],
    told: dict[str, Any],
) -> dict[str, Any]:
    def step(records: Sequence[dict[str, Any]]) -> float:
        return statistics.median(records[0]["step_seconds"]) * 1e3

    return {
        "name": name,
        "loss_alone": _apart(alone, relay),
        "loss_torchrun": _apart(cold, relay),
        "last_loss": relay[0]["losses"][-1],
        "cold_first": _first(cold),
        "relay_first": _first(relay),
        "told_first": told.get("first_step_seconds", 0.0),
        "compiles": told.get("compiles", {}),
        "skipped": told.get("skipped", []),
        "step_ms": {"torchrun": step(cold), "job": step(relay)},
        "marks": {"torchrun": _marks(cold), "job": _marks(relay)},
    }


def _marks(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds from a rank's start, of the last rank each."""
    last = {name: max(record["marks"][name] for record in records) for name in records[0]["marks"]}
    return {name: round(seconds, 2) for name, seconds in last.items()} | {
        "first step": round(_first(records), 2)
    }


def _cells(row: dict[str, Any]) -> list[str]:
    counts = [row["compiles"].get(name, 0) for name in ("captured", "compiled", "misses", "fallbacks")]
    first = [f"{row['cold_first']:.2f}", f"{row['relay_first']:.2f}"]
    first.append(f"{row['relay_first'] / row['cold_first']:.3f}")
    losses = [f"{row['loss_alone']:.1e}", f"{row['loss_torchrun']:.1e}"]
    steps = [f"{row['step_ms'][way]:.1f}" for way in ("torchrun", "job")]
    return [row["name"], *losses, *first, *map(str, counts), *steps]


PARTS: dict[str, Callable[[Benchmark], None]] = {
    "ranks": Benchmark.ranks,
    "steps": Benchmark.steps,
    "profile": Benchmark.profile,
}


def main() -> int:
    args = parse_arguments()
    about = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "model": args.model,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="relay-", ignore_cleanup_errors=True) as folder,
        contextlib.ExitStack() as stack,
    ):
        benchmark = Benchmark(args, Path(folder), stack)
        for name in args.part:
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
            (args.out / "train.json").write_text(text + "\n")
    status = verdicts.conclude(benchmark.verdicts, check=args.check)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    print(f"written: {args.out / 'train.json'}")
    return 1 if failures else status


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)

    def some(*allowed: str) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            chosen = text.split(",")
            if unknown := [name for name in chosen if name not in allowed]:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(allowed)}")
            return chosen

        return read

    parser.add_argument("--part", type=some(*PARTS), default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--ranks", type=lambda text: [int(n) for n in text.split(",")], help="2,4; on GPUs their number"
    )
    parser.add_argument("--strategy", type=some("ddp", "fsdp2", "2d"), help="ddp,fsdp2; on GPUs ddp,fsdp2,2d")
    parser.add_argument("--model", choices=("tiny", "small", "gpt2"), help="small; on GPUs gpt2")
    parser.add_argument("--batch", type=int, default=0, help="of all ranks together")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--block-steps", type=int, default=10)
    parser.add_argument("--child-timeout", type=float, default=400.0, help="seconds, for each run")
    parser.add_argument("--out", type=Path, default=Path("out"))
    verdicts.add_check(parser)
    args = parser.parse_args()
    gpus = args.device == "cuda"
    args.ranks = args.ranks or ([torch.cuda.device_count()] if gpus else [2, 4])
    args.strategy = args.strategy or (["ddp", "fsdp2", "2d"] if gpus else ["ddp", "fsdp2"])
    args.model, args.batch = args.model or MODEL[args.device], args.batch or BATCH[args.device]
    return args


def _end(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # SIGTERM unwinds like Ctrl-C: every `with` closes what it opened


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
