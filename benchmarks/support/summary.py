"""From records to conclusions: in: one record for each process, out: medians, ratios, bars, a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.variants import VARIANTS
from support.verdicts import Verdict

Record = dict[str, Any]
COLUMNS = ("", "first step s", "from start s", "cold / this", "step ms", "reuse")
GUARDS = 1.05
"""A call's guards take at most what Dynamo's own take; what is more is the noise of a check of some microseconds."""
STAGES = ("import", "lookup", "guards", "trace", "load", "step")
DEEP, SHALLOW = "gpt2-24x256", "gpt2-4x256"
WARM_WAYS = ("local-warm", "mega-cache", "redis")


@dataclass(frozen=True)
class Bar:
    """A promise as a ratio, beside its limit."""

    model: str
    text: str
    ratio: float
    limit: float
    at_least: bool

    @property
    def passed(self) -> bool:
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit

    @property
    def verdict(self) -> Verdict:
        sign = ">=" if self.at_least else "<="
        return self.passed, f"{self.ratio:.3f} ({sign} {self.limit:g})  {self.text}"


def median(records: Sequence[Record], model: str, variant: str, name: str = "first_step") -> float | None:
    found = [r[name] for r in _of(records, model, variant) if r.get(name) is not None]
    return statistics.median(found) if found else None


def ratio(
    records: Sequence[Record], model: str, over: str, under: str, name: str = "first_step"
) -> float | None:
    """Median over rounds of first_step(over) / first_step(under): medians of what ran several times in a round."""
    rounds: dict[Any, tuple[list[float], list[float]]] = {}
    for place, variant in enumerate((over, under)):
        for record in _of(records, model, variant):
            if record.get(name) is not None:
                rounds.setdefault(record["round"], ([], []))[place].append(record[name])
    ratios = [
        statistics.median(tops) / statistics.median(bottoms)
        for tops, bottoms in rounds.values()
        if tops and bottoms
    ]
    return statistics.median(ratios) if ratios else None


def bars(
    records: Sequence[Record], steady: Sequence[Record], models: Sequence[str], device: str
) -> list[Bar]:
    found: list[Bar] = []
    for model in models:
        hit_ways = {way: ratio(records, model, "relay-hit", way) for way in WARM_WAYS}
        if device == "cpu" and (mega := ratio(records, model, "mega-cache", "relay-hit")) is not None:
            found.append(
                Bar(model, f"{model}: Mega-Cache / torchrelay hit, both on a new machine", mega, 6, True)
            )
        if device != "cpu" and (known := {way: r for way, r in hit_ways.items() if r is not None}):
            best = max(known, key=lambda way: known[way])
            text = f"{model}: torchrelay hit / best of PyTorch's warm ways ({best})"
            found.append(Bar(model, text, known[best], 1, False))
        if (early := ratio(records, model, "relay-prefetch", "relay-hit")) is not None:
            found.append(Bar(model, f"{model}: torchrelay hit with prefetch / without", early, 1, False))
        if (cold := ratio(records, model, "relay-cold", "local-cold")) is not None:
            found.append(Bar(model, f"{model}: torchrelay cold / local cold", cold, 1.15, False))
        if (background := ratio(records, model, "relay-background", "eager")) is not None:
            found.append(
                Bar(model, f"{model}: torchrelay, a miss in the background / eager", background, 1.5, False)
            )
        found += _program_bars(records, model, device)
    deep, shallow = (median(records, model, "relay-programs") for model in (DEEP, SHALLOW))
    if deep is not None and shallow is not None:
        text = f"torchrelay with its programs: {DEEP} / {SHALLOW}"
        own = [median(records, model, "eager") for model in (DEEP, SHALLOW)]
        if own[0] is not None and own[1] is not None:
            text += f" (eager: {own[0] / own[1]:.2f})"
        found.append(Bar(DEEP, text, deep / shallow, 1.15, False))
    for record in steady:
        text = f"{record['model']}: torchrelay ({record['start']}) / local, paired"
        steps = f"{text}: step time, {record['steps']} steps each"
        found.append(Bar(record["model"], steps, record["ratio"], 1.02, False))
        found.append(Bar(record["model"], f"{text}: a call's guards", record["guard_ratio"], GUARDS, False))
    return found


def _program_bars(records: Sequence[Record], model: str, device: str) -> list[Bar]:
    """Of starts without tracing, of a machine that has run the script before: to be compared with its local cache."""
    found: list[Bar] = []

    def add(text: str, value: float | None, limit: float, *, at_least: bool = False) -> None:
        if value is not None:
            found.append(Bar(model, f"{model}: {text}", value, limit, at_least))

    ways = {way: ratio(records, model, way, "relay-programs") for way in WARM_WAYS}
    known = {way: value for way, value in ways.items() if value is not None}
    if known:
        best = min(known, key=lambda way: known[way])
        text = f"best of PyTorch's warm ways ({best}) / torchrelay with its programs"
        add(text, known[best], 4, at_least=True)
    if device != "cpu":
        add("torchrelay with its programs / eager", ratio(records, model, "relay-programs", "eager"), 2)
    whole = ratio(records, model, "relay-programs", "eager", "from_process_start")
    add("torchrelay with its programs / eager, from the start of the process", whole, 1.3)
    return found


def rows(records: Sequence[Record], model: str) -> list[list[str]]:
    table = []
    for name, variant in VARIANTS.items():
        mine = _of(records, model, name)
        if not mine:
            continue
        against_cold = ratio(records, model, "local-cold", name)
        table.append(
            [
                variant.label,
                _figure(median(records, model, name), 2),
                _figure(median(records, model, name, "from_process_start"), 2),
                _figure(against_cold, 2),
                _figure(median(records, model, name, "step_milliseconds"), 1),
                _reuse(name, mine[-1]["reuse"]),
            ]
        )
    return table


def stage_rows(records: Sequence[Record], model: str) -> list[list[str]]:
    """Medians of the first step's parts, of each variant."""
    table = []
    for name, variant in VARIANTS.items():
        if mine := _of(records, model, name):
            parts = [statistics.median(r["stages"][stage] for r in mine) for stage in STAGES]
            table.append([variant.label, *(_figure(seconds or None, 2) for seconds in parts)])
    return table


