"""Names the running script, so that the next start of it can prefetch what it used.

There are two names. The exact one covers the script's name, its code, and the names of the options that it was started
with (their values are paths, numbers and secrets, and change from run to run). The loose one has the name of the
script's folder in place of the code, so that an edited script still finds what it used before. Only digests are sent.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_CODE_BYTES = 4 << 20
_OPTION = re.compile(r"--?[A-Za-z][A-Za-z_.-]*")
_OURS = __name__.partition(".")[0]
_NOT_SCRIPTS = frozenset({"torchrelay", "ipykernel_launcher.py", "default_worker.py"})
"""Our own command; Jupyter's kernel; Ray's worker process, whose program comes later."""


def script_names() -> tuple[str, ...]:
    """64 hex digits each, the most exact first; none for a program that will not be recognized again."""
    return _names(sys.argv, sys.orig_argv, sys.modules.get("__main__"))


def _names(argv: Sequence[str], original: Sequence[str], main: Any) -> tuple[str, ...]:
    started, shape = (argv[0] if argv else ""), _shape(argv[1:])
    if started == "-c":
        return (_digest("command", original[-len(argv)], *shape),) if len(original) > len(argv) else ()
    if started in ("", "-m"):  # no script, or a module that is not found yet
        return ()
    module = getattr(getattr(main, "__spec__", None), "name", None) or ""
    path = Path(getattr(main, "__file__", None) or started)
    if module.partition(".")[0] == _OURS or path.name in _NOT_SCRIPTS:
        return ()
    name = module or path.name
    try:
        with path.open("rb") as file:
            code = hashlib.sha256(file.read(_CODE_BYTES)).hexdigest()
    except OSError:
        return ()
    return _digest("script", name, code, *shape), _digest("edited", path.absolute().parent.name, name, *shape)


def _shape(arguments: Iterable[str]) -> list[str]:
    """Names of options, sorted; no values, no positional arguments, no digits (they may be a value: -j8)."""
    return sorted({match[0] for text in arguments if (match := _OPTION.match(text))})


def _digest(*parts: str) -> str:
    made = hashlib.sha256(b"torchrelay script v1\0")
    for part in parts:
        data = part.encode(errors="surrogateescape")
        made.update(len(data).to_bytes(8, "little") + data)
    return made.hexdigest()
