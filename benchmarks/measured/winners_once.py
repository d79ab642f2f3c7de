"""One process, pairs of winners: in: a file; out: one line of JSON, the milliseconds of both of each pair.

Two searches' times cannot be compared: a clock falls, tensors lie elsewhere. Here a pair is measured as a search
measures its candidates, by turns and with operands in many places, however sure it soon is.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from torchrelay.compiler import decoding
from torchrelay.compiler.api.tuning.jobs import SearchJobSpec
from torchrelay.compiler.search import ranking, search_worker
from torchrelay.compiler.search.search_worker import TaskExecutor
from torchrelay.compiler.tuning import queries, records

ROUNDS = 512
SECONDS = 20.0


class Pair(msgspec.Struct, frozen=True):
    problem: records.Problem
    one: str
    other: str


class Work(msgspec.Struct, frozen=True):
    order: SearchJobSpec
    pairs: list[Pair]


def main() -> None:
    work = decoding.from_json(Path(sys.argv[1]).read_bytes(), type=Work)
    settings = ranking.RankingSettings(rounds=ROUNDS, most=ROUNDS, seconds=SECONDS)
    with (
        tempfile.TemporaryDirectory() as folder,
        search_worker.open_task_executor(work.order, workdir=Path(folder), settings=settings) as bench,
    ):
        print(json.dumps([held(bench, number, pair) for number, pair in enumerate(work.pairs)]))


def held(bench: TaskExecutor, number: int, pair: Pair) -> list[float | None]:
    """None: that candidate does not work here."""
    task = queries.TuningTask(id=f"pair-{number}", problem=pair.problem)
    started = time.monotonic()
    selection = bench.candidates(task)
    others = tuple(text for text in selection.candidates if text not in (pair.one, pair.other))
    outcome = bench.measure(
        msgspec.structs.replace(task, avoid=others),
        selection,
        bench.build(task, selection),
        started=started,
        before_first_run=lambda candidate: None,
    )
    times = {timing.candidate: timing.milliseconds for timing in outcome.timings}
    return [times.get(pair.one), times.get(pair.other)]


if __name__ == "__main__":
    main()
