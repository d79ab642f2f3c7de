"""What pages of ours have in common: the document around their parts, and numbers as people read them.

A page loads nothing and runs nothing. What users wrote is shown as text: it goes through `escaped`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from importlib import resources

Tile = tuple[str, str, str]
"""Name, value, note; of HTML."""


def document(title: str, parts: Iterable[str], *, styles: Iterable[str] = ("report.css",)) -> str:
    """The whole page; styles: files beside this one."""
    style = "".join(resources.files(__package__).joinpath(name).read_text() for name in styles)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escaped(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def tiles_of(tiles: Iterable[Tile]) -> str:
    shown = "".join(
        f"<li><strong>{value}</strong><span>{name}</span><small>{note}</small></li>"
        for name, value, note in tiles
    )
    return f'<ul class="tiles">{shown}</ul>'


def escaped(text: str) -> str:
    """Text as text; what a screen would not show as it is (control and direction characters) is a mark."""
    return html.escape("".join(c if c.isprintable() else "\ufffd" for c in text), quote=True)


def milliseconds(value: float) -> str:
    if value and abs(value) < 1:
        return f"{digits(value * 1e3)} &micro;s"
    return f"{digits(value)} ms"


def seconds(value: float) -> str:
    return f"{value / 60:.1f} min" if value >= 120 else f"{value:.1f} s"


def digits(value: float) -> str:
    """Three of them."""
    size = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(max(2 - size, 0), 3)}f}"


def bytes_of(value: float) -> str:
    """In powers of 1024."""
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(value) >= size:
            return f"{digits(value / size)} {unit}"
    return f"{value:.0f} B"


def number(value: float) -> str:
    """A metric, whatever its size."""
    if not math.isfinite(value):
        return str(value)
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
