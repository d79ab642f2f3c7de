"""The zoo's table: in: what is recorded, out: lines on the terminal, docs/zoo*.md, and a picture of the step times."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from support.zoo_records import Record, Records
from torchrelay.examples.harness.table import print_table
from zoo_models.entry import SUITES

COLUMNS = (
    *("model", "without tracing", "graphs", "remote", "accuracy", "eager ms", "Inductor", "torchrelay"),
    *("cold s", "Inductor cold s", "hit s", "Mega-Cache s", "programs s", "MB"),
)
INTRODUCTION = """# The zoo

Written by `benchmarks/zoo.py --page`, with its other pages; the data are in
[benchmarks/recorded/zoo](../benchmarks/recorded/zoo).
[What is measured](benchmarks.md) tells how. Columns: *without tracing*, functions that started from programs, of all
that Dynamo made code of (variants too), on the CPU at a small size; *graphs*, how many Dynamo made, and how many of
them the service compiled (*remote*); *accuracy* by PyTorch's rule; a training step (forward and backward) in
milliseconds eager, and how many times faster it is compiled by *Inductor* and by *torchrelay*; seconds of the first
step *cold* through the service and by *Inductor cold*, as a *hit* on a new machine without a compiler, on a new machine
from *Mega-Cache*, and on one without a compiler from the team's *programs* (before noon on 30 November
2026 on the machine that had recorded them); megabytes of artifacts. Cold compiles ran several at once, on a machine
that did other work too: their seconds say little. A dash: not measured yet.
"""


class Row:
    """One model's records of one precision."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.records: dict[tuple[str, str], Record] = {}

    def value(self, phase: str, way: str, field: str) -> Any:
        return self.records.get((phase, way), {}).get(field)

    @property
    def compiled(self) -> Record | None:
        """What tells what became of its graphs: `accuracy` compiles what `fill` has not."""
        accuracy = self.records.get(("accuracy", "torchrelay"))
        return self.records.get(("fill", "torchrelay")) or (
            accuracy if accuracy and "graphs" in accuracy else None
        )

    @property
    def is_built(self) -> bool:
        return all(each["status"] != "model_fail_to_load" for each in self.records.values())

    @property
    def is_remote(self) -> bool:
        """Each graph compiled by the service."""
        record = self.compiled
        if record is None or record["status"] not in ("pass", "fail_accuracy"):
            return False
        return bool(record["remote"] == record["graphs"] > 0)

    @property
    def has_graphs(self) -> bool:
        """Whether there was anything to compile: not where Dynamo makes no graph, or Inductor fails or is wrong too."""
        record = self.compiled
        local = self.value("fill", "inductor", "status"), self.value("accuracy", "torchrelay", "inductor")
        failed = bool({"fail_to_run", "fail_accuracy"} & {*local})
        return record is not None and not failed and bool(record.get("graphs") or record["status"] != "pass")

    @property
    def accuracy(self) -> str:
        return self.value("accuracy", "torchrelay", "status") or "-"

    def speedup(self, way: str, phase: str = "time") -> float | None:
        times = self.value(phase, "all", "milliseconds") or {}
        return times["eager"] / times[way] if "eager" in times and way in times else None

    def first_step(self, phase: str, way: str) -> float | None:
        seconds: float | None = self.value(phase, way, "first_step")
        return seconds

    def problems(self) -> list[str]:
        """Fallbacks, refusals, what is unverified, and what failed, with reasons."""
        found: dict[str, None] = {}
        for (phase, way), record in self.records.items():
            if record["status"] != "pass":
                why = first_line(record.get("error", ""))
                found[f"{phase}, {way}: {record['status']}" + (f": {why}" if why else "")] = None
            if record is self.compiled:
                found |= dict.fromkeys(first_line(reason) for reason in record.get("reasons", ()))
                found |= {
                    f"fallback: {code} ({count})": None for code, count in record.get("fallbacks", {}).items()
                }
                found |= {f"unverified: {first_line(each)}": None for each in record.get("unverified", ())}
            if phase == "programs":
                found |= {f"programs: {first_line(each)}": None for each in record.get("reasons", ())}
                found |= {f"a new trace differs in its {each}": None for each in record.get("stale", ())}
            if (phase, way) == ("first-step", "programs"):
                found |= {f"traced: {first_line(each)}": None for each in record.get("traced", ())}
        return list(found)

    def cells(self) -> list[str]:
        record = self.compiled or {}
        programs = self.records.get(("programs", "all"), {})
        started = f"{programs['started']} of {programs['functions']}" if "functions" in programs else "-"
        if "graphs" not in record:
            return [self.name, started, *["-"] * (len(COLUMNS) - 2)]
        eager = (self.value("time", "all", "milliseconds") or {}).get("eager")
        return [
            *(
                self.name,
                started,
                str(record["graphs"]),
                str(record["remote"]),
                self.accuracy,
                figure(eager, 1),
            ),
            *(figure(self.speedup(way)) for way in ("inductor", "torchrelay")),
            *(figure(self.first_step("fill", way), 1) for way in ("torchrelay", "inductor")),
            *(figure(self.first_step("first-step", way)) for way in ("hit", "mega-cache", "programs")),
            figure(record["bytes"] / 1e6),
        ]


