"""How much of a cold compile a second one costs when one layer of twelve was changed.

    python benchmarks/second_compile.py                # CPU
    python benchmarks/second_compile.py --rounds 3

In each round, with a fresh service, two processes train one step of a 12-layer GPT-2: first as it is, then with
another activation in one layer. Compares what their compiles took on the worker, by the signed manifests' stages, and
what the clients saw. Writes second_compile.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from support import verdicts
from support.variants import MEASURED, run_child
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService
from torchrelay.examples.harness.table import print_table

BAR = 0.4
MODEL = {"cpu": "gpt2-12x256", "cuda": "gpt2-12x768"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=MODEL)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out"))
    verdicts.add_check(parser)
    args = parser.parse_args()

    rounds = [one_round(args.device) for _ in range(args.rounds)]
    rows = [
        [
            name,
            f"{statistics.median(r[name]['compile'] for r in rounds):.2f}",
            f"{statistics.median(r[name]['first_step'] for r in rounds):.2f}",
            str(rounds[-1][name]["kernels_built"]),
            str(rounds[-1][name]["kernels_reused"]),
        ]
        for name in ("cold", "changed")
    ]
    columns = ["", "compile s", "first step s", "built", "reused"]
    print_table(f"{MODEL[args.device]} on {args.device}: medians of {args.rounds} round(s)", columns, rows)
    ratio = statistics.median(r["changed"]["compile"] / r["cold"]["compile"] for r in rounds)
    bar = (ratio <= BAR, f"{ratio:.3f} (<= {BAR})  compile with one layer changed / cold")
    status = verdicts.conclude([bar], check=args.check)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "second_compile.json").write_text(
        json.dumps({"ratio": ratio, "rounds": rounds}, indent=1) + "\n"
    )
    return status


def one_round(device: str) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="relay-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        with PrivateService(root / "s") as service:
            known: set[str] = set()
            return {
                name: train(root / name, service, device, known, *flags)
                for name, flags in (("cold", ()), ("changed", ("--change-layer", "5")))
            }


def train(root: Path, service: PrivateService, device: str, known: set[str], *flags: str) -> dict[str, Any]:
    """One process; what it compiled is what it has beyond the keys `known`, which grow. A graph that both processes
    have in common is a hit of the second."""
    machine = FreshMachine(root)
    command = [sys.executable, str(MEASURED / "train_once.py"), "--model", MODEL[device], "--device", device]
    command += ["--backend", "torchrelay", "--steps", "0", *flags]
    record = run_child(command, machine.environment(**service.environment, TORCHRELAY_MODE="require"), 600)
    manifests = [
        container.read_manifest(path.read_bytes()) for path in _artifacts(root) if path.stem not in known
    ]
    known.update(manifest.key for manifest in manifests)
    return {
        "first_step": record["first_step"],
        "compile": sum(seconds for manifest in manifests for _, seconds in manifest.stages),
        "stages": _by_stage(manifests),
        "kernels_built": sum(manifest.kernels_built for manifest in manifests),
        "kernels_reused": sum(manifest.kernels_reused for manifest in manifests),
    }


def _artifacts(root: Path) -> list[Path]:
    return [path for path in root.rglob("torchrelay/artifacts/**/*") if len(path.stem) == 64]


def _by_stage(manifests: list[artifact_manifest.Manifest]) -> dict[str, float]:
    stages: dict[str, float] = {}
    for manifest in manifests:
        for stage, seconds in manifest.stages:
            stages[stage] = round(stages.get(stage, 0.0) + seconds, 3)
    return stages


if __name__ == "__main__":
    sys.exit(main())
