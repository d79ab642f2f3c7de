"""Which architectures start without tracing: in: names of transformers' and timm's, out: a table with a row for each.

    python benchmarks/programs_families.py [--models llama,timm/resnet18] [--check]

Each is built from a config with two small layers (timm's smallest) and takes one training step, in three new processes:
the first records its programs, the second starts from them, the third traces again and compares. No graph is compiled
(measured/start_once.py). A row counts the functions that Dynamo was given and those that started without tracing, and
says whether loss and gradient norm are the traced run's to the last bit, and whether a new trace made the same
programs. With --check, exits with 1 also when fewer than nine in ten start without tracing, or a result or a program
differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from measured.tiny_architectures import FAMILIES
from support import verdicts
from support.variants import MEASURED, ChildFailed, run_child
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.table import print_table

SHARE = 0.9
"""Of the architectures, that must start without tracing: 27 of 30."""
COLUMNS = ("architecture", "functions", "started", "traced s", "started s", "loss, gradients", "programs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(FAMILIES), help="names, separated by commas")
    parser.add_argument("--child-timeout", type=float, default=300.0, help="seconds, for each process")
    parser.add_argument("--out", type=Path, default=Path("out"))
    verdicts.add_check(parser)
    args = parser.parse_args()

    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="relay-", ignore_cleanup_errors=True) as folder:
        for name in args.models.split(","):
            records.append(start_twice(name, Path(folder) / name.replace("/", "-"), args.child_timeout))
            print(" ".join(row(records[-1])), flush=True)

    print_table("A training step, recorded and started again", COLUMNS, [row(each) for each in records])
    show_reasons(records)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "programs_families.json").write_text(json.dumps(records, indent=1) + "\n")
    status = verdicts.conclude(judge(records), check=args.check)
    return 1 if any("error" in record for record in records) else status


def start_twice(name: str, folder: Path, timeout: float) -> dict[str, Any]:
    command = [sys.executable, str(MEASURED / "start_once.py"), "--model", name]
    command += ["--folder", str(folder / "programs")]
    environment = FreshMachine(folder).environment()
    try:
        commands = command, command, [*command, "--check"]
        first, second, third = (run_child(each, environment, timeout) for each in commands)
    except ChildFailed as error:
        return {"model": name, "error": str(error)}
    return {"model": name, "traced": first, "started": second, "checked": third}


def is_trace_free(record: dict[str, Any]) -> bool:
    return "error" not in record and 0 < record["started"]["functions"] == record["started"]["started"]


def is_equal(record: dict[str, Any]) -> bool:
    names = ("loss", "gradient_norm")
    return all(record["traced"][name] == record["started"][name] for name in names)


def is_reproduced(record: dict[str, Any]) -> bool:
    """Whether a new trace made each program as it was recorded."""
    return record["checked"]["checked"] == record["started"]["started"] and not record["checked"]["stale"]


def judge(records: list[dict[str, Any]]) -> list[verdicts.Verdict]:
    free = sum(map(is_trace_free, records))
    ran = [record for record in records if "error" not in record]
    equal = sum(map(is_equal, ran))
    same = sum(map(is_reproduced, ran))
    return [
        (free >= SHARE * len(records), f"{free} of {len(records)} start without tracing (>= {SHARE:.0%})"),
        (equal == len(ran), f"{equal} of {len(ran)} have the traced run's loss and gradient norm"),
        (same == len(ran), f"{same} of {len(ran)} have programs that a new trace makes again"),
    ]


def row(record: dict[str, Any]) -> list[str]:
    if "error" in record:
        return [record["model"], "-", "-", "-", "-", "failed", "-"]
    first, second = record["traced"], record["started"]
    return [
        record["model"],
        str(second["functions"]),
        str(second["started"]),
        f"{first['seconds']:.2f}",
        f"{second['seconds']:.2f}",
        "equal" if is_equal(record) else "DIFFER",
        "the same" if is_reproduced(record) else "DIFFER",
    ]


def show_reasons(records: list[dict[str, Any]]) -> None:
    """Why functions were traced, the most common reason first, with the architectures and their functions."""
    places: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for record in records:
        if "error" in record:
            print(f"{record['model']}: {record['error']}", file=sys.stderr)
        elif not is_trace_free(record):
            for function, reason in record["traced"]["reasons"] + record["started"]["reasons"]:
                places[reason][f"{record['model']} ({function})"] = None
        for difference in record.get("checked", {}).get("stale", []):
            print(f"{record['model']}: a new trace differs in its {difference}")
    for reason, found in sorted(places.items(), key=lambda each: -len(each[1])):
        print(f"{len(found)}: {reason}", *found, sep="\n    ")


if __name__ == "__main__":
    sys.exit(main())
