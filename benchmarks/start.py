"""How long `torchrelay up` takes until it is ready: `/readyz` answers 200, so a worker takes compiles.

Each start has a new home, and is stopped before the next. Beside the seconds: when the gateway answers, and the
processor time of all processes until then, by program. With `--against`, another checkout's command takes turns with
this one, and ratios are printed: they hold on a busy machine too, as far as the load is the same for both.

    python benchmarks/start.py [--times 5] [--against /old/.venv/bin/torchrelay] [--check] [--out out/start.json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

READY_SECONDS = 5.0
"""On two processors that do nothing else."""
_LOOK_SECONDS = 0.05
_START_SECONDS = 300.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_PROGRAMS = {
    "fork_server": "fork server",
    "CompileSlot": "slot",
    "raylet/raylet": "raylet",
    "gcs_server": "gcs",
    "ray/autoscaler": "Ray's monitor",
    "ray/dashboard/dashboard": "Ray's dashboard",
    "ray/": "Ray's agents",
    "ray::": "Ray's agents",
    "redis-server": "redis",
    "valkey-server": "redis",
    "torchrelay": "service",
}
"""By a part of the command line; the first that fits."""


@dataclass
class Start:
    """Seconds since the command began; processor: seconds until ready, by program."""

    answers: float = 0.0
    ready: float = 0.0
    processor: dict[str, float] = field(default_factory=dict)


def measure(command: str) -> Start:
    """One start of `command up`. Raises RuntimeError if it ends, or is not ready in time."""
    start = Start()
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        home = {f"XDG_{name}_HOME": f"{folder}/{name}" for name in ("CONFIG", "STATE", "CACHE")}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHRELAY_", "RAY_"))}
        with Path(folder, "log").open("wb") as log:
            began = time.monotonic()
            service = psutil.Popen(
                [command, "up", "--port", "0", "--no-gpu"],
                env=kept | home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        used: dict[psutil.Process, tuple[str, float]] = {}
        try:
            while not start.ready:
                time.sleep(_LOOK_SECONDS)
                now = time.monotonic() - began
                if service.poll() is not None or now > _START_SECONDS:
                    raise RuntimeError(Path(folder, "log").read_text())
                _look(service, used)
                with contextlib.suppress(OSError):
                    credentials = json.loads(Path(folder, "CONFIG/torchrelay/credentials.json").read_text())
                    start.answers = start.answers or now
                    with _DIRECT.open(credentials["url"] + "/readyz", timeout=5):
                        start.ready = time.monotonic() - began
        finally:
            service.terminate()
            service.wait(60)
    for program, seconds in used.values():
        start.processor[program] = start.processor.get(program, 0.0) + seconds
    return start


def _look(service: psutil.Process, used: dict[psutil.Process, tuple[str, float]]) -> None:
    for process in [service, *service.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            name = next((program for part, program in _PROGRAMS.items() if part in line), "others")
            times = process.cpu_times()
            used[process] = (name, times.user + times.system)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--against", help="the command `torchrelay` of another checkout")
    parser.add_argument("--check", action="store_true", help=f"fail at {READY_SECONDS:g} s or more")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    own = str(Path(sys.executable).with_name("torchrelay"))
    commands = {"this": own} | ({"other": arguments.against} if arguments.against else {})
    starts: dict[str, list[Start]] = {name: [] for name in commands}
    for _ in range(arguments.times):
        for name, command in commands.items():
            starts[name].append(measure(command))
            last = starts[name][-1]
            print(
                f"{name:5}  ready {last.ready:6.2f} s  processor {sum(last.processor.values()):6.2f} s",
                flush=True,
            )
    ready = {name: statistics.median(each.ready for each in of) for name, of in starts.items()}
    for name, of in starts.items():
        answers = statistics.median(each.answers for each in of)
        processor = statistics.median(sum(each.processor.values()) for each in of)
        print(f"\n{name}: answers {answers:.2f} s, ready {ready[name]:.2f} s, processor {processor:.2f} s")
        for program in sorted({program for each in of for program in each.processor}):
            print(
                f"  {program:27} {statistics.median(each.processor.get(program, 0.0) for each in of):5.2f} s"
            )
    if arguments.against:
        ratios = [a.ready / b.ready for a, b in zip(starts["this"], starts["other"], strict=True)]
        print(f"\nthis / other: {statistics.median(ratios):.2f} (median of {len(ratios)} pairs)")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({k: [asdict(s) for s in v] for k, v in starts.items()}, indent=1))
    return int(arguments.check and ready["this"] >= READY_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
