"""The service at the size of a company: rows of what was measured, their bars, and how each grows.

Real gateways, Redis and dispatcher, each in processes of its own on this machine; only the workers are simulated.

    python benchmarks/scale.py [--parts hits start misses idle ranks] [--quick] [--check] [--out out/scale.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from support import scale_hits, scale_misses, scale_rows, scale_service, scale_start, verdicts


def _idle(quick: bool) -> list[scale_rows.Row]:
    from support import scale_idle

    if quick:
        return scale_idle.rows(
            namespaces=[10], gateways=[2], keys=[500], dispatchers=2, slots=20, seconds=3.0
        )
    return scale_idle.rows()


def _ranks(quick: bool) -> list[scale_rows.Row]:
    from support import scale_ranks  # it imports Ray

    return scale_ranks.rows((2, 6), on_node=3, seconds=1.5, settle=1.0) if quick else scale_ranks.rows()


PARTS: dict[str, Callable[[bool], list[scale_rows.Row]]] = {
    "hits": lambda quick: (
        scale_hits.rows({"20 kB": 20_000}, seconds=1, rounds=1) if quick else scale_hits.rows()
    ),
    "start": lambda quick: scale_start.rows([10], artifact_bytes=1_000_000) if quick else scale_start.rows(),
    "misses": lambda quick: (
        scale_misses.rows([10], graphs=3, compile_seconds=0.1, pause_seconds=0.1)
        if quick
        else scale_misses.rows()
    ),
    "idle": _idle,
    "ranks": _ranks,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only whether it works")
    parser.add_argument("--out", type=Path, default=Path("out/scale.json"))
    verdicts.add_check(parser)
    parser.add_argument("--dispatch", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dispatch:
        scale_service.dispatch(arguments.dispatch)
        return 0
    try:
        rows = [row for part in PARTS if part in arguments.parts for row in PARTS[part](arguments.quick)]
    except scale_hits.NotInstalled as error:
        parser.error(str(error))
    print(scale_rows.table(rows))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
    found = {"machine": machine, "rows": [asdict(row) for row in rows]}
    arguments.out.write_text(json.dumps(found, indent=1))
    barred = [
        (bool(row.ok), f"{row.name}: {row.value:.4g} {row.unit} ({row.bar})") for row in rows if row.bar
    ]
    return verdicts.conclude(barred, check=arguments.check)


if __name__ == "__main__":
    raise SystemExit(main())
