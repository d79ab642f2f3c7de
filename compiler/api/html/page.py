"""HTML pages from templates, and numbers as people read them.

A report's file loads nothing and runs nothing; a page of the gateway loads its stylesheet alone. What users wrote is
shown as text: the templates escape every value.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

FOLDER = Path(__file__).parent
"""Where the templates are that all pages have in common."""
Tile = tuple[str, str, str]
"""Name, value, note."""


def render(folder: Path, template: str, /, **values: object) -> str:
    """The whole page. template: its path in the folder. values: what it names; functions may be among them. stylesheet:
    where it is served; without one it is part of the page."""
    return _environment(folder).get_template(template).render(values)


@functools.cache
def _environment(folder: Path) -> jinja2.Environment:
    import jinja2  # only a page needs it, and every command imports this module

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, FOLDER]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formats = (milliseconds, seconds, digits, bytes_of, number, plural)
    environment.filters |= {each.__name__: each for each in formats}
    environment.filters |= {"as": format, "lines": _lines}
    environment.globals["stylesheet"] = ""
    return environment


def _printable(value: object) -> object:
    """Characters that are not printable (control, direction) become U+FFFD. HTML that a template wrote itself (jinja2's
    Markup, a subclass of str) stays as it is."""
    if type(value) is not str:
        return value
    return "".join(c if c.isprintable() else "\ufffd" for c in value)


def _lines(text: str) -> Markup:
    """A text whose lines stay lines."""
    from markupsafe import Markup, escape

    return Markup("\n").join(escape(_printable(line.expandtabs())) for line in text.splitlines())


def milliseconds(value: float) -> str:
    if value and abs(value) < 1:
        return f"{digits(value * 1e3)} \N{MICRO SIGN}s"
    return f"{digits(value)} ms"


def seconds(value: float) -> str:
    """The unit is s, min or h."""
    if value >= 7200:
        return f"{value / 3600:,.1f} h"
    return f"{value / 60:.1f} min" if value >= 120 else f"{value:.1f} s"


def digits(value: float) -> str:
    """With three significant digits, and at most three after the point."""
    size = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(max(2 - size, 0), 3)}f}"


def bytes_of(value: float) -> str:
    """A size in powers of 1024."""
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(value) >= size:
            return f"{digits(value / size)} {unit}"
    return f"{value:.0f} B"


def number(value: float) -> str:
    """A metric; very small and very large ones with an exponent."""
    if not math.isfinite(value):
        return str(value)
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def plural(count: int, noun: str) -> str:
    """Like `1 rank` or `2 ranks`."""
    return f"{count} {noun}{'s' * (count != 1)}"