def as_json(
    records: Sequence[Record], steady: Sequence[Record], conclusions: Sequence[Bar], **about: Any
) -> dict[str, Any]:
    return {
        **about,
        "measured": (
            "first_step: seconds from just before torch.compile (torch and the model's library imported, "
            "model and batch on the device) to the end of the first forward, backward and optimizer step; "
            "from_process_start: the same end, from the start of the process; stages: first_step's parts, of which "
            "step is all that is not timed apart"
        ),
        "bars": [asdict(bar) | {"passed": bar.passed} for bar in conclusions],
        "steady": list(steady),
        "records": list(records),
    }


def draw(records: Sequence[Record], models: Sequence[str], device: str, file: Path) -> None:
    """Horizontal bars of seconds to the first step, a panel for each model, a dot for each round."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [model for model in models if any(r["model"] == model for r in records)]
    names = [name for name in VARIANTS if any(r["variant"] == name for r in records)]
    if not shown:
        return
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10})
    size = (4.2 + 4.6 * len(shown), 1.3 + 0.42 * len(names))
    figure, panels = plt.subplots(1, len(shown), figsize=size, dpi=150, squeeze=False, sharey=True)
    for axes, model in zip(panels[0], shown, strict=True):
        for y, name in enumerate(names):
            value = median(records, model, name)
            if value is None:
                continue
            axes.barh(y, value, height=0.62, color="#dd8452" if name.startswith("relay") else "#b8bcc4")
            rounds = [r["first_step"] for r in _of(records, model, name)]
            axes.plot(rounds, [y] * len(rounds), ".", color="#333333", markersize=4)
            axes.text(max(rounds), y, f"  {value:.1f} s", va="center", fontweight="bold", fontsize=9)
        axes.set_title(f"{model}, {device}", loc="left", fontsize=11)
        axes.margins(x=0.18)
        axes.xaxis.grid(True, color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    panels[0][0].set_yticks(range(len(names)), [VARIANTS[name].label for name in names])
    panels[0][0].invert_yaxis()
    figure.suptitle("Seconds to the first training step", x=0.01, ha="left", fontsize=14, fontweight="bold")
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def _of(records: Sequence[Record], model: str, variant: str) -> list[Record]:
    return [r for r in records if r["model"] == model and r["variant"] == variant]


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _reuse(variant: str, reuse: dict[str, Any]) -> str:
    """Hits of everything asked for, as the caches themselves count."""
    if variant == "eager":
        return "-"
    if "disk_hits" in reuse:
        hits = reuse["hits"] + reuse["disk_hits"]
        told = f"{hits} of {hits + reuse['misses'] + sum(reuse['fallbacks'].values())}"
        traced = len({each["function"] for each in reuse["traced"]})
        return f"{told}, {traced} traced" if reuse["programs"] and traced else told
    hits, misses = reuse.get("autograd_cache_hit", 0), reuse.get("autograd_cache_miss", 0)
    return f"{hits} of {hits + misses}"