def rows_of(records: Iterable[Record]) -> dict[str, list[Row]]:
    """By precision, in the order of the suites, then by name."""
    rows: dict[tuple[str, str], Row] = {}
    for record in records:
        row = rows.setdefault((record["precision"], record["model"]), Row(record["model"]))
        row.records[record["phase"], record["way"]] = record
    by_precision: dict[str, list[Row]] = defaultdict(list)
    for (precision, _), row in sorted(rows.items(), key=lambda each: place(each[0][1])):
        by_precision[precision].append(row)
    return dict(by_precision)


def place(name: str) -> tuple[int, str]:
    suite, _, model = name.partition("/")
    return (SUITES.index(suite), model.lower())


def functions(rows: Sequence[Row]) -> str:
    """How many functions of these models started from programs, to go on a line."""
    started, whole = (
        sum(row.value("programs", "all", name) or 0 for row in rows) for name in ("started", "functions")
    )
    return f"; of their functions {share(started, whole)}" if whole else ""


def totals(rows: Sequence[Row]) -> list[str]:
    """Lines that sum up: of how many models all graphs are remote, results right, and steps faster."""
    built = [row for row in rows if row.is_built]
    ran = [row for row in built if row.accuracy != "-" and not row.accuracy.startswith("eager")]
    judged = [row for row in ran if row.value("accuracy", "torchrelay", "inductor") in (None, "pass")]
    begun = [row for row in built if ("programs", "all") in row.records]
    free = sum(row.value("programs", "all", "status") == "pass" for row in begun)
    filled = [row for row in built if row.has_graphs]
    lines = [
        f"{len(rows)} models have a row, {len(built)} of them were built.",
        "All graphs remote, of those that have any and that Inductor compiles right: "
        f"{share(sum(row.is_remote for row in filled), len(filled))}.",
        f"Start without tracing, and the same: {share(free, len(begun))}{functions(begun)}.",
        f"Right by PyTorch's rule: {share(sum(row.accuracy == 'pass' for row in judged), len(judged))}, "
        f"without {len(ran) - len(judged)} that Inductor gets wrong too.",
    ]
    for timed_in, mode in (("time", ""), ("cuda-graphs", " with CUDA graphs")):
        for way in ("inductor", "torchrelay"):
            speedups = [value for row in built if (value := row.speedup(way, timed_in)) is not None]
            if speedups:
                mean = statistics.geometric_mean(speedups)
                lines.append(
                    f"Step time{mode}, eager / {way}: {mean:.3f} (geometric mean of {len(speedups)})."
                )
        slower = [(ratio, row.name) for row in built if (ratio := row.value(timed_in, "all", "to_inductor"))]
        if slower:
            lines.append("Slowest{} beside Inductor: {:.3f} ({}).".format(mode, *max(slower)))
    stages = [each for row in built if (each := row.value("fill", "torchrelay", "compile"))]
    if stages:
        shares = [each.get("verify", 0.0) / sum(each.values()) for each in stages]
        lines.append(
            f"Verification: {statistics.median(shares):.0%} of a compile (median of {len(shares)}), "
            f"at most {max(shares):.0%}."
        )
    for over, under in (("mega-cache", "hit"), ("mega-cache", "programs")):
        steps = [(row.first_step("first-step", over), row.first_step("first-step", under)) for row in built]
        ratios = [top / bottom for top, bottom in steps if top is not None and bottom is not None]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines.append(f"First step, {over} / {under}: {mean:.2f} (geometric mean of {len(ratios)}).")
    return lines


