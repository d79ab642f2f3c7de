"""Which of transformers' architectures go remote: in: names, out: a table with a row for each.

    python benchmarks/architectures.py [--models llama,t5] [--device cuda] [--check]

Each is built from a config with two small layers and takes one training step, in a process of its own,
compiled locally and through a private service. With --check, exits with 1 also when a graph was compiled locally or
gradients differ by more than rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measured.tiny_architectures import ARCHITECTURES
from support import verdicts
from support.variants import MEASURED, ChildFailed, run_child
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService
from torchrelay.examples.harness.table import print_table

ROUNDING = 1e-5
"""Relative; where a compile's noise against itself is more than a tenth of it, ten times that."""
COLUMNS = ("architecture", "graphs", "remote", "fallback", "largest relative gradient difference", "bits")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(ARCHITECTURES), help="names, separated by commas")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--child-timeout", type=float, default=300.0, help="seconds, for each process")
    parser.add_argument("--out", type=Path, default=Path("out"))
    verdicts.add_check(parser)
    args = parser.parse_args()

    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="relay-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        with PrivateService(root / "s") as service:
            for name in args.models.split(","):
                machine = FreshMachine(root / name)
                command = [sys.executable, str(MEASURED / "compare_gradients.py"), "--model", name]
                command += ["--device", args.device]
                environment = machine.environment(**service.environment, TORCHRELAY_MODE="remote")
                try:
                    records.append(run_child(command, environment, args.child_timeout))
                except ChildFailed as error:
                    records.append({"model": name, "error": str(error)})
                print(" ".join(row(records[-1])), flush=True)

    print_table(f"Training step, two layers, {args.device}", COLUMNS, [row(record) for record in records])
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "architectures.json").write_text(json.dumps(records, indent=1) + "\n")
    status = verdicts.conclude([each for record in records for each in judge(record)], check=args.check)
    for record in records:
        for reason in record.get("reasons", ()):
            print(f"{record['model']}: {reason}")
        if "error" in record:
            print(f"{record['model']}: {record['error']}", file=sys.stderr)
    return 1 if any("error" in record for record in records) else status


def judge(record: dict[str, Any]) -> list[verdicts.Verdict]:
    """Every graph goes remote, and the gradients are local compilation's but for rounding."""
    if "error" in record:
        return [(False, f"{record['model']}: did not finish")]
    remote, graphs, fallbacks = record["remote"], record["graphs"], record["fallbacks"]
    limit = max(10 * record["noise"], ROUNDING)
    return [
        (remote == graphs > 0 and not fallbacks, f"{record['model']}: {remote} of {graphs} graphs remote"),
        (
            record["equal"] or record["difference"] <= limit,
            f"{record['model']}: gradients differ by {record['difference']:.1e} (<= {limit:.1e})",
        ),
    ]


def row(record: dict[str, Any]) -> list[str]:
    if "error" in record:
        return [record["model"], "-", "-", "failed", "-", "-"]
    return [
        record["model"],
        str(record["graphs"]),
        str(record["remote"]),
        ", ".join(f"{reason} {count}" for reason, count in record["fallbacks"].items()) or "none",
        f"{record['difference']:.1e}",
        "equal" if record["equal"] else "differ",
    ]


if __name__ == "__main__":
    sys.exit(main())
