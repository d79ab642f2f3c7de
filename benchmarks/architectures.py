"""Which of transformers' architectures go remote: in: names, out: a table with a row for each.

    python benchmarks/architectures.py [--models llama,t5] [--device cuda]

Each is built from a config with two small layers and takes one training step, in a process of its own,
compiled locally and through a private service.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tiny_architectures import ARCHITECTURES
from torchrelay.examples.machines import FreshMachine
from torchrelay.examples.private_service import PrivateService
from torchrelay.examples.table import print_table
from variants import HERE, ChildFailed, run_child

COLUMNS = ("architecture", "graphs", "remote", "fallback", "largest relative gradient difference", "bits")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(ARCHITECTURES), help="names, separated by commas")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--child-timeout", type=float, default=300.0, help="seconds, for each process")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()

    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="relay-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        with PrivateService(root / "s") as service:
            for name in args.models.split(","):
                machine = FreshMachine(root / name)
                command = [sys.executable, str(HERE / "compare_gradients.py"), "--model", name]
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
    for record in records:
        for reason in record.get("reasons", ()):
            print(f"{record['model']}: {reason}")
        if "error" in record:
            print(f"{record['model']}: {record['error']}", file=sys.stderr)
    return 1 if any("error" in record for record in records) else 0


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