def print_results(records: Records, names: Sequence[str]) -> bool:
    """Whether there are results, and none with a problem."""
    clean = None
    for precision, rows in rows_of(records.all()).items():
        shown = [row for row in rows if row.name in names]
        print_table(f"The zoo, {precision}", COLUMNS, [row.cells() for row in shown])
        for row in shown:
            clean = clean is not False and not row.problems()
            for problem in row.problems():
                print(f"{row.name}: {problem}")
        print("\n".join(totals(shown)))
    return bool(clean)


def write(recorded: Path, folder: Path) -> None:
    """zoo.md, a page with the models of each precision, and images/zoo.svg, from all files of lines."""
    parts = [INTRODUCTION]
    pictures: list[tuple[str, list[Row]]] = []
    for file in sorted(recorded.glob("*.jsonl")):
        for precision, rows in rows_of(Records(file).all()).items():
            device, size = file.stem.split("-")
            title = f"{'GPU' if device == 'cuda' else 'CPU'}, {size} size, {precision}"
            name = f"zoo-{file.stem}-{precision}.md"
            lines = [*totals(rows), f"[The models, one by one]({name})"]
            parts.append(f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines) + "\n")
            (folder / name).write_text(models(title, rows))
            pictures.append((title, rows))
    (folder / "images").mkdir(parents=True, exist_ok=True)
    drawn = [each for title, rows in pictures if (each := (title, timed(rows)))[1]]
    if drawn:
        (folder / "images" / "zoo.svg").write_text(svg(*drawn[-1]))
        parts.insert(1, "![Step times: eager divided by compiled](images/zoo.svg)\n")
    (folder / "zoo.md").write_text("\n".join(parts))


def models(title: str, rows: Sequence[Row]) -> str:
    """A page with a table, and what was not as it should be."""
    parts = [f"# The zoo: {title}\n\nWhat the columns mean: [the zoo](zoo.md).\n", table(rows)]
    problems = [f"- {row.name}: {plain(text)}" for row in rows for text in row.problems()]
    if problems:
        parts.append("What fell back, was refused, is unverified or failed:\n\n" + "\n".join(problems) + "\n")
    return "\n".join(parts)


def table(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row.cells()) + " |" for row in rows)]) + "\n"


def timed(rows: Sequence[Row]) -> list[Row]:
    """The fastest first."""
    found = [row for row in rows if row.speedup("torchrelay") is not None]
    return sorted(found, key=lambda row: -(row.speedup("torchrelay") or 0))


def svg(title: str, rows: Sequence[Row]) -> str:
    """A bar of torchrelay's speed-up for each model, and a mark at Inductor's."""
    left, width, height = 300, 460, 16
    values = [value for row in rows for way in ("inductor", "torchrelay") if (value := row.speedup(way))]
    scale = width / max(2.0, *values)
    bottom = 48 + height * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 60}" height="{bottom + 12}" '
        'font-family="DejaVu Sans, sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="8" y="20" font-size="14" font-weight="bold">Step time, eager / compiled: {title}</text>',
        '<text x="8" y="36">bar: torchrelay; line: Inductor</text>',
    ]
    for index, row in enumerate(rows):
        y = 44 + index * height
        ours, theirs = row.speedup("torchrelay") or 0.0, row.speedup("inductor")
        parts.append(f'<text x="{left - 8}" y="{y + 11}" text-anchor="end">{row.name}</text>')
        parts.append(f'<rect x="{left}" y="{y + 2}" width="{ours * scale:.1f}" height="11" fill="#dd8452"/>')
        parts.append(f'<text x="{left + ours * scale + 6:.1f}" y="{y + 11}">{ours:.2f}</text>')
        if theirs is not None:
            x = left + theirs * scale
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 15}" stroke="#333333" stroke-width="2"/>'
            )
    x = left + scale
    parts.append(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="42" y2="{bottom}" stroke="#b8bcc4" stroke-dasharray="3"/>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def share(count: int, whole: int) -> str:
    return f"{count} of {whole} ({count / whole:.1%})" if whole else "none measured"


def figure(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else ""


def plain(text: str) -> str:
    """Without what Markdown would take for its own."""
    return "".join(f"\\{sign}" if sign in "`*_[]<>|" else sign for sign in text)
