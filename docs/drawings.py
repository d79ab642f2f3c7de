"""Draws docs/images/parts.svg and request.svg, the pictures of concepts.md: `python docs/drawings.py`."""

from __future__ import annotations

from html import escape
from itertools import count
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
FONT = "font-family='sans-serif' font-size='13'"
INK, LINE, FILL, OURS = "#1f2933", "#52606d", "#f5f7fa", "#dbeafe"


def svg(width: int, height: int, parts: list[str], title: str) -> str:
    tip = "<path d='M0 0L8 4L0 8z' fill='#52606d'/>"
    marker = (
        f"<marker id='tip' markerWidth='8' markerHeight='8' refX='8' refY='4' orient='auto'>{tip}</marker>"
    )
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {FONT} role='img'>"
    ground = f"<rect width='{width}' height='{height}' fill='white'/>"
    return "\n".join(
        [head, f"<title>{escape(title)}</title><defs>{marker}</defs>", ground, *parts, "</svg>", ""]
    )


def text(x: float, y: float, words: str, *, anchor: str = "middle", weight: str = "normal") -> str:
    style = f"fill='{INK}' text-anchor='{anchor}' font-weight='{weight}'"
    return f"<text x='{x:g}' y='{y:g}' {style}>{escape(words)}</text>"


def box(x: int, y: int, width: int, height: int, name: str, *lines: str, fill: str = OURS) -> str:
    shape = f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6' fill='{fill}' stroke='{LINE}'/>"
    middle = x + width / 2
    words = [text(middle, y + 20, name, weight="bold")]
    words += [text(middle, y + 38 + 17 * number, line) for number, line in enumerate(lines)]
    return "\n".join([shape, *words])


def note(x: float, y: float, words: str, *, anchor: str = "middle") -> str:
    """A text over lines."""
    return f"<g stroke='white' stroke-width='4' paint-order='stroke'>{text(x, y, words, anchor=anchor)}</g>"


def arrow(x1: float, y1: float, x2: float, y2: float, words: str = "") -> str:
    line = f"<path d='M{x1:g} {y1:g}L{x2:g} {y2:g}' stroke='{LINE}' marker-end='url(#tip)'/>"
    return f"{line}\n{note((x1 + x2) / 2, (y1 + y2) / 2 - 6, words)}" if words else line


def parts() -> str:
    drawn = [
        box(15, 30, 190, 250, "your process", "any machine", fill=FILL),
        box(30, 90, 160, 60, "TorchDynamo", "captures graphs", fill="white"),
        box(30, 200, 160, 65, "client", "encodes, verifies,", "loads; disk cache"),
        arrow(110, 150, 110, 200),
        box(330, 30, 150, 55, "edge (nginx)", "optional", fill=FILL),
        box(330, 125, 150, 75, "gateways", "check requests,", "answer hits, queue"),
        box(330, 240, 150, 55, "signer", "holds the keys"),
        box(580, 30, 165, 75, "Redis", "index, queue, jobs,", "small artifacts", fill=FILL),
        box(580, 125, 130, 55, "blob store", "large artifacts", fill=FILL),
        box(580, 225, 165, 75, "dispatchers", "take from the queue,", "publish results"),
        box(845, 30, 190, 270, "worker nodes (Ray)", "CPUs and GPUs", fill=FILL),
        box(860, 90, 160, 60, "slot and fork server", "torch imported once"),
        box(860, 200, 160, 80, "child of one compile", "confined, no network;", "Inductor, comparison"),
        arrow(940, 150, 940, 200),
        arrow(205, 220, 330, 165, "graph or key"),
        arrow(330, 180, 205, 245),
        arrow(205, 110, 330, 60, "key"),
        arrow(405, 85, 405, 125),
        arrow(480, 150, 580, 80),
        arrow(480, 165, 580, 155),
        arrow(405, 200, 405, 240),
        arrow(580, 275, 480, 270),
        arrow(640, 225, 640, 180),
        arrow(728, 225, 728, 105),
        arrow(745, 260, 860, 130, "compile"),
    ]
    return svg(1050, 320, drawn, "The parts of torchrelay")


LANES = ("your script", "client", "gateway", "Redis, blob store", "dispatcher", "worker's child")
STEPS = (
    (0, 1, "graph from TorchDynamo"),
    (1, 1, "canonical request, SHA-256: the key"),
    (1, 2, "POST /v1/compile"),
    (2, 2, "token, limits, closed table of operators"),
    (2, 3, "look the key up"),
    (2, 1, "a hit: the signed artifact"),
    (2, 3, "a miss: queued once, all wait"),
    (4, 3, "take it"),
    (4, 5, "to an idle slot"),
    (5, 5, "rebuild, AOTAutograd, Inductor"),
    (5, 5, "compare with eager on random inputs"),
    (5, 4, "artifact"),
    (4, 3, "have it signed, publish it"),
    (2, 1, "the signed artifact"),
    (1, 1, "verify signature, key, digests; load"),
    (1, 0, "forward and backward"),
)


def request() -> str:
    left, apart, top, down = 90, 170, 60, 34
    bottom = top + down * (len(STEPS) + 1)
    drawn = []
    for number, name in enumerate(LANES):
        x = left + apart * number
        drawn.append(f"<path d='M{x} {top - 10}V{bottom}' stroke='#cbd2d9'/>")
        drawn.append(text(x, 35, name, weight="bold"))
    for number, (start, end, words) in zip(count(1), STEPS, strict=False):
        x1, x2, y = left + apart * start, left + apart * end, top + down * number
        if start == end:
            drawn.append(f"<circle cx='{x1}' cy='{y - 4}' r='4' fill='{LINE}'/>")
            side = "end" if start == len(LANES) - 1 else "start"
            drawn.append(note(x1 + (-10 if side == "end" else 10), y, words, anchor=side))
        else:
            drawn.append(arrow(x1, y, x2, y, words))
    return svg(
        left * 2 + apart * (len(LANES) - 1), bottom + 15, drawn, "One request, from graph to compiled code"
    )


DRAWINGS = {"parts.svg": parts, "request.svg": request}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
