"""Environment variables that look like settings of ours and are none."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import NamedTuple

_LINKS = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT|PORT)|.*_(SERVICE_)?PORT_\w+")
"""What Kubernetes and Docker set in each container for a service whose name begins as our variables do."""


class UnknownVariable(NamedTuple):
    name: str
    nearest: str
    """The known one that is most like it; '' if none is."""


def unknown_variables(environ: Iterable[str], prefix: str, known: Iterable[str]) -> list[UnknownVariable]:
    """Those with `prefix` that are not in `known`."""
    names = {name.removeprefix(prefix) for name in known}
    found = []
    for variable in sorted(environ):
        name = variable.upper().removeprefix(prefix)
        if name == variable.upper() or name in names or _LINKS.fullmatch(f"_{name}"):
            continue
        nearest = difflib.get_close_matches(name, sorted(names), 1)
        found.append(UnknownVariable(variable, prefix + nearest[0] if nearest else ""))
    return found
